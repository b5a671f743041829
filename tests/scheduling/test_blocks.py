"""Block sizes that follow the load: which are chosen, and that texts keep their law."""

import dataclasses
import random

import numpy as np
import pytest
from schedules import Letters
from shapes import TINY_T5
from toys import Endless, TableLM, table

from speccascade_jax.config import DEMO, DecodeConfig
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import ExitsConfig, model_of
from speccascade_jax.scheduling.blocks import ACCEPTANCE, Acceptance, Blocks, Seen, sizes_up_to
from speccascade_jax.scheduling.continuous import Timed
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.settings import Settings

SIZES = (0, 1, 3)
TEXTS = [text * 2 for text in ("201", "1", "02", "2210", "120", "0", "11", "210")]


def test_sizes_are_halves():
    assert [sizes_up_to(n) for n in (1, 3, 5, 12)] == [(0, 1), (0, 1, 3), (0, 1, 2, 5), (0, 1, 3, 6, 12)]


def rounds(rate, limits, count, seed=0):
    """What `count` rounds of each row count whose drafted tokens are accepted with chance `rate` each."""
    draw = np.random.default_rng(seed)
    histogram = np.zeros((len(limits), max(SIZES) + 1), int)
    for row, limit in enumerate(limits):
        accepted = np.cumprod(draw.random((count, limit)) < rate, axis=1).sum(axis=1)
        histogram[row] = np.bincount(accepted, minlength=max(SIZES) + 1)
    emitted = (histogram * np.arange(1, max(SIZES) + 2)).sum(axis=1)
    return Seen(histogram, emitted, np.array(limits))


def test_expected_tokens_follow_the_observed_rounds():
    expected = [sum(0.5**j for j in range(n + 1)) for n in range(max(SIZES) + 1)]
    acceptance = Acceptance(max(SIZES))
    assert acceptance.tokens()[1] == 1 + ACCEPTANCE
    for seed in range(20):
        acceptance.learn(rounds(0.5, [3, 3, 1], 30, seed))
    assert np.allclose(acceptance.tokens(), expected, atol=0.08)


def test_untested_positions_inherit_the_position_before():
    acceptance = Acceptance(max(SIZES))
    for seed in range(20):
        acceptance.learn(rounds(0.3, [1], 100, seed))
    assert np.allclose(acceptance.tokens(), [1, 1.3, 1.39, 1.417], atol=0.04)


def test_old_observations_are_forgotten():
    """A server that no longer drafts eventually tries again, because the texts may have changed."""
    acceptance = Acceptance(max(SIZES))
    for seed in range(20):
        acceptance.learn(rounds(0.1, [3], 100, seed))
    before = acceptance.tokens()[1]
    for _ in range(100):
        acceptance.learn(rounds(0.1, [0], 200))
    assert before < 1.2 and acceptance.tokens()[1] > 1.7


@pytest.mark.parametrize(
    "seconds,size",
    [({0: 1.0, 1: 1.1, 3: 1.2}, 3), ({0: 1.0, 1: 1.2, 3: 3.0}, 1), ({0: 1.0, 1: 2.0, 3: 4.0}, 0)],
)
def test_the_size_with_the_most_tokens_per_second_is_chosen(seconds, size):
    """Of as many rows as run; what was measured of other programs does not matter."""
    blocks = Blocks(SIZES)
    blocks.seconds = {"this": seconds, "other": {0: 9.0, 1: 1.0, 3: 9.0}}
    assert blocks.choose("this", [3] * 4, least=0) == size == blocks.size
    assert blocks.choose("this", [3] * 4, least=3) == 3
    assert blocks.choose("unmeasured", [3], least=0) == 3


def test_a_little_more_is_not_worth_a_change():
    blocks = Blocks(SIZES)
    tokens = blocks.acceptance.tokens()
    for share, size in ((1.02, 3), (1.05, 0), (0.98, 0), (0.95, 3)):
        blocks.seconds["this"] = {0: 1.0, 3: share * tokens[3]}
        assert blocks.choose("this", [3], least=0) == size, share


@pytest.fixture(scope="module")
def cascade():
    models = TableLM(4), TableLM(4)
    return Cascade(models, (table(39, 4), table(40, 4)), Endless(), max_source_length=16, max_new_tokens=12)


def lane_of(cascade, settings):
    [lane] = cascade.lanes([settings]).values()
    plan = dataclasses.replace(lane.plan, ragged=True, block_sizes=SIZES)
    return lane._replace(plan=plan)


def decoded(cascade, settings, keeps=lambda n: False, rows=3, texts=TEXTS, look=lambda scheduler: None):
    """The results of texts in one server's scheduler, whose sizes are drawn at random, and those sizes;
    `look` is called after turns that have drafted."""
    lane = lane_of(cascade, dataclasses.replace(settings[0], block_size=3))
    scheduler = cascade.steady_scheduler(lane.plan, lane.params, rows, cascade.max_source_length)
    sizes, draw = [], random.Random(1)

    def at_random(program, limits, least):
        allowed = [size for size in SIZES if size >= least and (size or program.lossless)]
        again = [sizes[-1]] if sizes and sizes[-1] in allowed and draw.random() < 0.6 else allowed
        sizes.append(draw.choice(again))
        scheduler.blocks.size = sizes[-1]
        return sizes[-1]

    scheduler.blocks.choose = at_random
    tokens, _ = cascade.encode(texts)
    read = cascade.foreign_readings(texts)
    ids = scheduler.admit(
        Request(row, each, n, lane.numbers(each), foreign=foreign, keeps_size=keeps(n))
        for n, (row, each, foreign) in enumerate(zip(tokens, settings, read, strict=True))
    )
    results = {}
    while scheduler.busy:
        scheduler.run(1)
        if sizes[-1]:
            look(scheduler)
        results |= dict(scheduler.finished())
    return [results[number] for number in ids], sizes


def check_what_was_read(scheduler):
    """The toy drafter's cache holds the tokens of each running text but the spared bonus and the last."""
    cache, start = scheduler.state.caches[0], np.asarray(scheduler.state.rows.start)
    for row, (_, request) in scheduler.running.items():
        text = [*request.tokens, *scheduler._written(row)]
        size = int(cache.length[row])
        assert start[row] - 2 <= size <= start[row] - 1 == len(text) - 1
        assert np.asarray(cache.tokens)[row, :size].tolist() == text[:size]


def test_greedy_texts_are_the_verifiers_whatever_the_sizes(cascade):
    settings = Settings(block_size=3)
    results, sizes = decoded(cascade, [settings] * len(TEXTS), look=check_what_was_read)
    assert set(sizes) == set(SIZES)
    alone = cascade.generate(TEXTS, settings, method="verifier")
    assert [result.tokens for result in results] == [output.tokens for output in alone]
    assert sum(result.counts["emitted"] for result in results) == sum(len(r.tokens) for r in results)
    assert sum(result.counts["accepted"] for result in results) > 0


def exits():
    """A network whose first decoder layer drafts."""
    layers = dataclasses.replace(TINY_T5, num_encoder_layers=1, num_decoder_layers=2)
    network = model_of(ExitsConfig(layers, layers=(1,)))
    params = network.init(0)
    return Cascade(network.members, (params, params), Letters(), max_source_length=16, max_new_tokens=12)


@pytest.mark.full
@pytest.mark.parametrize("models", ["members of a network", "a foreign drafter"])
def test_other_drafters_catch_up_too(models, t5_pair):
    texts = TEXTS
    if models == "members of a network":
        cascade = exits()
    else:
        texts = 4 * ["the cat", "a dog sees the cat", "the dog"]
        run = DecodeConfig(
            drafter=str(DEMO / "e2e_drafter"),
            verifier=str(t5_pair / "verifier"),
            max_source_length=32,
            max_new_tokens=12,
        )
        cascade = Cascade.from_config(run)
        assert cascade.foreign
    settings = Settings(block_size=3)
    results, sizes = decoded(cascade, [settings] * len(texts), texts=texts)
    assert set(sizes) == set(SIZES)
    alone = cascade.generate(texts, settings, method="verifier")
    assert [result.tokens for result in results] == [output.tokens for output in alone]


@pytest.mark.full
def test_a_row_that_keeps_its_block_size_writes_the_same_as_alone(cascade):
    """Tokens, origins and counts, in a batch with others whose sizes change; without that they change."""
    settings = [Settings(block_size=1 + n % 3, temperature=1.0, seed=7) for n in range(len(TEXTS))]
    wanted = [*cascade.generate(TEXTS, settings)]
    kept, sizes = decoded(cascade, settings, keeps=lambda n: n % 2 == 0)
    others, _ = decoded(cascade, settings)
    assert len(set(sizes)) > 1
    for n, (result, output) in enumerate(zip(kept, wanted, strict=True)):
        if n % 2 == 0:
            assert (result.tokens, result.origin) == (output.tokens, output.origin)
            assert result.counts["rounds"] == output.counts["rounds"]
    assert any(
        result.origin != output.origin
        for n, (result, output) in enumerate(zip(others, wanted, strict=True))
        if n % 2 == 0
    )


def test_a_lossy_rule_is_never_decoded_by_the_verifier_alone(cascade):
    """Its law needs the drafter's at every position."""
    lane = lane_of(cascade, Settings(method="opt", alpha=0.1, block_size=3))
    scheduler = cascade.steady_scheduler(lane.plan, lane.params, 2, 16)
    scheduler.measure(Settings(method="opt", alpha=0.1, block_size=3), scheduler.widths[:1], (True,))
    [(program, seconds)] = scheduler.blocks.seconds.items()
    assert program == Timed(2, scheduler.widths[0], True, False) and sorted(seconds) == [1, 3]
    assert all(value > 0 for value in seconds.values())


def test_a_server_learns_what_its_rows_count(cascade):
    settings = Settings(block_size=3, temperature=1.0)
    lane = lane_of(cascade, settings)
    scheduler = cascade.steady_scheduler(lane.plan, lane.params, 3, 16)
    taught, learn = [], scheduler.blocks.acceptance.learn
    scheduler.blocks.acceptance.learn = lambda seen: (taught.append(seen), learn(seen))
    tokens, _ = cascade.encode(TEXTS)
    scheduler.admit(Request(row, settings, n, (0,)) for n, row in enumerate(tokens))
    counts = []
    while scheduler.busy:
        scheduler.run(2)
        counts += [result.counts for _, result in scheduler.finished()]
    assert sum(seen.emitted.sum() for seen in taught) == sum(row_counts["emitted"] for row_counts in counts)
    histogram = sum(seen.histogram.sum(axis=0) for seen in taught)
    assert histogram.tolist() == np.sum([row_counts["histogram"] for row_counts in counts], axis=0).tolist()
