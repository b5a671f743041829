"""How a served model handles a request."""

import asyncio
import dataclasses
import gc
import json

import pytest

pytest.importorskip("starlette")

from served_toys import toy_lookup, toy_model, toy_models

from speccascade_jax.commands import serve
from speccascade_jax.config import DEMO, DecodeConfig, load
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.inference.text import Cascade
from speccascade_jax.serving.app import Limits
from speccascade_jax.serving.engine import Job
from speccascade_jax.serving.models import ServedModel
from speccascade_jax.serving.protocol import parse


def decoding(model, prompt="201", **fields):
    """How the model would decode such a request."""
    return asyncio.run(model.decoding(parse(json.dumps({"prompt": prompt, **fields}).encode(), "completion")))


def served(t5_pair, **fields):
    """A drafter of another vocabulary than the verifier's."""
    run = DecodeConfig(
        drafter=str(DEMO / "e2e_drafter"),
        verifier=str(t5_pair / "verifier"),
        max_source_length=32,
        max_new_tokens=12,
        temperature=1.0,
        **{"block_size": 2, **fields},
    )
    cascade = Cascade.from_config(run)
    return cascade, ServedModel("it", run, cascade, (), rows=2)


def decoded(lane, requests):
    """The results of requests, in their order."""
    ids, results = lane.scheduler.admit(requests), {}
    while lane.scheduler.busy:
        lane.scheduler.run()
        results |= dict(lane.scheduler.finished())
    return [results[number] for number in ids]


@pytest.mark.full
def test_a_drafter_of_another_vocabulary_reads_the_prompt_as_in_a_file(t5_pair):
    cascade, model = served(t5_pair, method="opt", alpha=0.1)
    texts = ["the cat", "a dog sees the cat"]
    way = decoding(model, texts)
    requests = [request._replace(number=number) for number, request in enumerate(way.requests)]
    outputs = cascade.generate(texts, way.settings)
    for result, output in zip(decoded(way.lane, requests), outputs, strict=True):
        assert result.tokens == output.tokens and result.origin == output.origin


@pytest.mark.full
def test_adaptive_blocks_are_served_up_to_each_requests_limit(t5_pair):
    _, model = served(
        t5_pair, method="opt", alpha=0.1, block_size="adaptive", max_block_size=3, stop_below=0.0
    )

    def histogram(**fields):
        way = decoding(model, "the cat", seed=1, **fields)
        [result] = decoded(way.lane, way.requests)
        return result.counts["drafted"], result.counts["rounds"]

    drafted, rounds = histogram(block_size="adaptive")
    assert drafted > 2 * rounds
    drafted, rounds = histogram(max_block_size=1)
    assert drafted <= rounds
    for field, value in (("max_block_size", 4), ("block_size", 2), ("stop_below", 0.5)):
        with pytest.raises(FieldError) as error:
            histogram(**{field: value})
        assert (error.value.field, error.value.value) == (field, value)


def test_changing_a_compiled_setting_is_refused_with_its_field():
    """Whatever else the request changes."""
    model = toy_model()
    for field, value in (
        ("hand_over", "keep"),
        ("verification", "block"),
        ("block_size", 3),
        ("block_size", "adaptive"),
        ("max_tokens", 4),
        ("top_k", 1000),
        ("method", "chow"),
        ("stop", ("x\ufffd",)),
    ):
        with pytest.raises(FieldError) as error:
            decoding(model, **{"seed": 1, "alpha": 0.5, field: value, "min_p": 0.1})
        assert (error.value.field, error.value.value) == (field, value)
    assert decoding(model, hand_over="need", block_size=1, max_block_size=10**300).settings.block_size == 1


def test_a_method_that_verifies_no_drafts_is_served_where_others_verify_them_as_blocks():
    """Unless the request asks for it in so many words."""
    model = toy_model(("speculative", "verifier"), verification="block")
    assert decoding(model).settings.verification == "block"
    for fields in ({"method": "verifier"}, {"speculative": False}):
        assert decoding(model, **fields).settings.verification == "token"
        with pytest.raises(FieldError) as error:
            decoding(model, verification="block", **fields)
        assert (error.value.field, error.value.value) == ("verification", "block")


def test_a_rules_knob_is_the_servers():
    """relaxed_top_k is compiled into the rule; requests choose the rule and its lenience."""
    model = toy_model(("relaxed", "cactus", "relaxed_ratio"))
    for method in ("relaxed", "cactus", "relaxed_ratio"):
        way = decoding(model, method=method, alpha=0.3, relaxed_top_k=10)
        assert (way.settings.method, way.settings.alpha) == (method, 0.3)
    for field, value in (("relaxed_top_k", 3), ("relaxed_top_k", 0), ("relaxed_top_k", 2.5), ("alpha", 2)):
        with pytest.raises(FieldError) as error:
            decoding(model, method="relaxed", **{field: value})
        assert (error.value.field, error.value.value) == (field, value)


def test_the_blocks_of_a_hierarchy_are_fixed():
    model = toy_models(3, ("token_v3", "opt"), alpha=(0.4, 0.05), block_size=(1, 2))
    assert decoding(model, block_size=[1, 2]).lane is decoding(model).lane
    with pytest.raises(FieldError) as error:
        decoding(model, block_size=1)
    assert (error.value.field, error.value.value) == ("block_size", 1)


def test_methods_that_cannot_verify_lookups_are_not_served():
    assert toy_lookup().methods == ("speculative", "token_v3")
    with pytest.raises(FieldError) as error:
        decoding(toy_lookup(), method="opt")
    assert (error.value.field, error.value.value) == ("method", "opt")


def test_a_request_has_a_seed_of_its_own_unless_it_names_one():
    model = toy_model()
    assert decoding(model).settings.seed != decoding(model).settings.seed
    assert decoding(model, seed=7).settings.seed == 7
    assert decoding(model, temperature=0).settings.seed == model.defaults.seed


def test_a_request_is_read_once_for_all_its_choices():
    way = decoding(toy_model(), ["201", "", "12"], n=2, seed=1)
    assert [len(prompt.tokens) for prompt in way.prompts] == [4, 0, 3]
    assert [request and request.number for request in way.requests] == [0, 1, None, None, 0, 1]


def test_log_probabilities_without_a_law_are_refused():
    """Of a drafter that reads its verifier's states, by a rule that defers to it."""
    config = load("demo_shared", DecodeConfig)
    model = ServedModel("shared", config, Cascade.from_config(config), ("opt", "verifier"), rows=1)
    with pytest.raises(FieldError) as error:
        decoding(model, "Where?", method="opt", alpha=0.3, logprobs=1)
    assert (error.value.field, error.value.value) == ("logprobs", 1)
    for fields in ({"method": "opt", "alpha": 0.3}, {"logprobs": 1}, {"method": "verifier", "logprobs": 1}):
        assert decoding(model, "Where?", **fields).requests


@dataclasses.dataclass(frozen=True)
class Another:
    """The verifier as a sampler of which nothing is known but that it is one."""

    sampler: Autoregressive
    level: int = 0
    width: int = 1
    overhang: int = 0

    @property
    def models(self):
        return self.sampler.models

    def step(self, *arguments):
        return self.sampler.step(*arguments)

    def plain(self, counts):
        return self.sampler.plain(counts)


def test_a_sampler_of_the_configs_is_served_without_log_probabilities():
    model = toy_model(
        ("speculative", "ours", "verifier"),
        samplers={"ours": lambda models: Another(Autoregressive(models[-1]))},
    )
    way, alone = (decoding(model, method=method, seed=1, n=4) for method in ("ours", "verifier"))
    assert [result.tokens for result in decoded(way.lane, way.requests)] == [
        result.tokens for result in decoded(alone.lane, alone.requests)
    ]
    assert way.lane.scorer is None and alone.lane.scorer is not None
    with pytest.raises(FieldError) as error:
        decoding(model, method="ours", logprobs=0)
    assert error.value.field == "logprobs"


@pytest.mark.parametrize("waiting,runs", [(0, 1), (2, 1), (40, 4)], ids=["none", "few", "many"])
def test_a_step_hears_of_new_requests_unless_many_wait(waiting, runs, monkeypatch):
    """Otherwise the rows that become free after the few have got theirs would stay empty until it ends."""
    model = toy_model(rows=8)
    way = decoding(model)
    lane, [request] = way.lane, way.requests
    for number in range(8 + waiting):
        job = Job(lane, request._replace(number=number), False, asyncio.Queue())
        lane.jobs[lane.admit(job.request)] = job
    while len(lane.scheduler.waiting) > waiting:
        lane.scheduler.run(1)
    calls, run = [], lane.run
    monkeypatch.setattr(lane, "run", lambda rounds: (calls.append(rounds), run(rounds)))
    monkeypatch.setattr(lane, "called", lambda: True)
    lane.step(1)
    assert len(calls) == runs


def test_once_compiled_a_server_spares_the_collector_what_exists():
    """Or a full collection would now and then stop every request for half a second."""

    async def frozen():
        config = DecodeConfig(drafter="toy", verifier="toy")
        _, engine = serve.application(serve.Arguments(config), Limits(), [toy_lookup()])
        before = gc.get_freeze_count()
        engine.start(asyncio.get_running_loop())
        while not engine.ready:
            assert engine.failed is None, engine.failed
            await asyncio.sleep(0.02)
        engine.stop()
        return gc.get_freeze_count() - before

    try:
        assert asyncio.run(frozen()) > 1000
    finally:
        gc.unfreeze()
