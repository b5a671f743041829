"""The scheduler: whatever shares a batch, each request has the same result as alone."""

import dataclasses

import jax
import numpy as np
import pytest
from schedules import Letters, calls, run
from schedules import alone as alone_in
from shapes import TINY_GEMMA, TINY_T5

from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.models import model_of
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.programs import Clock, Plan, Programs
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import Scheduler
from speccascade_jax.settings import Settings

WIDTHS = (8, 24)


def bucket(length):
    return next(width for width in WIDTHS if width >= length)


@pytest.fixture(scope="module", params=["t5", pytest.param("gemma", marks=pytest.mark.full)])
def programs(request):
    model = model_of(
        {
            "t5": dataclasses.replace(TINY_T5, num_encoder_layers=1, num_decoder_layers=1),
            "gemma": dataclasses.replace(TINY_GEMMA, num_layers=2),
        }[request.param]
    )
    large = model.init(0)
    small = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, large, model.init(1))
    sampler = Speculative(Autoregressive(model), model, METHODS["token_v3"], 3)
    plan = Plan(sampler, max_new_tokens=16, eos_id=1, vocab_size=97, history=8)
    return Programs(plan, (small, large), None, Clock())


def alone(programs, requests):
    return alone_in(programs, requests, bucket)


@pytest.fixture
def requests():
    draw = np.random.default_rng(1)
    rows = [draw.integers(3, 60, size).tolist() for size in draw.integers(1, WIDTHS[-1] + 1, 24)]
    return [Request(row, Settings(temperature=0.8, alpha=0.3), number) for number, row in enumerate(rows)]


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [8, 2])
def test_rows_of_all_widths_refill_each_other(programs, requests, batch_size, monkeypatch):
    expected = alone(programs, requests)
    scheduler = Scheduler(programs, batch_size, Letters(), bucket)
    scheduler.precompile(WIDTHS)
    before, called = programs.clock.compilations, calls(programs, monkeypatch)
    assert run(scheduler, requests) == expected
    assert programs.clock.compilations == before  # what was compiled ahead is all that is needed
    assert called.count("refill") > 5


@pytest.mark.full
def test_a_row_may_be_asked_for_more_than_the_batch_was_begun_with(programs, requests):
    """Wide inputs come after narrow ones: the batch becomes wider."""
    ordered = sorted(requests, key=lambda request: len(request.tokens))
    scheduler, results = Scheduler(programs, 4, Letters(), bucket), {}
    first = scheduler.admit(ordered[:6])
    scheduler.run(rounds=2)
    later = scheduler.admit(ordered[-6:])
    while scheduler.busy:
        scheduler.run(rounds=1)
        results |= dict(scheduler.finished())
    assert [results[n] for n in (*first, *later)] == alone(programs, [*ordered[:6], *ordered[-6:]])


@pytest.mark.full(quick=["t5-1"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_cancelled_request_changes_nothing_for_others(programs, requests, batch_size):
    expected = alone(programs, requests[:6])
    scheduler, results = Scheduler(programs, batch_size, Letters(), bucket), {}
    ids = scheduler.admit(requests[:6])
    scheduler.cancel(ids[0])  # still waiting
    scheduler.run(rounds=1)
    running = next(number for number in ids if scheduler.partial(number) is not None)
    begun = scheduler.partial(running).tokens
    assert begun == expected[ids.index(running)].tokens[: len(begun)] != []
    scheduler.cancel(running)
    while scheduler.busy:
        results |= dict(scheduler.finished())
        scheduler.run()
    results |= dict(scheduler.finished())
    assert {n: results[n] for n in ids if n in results} == {
        n: expected[k] for k, n in enumerate(ids) if n not in (ids[0], running)
    }


@pytest.mark.full(quick=["t5-1"])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_stop_sequences_cut_rows_that_go_on_being_refilled(programs, requests, batch_size, monkeypatch):
    """Tokens up to the stop sequence; counts up to the round that wrote it, wherever anybody looked."""
    whole = alone(programs, requests)
    letters = Letters()
    stop = tuple(
        letters.decode(result.tokens[n : n + 1])
        for result, n in zip(whole[:4], (3, 7, 5, 9), strict=True)
        if len(result.tokens) > n
    )
    stopping = [request._replace(stop=stop) for request in requests]

    def every_round():
        rows = []
        for request in stopping:
            scheduler = Scheduler(programs, 1, letters, bucket)
            [number], results = scheduler.admit([request]), {}
            while scheduler.busy:
                scheduler.run(rounds=1)
                results |= dict(scheduler.finished())
            rows.append(results[number])
        return rows

    expected = every_round()
    assert any(len(cut.tokens) < len(full.tokens) for cut, full in zip(expected, whole, strict=True))
    called = calls(programs, monkeypatch)
    assert run(Scheduler(programs, batch_size, letters, bucket), stopping) == expected
    rounds = sum(result.counts["rounds"] for result in expected)
    assert called.count("run") < rounds / 2  # the host does not look after every round
    for cut, full in zip(expected, whole, strict=True):
        assert cut.tokens == full.tokens[: len(cut.tokens)]
        assert len(cut.tokens) <= cut.counts["emitted"] < len(cut.tokens) + 4


# A server's scheduler


@pytest.fixture(scope="module")
def served(programs):
    """The same with everything that a row may choose."""
    plan = dataclasses.replace(
        programs.plan, truncations=("top_k", "top_p", "min_p"), bounds=(("top_k", 32),), ragged=True
    )
    return Programs(plan, programs.params, None, Clock())


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [3, 6])
def test_a_continuous_batch_gives_each_row_the_same_as_alone(
    programs, served, requests, batch_size, monkeypatch
):
    """In the order they came, one by one, of all block sizes, some with top-p, while others are cancelled.
    The batch is narrow as long as it can be."""
    asked = [
        request._replace(
            tokens=request.tokens[: WIDTHS[number >= 8]],
            settings=dataclasses.replace(
                request.settings, block_size=(3, 1)[number % 2], top_p=0.9 if number // 8 % 2 else None
            ),
        )
        for number, request in enumerate(requests)
    ]
    plan = dataclasses.replace(programs.plan, truncations=("top_p",), history=0)
    in_ones = dataclasses.replace(plan, sampler=dataclasses.replace(plan.sampler, block_size=1))
    by_size = {
        3: Programs(plan, programs.params, None, Clock()),
        1: Programs(in_ones, programs.params, None, Clock()),
    }
    expected = [alone(by_size[request.settings.block_size], [request])[0].tokens for request in asked]
    scheduler, outputs, order = Continuous(served, batch_size, Letters(), bucket, WIDTHS[-1]), {}, []
    scheduler.precompile(WIDTHS)
    before, called = served.clock.compilations, calls(served, monkeypatch)
    waiting = list(asked)
    ids, widths = [], set()
    while waiting or scheduler.busy:
        arrived, waiting = waiting[:batch_size], waiting[batch_size:]
        ids += scheduler.admit(arrived)
        dropped = scheduler.admit(arrived[:1])
        scheduler.run(rounds=1)
        widths.add(scheduler.width)
        for number in dropped:
            scheduler.cancel(number)
        finished = dict(scheduler.finished())
        outputs |= {number: result.tokens for number, result in finished.items()}
        order += finished
    assert [outputs[number] for number in ids] == expected
    assert served.clock.compilations == before and widths == {*WIDTHS}
    # Prompts are read one by one where three rows share, a few at once where six do.
    assert (called.count("begin") > len(ids)) == (batch_size == 3)
    places = [order.index(number) for number in ids]
    assert max(abs(place - n) for n, place in enumerate(places)) < 12  # nobody waits for longer texts


def test_rows_draft_blocks_of_their_own_sizes(served, requests):
    sized = [
        request._replace(settings=dataclasses.replace(request.settings, block_size=1 + n % 3))
        for n, request in enumerate(requests[:6])
    ]
    for request, result in zip(sized, run(Scheduler(served, 3, Letters(), bucket), sized), strict=True):
        size, rounds = request.settings.block_size, result.counts["rounds"]
        assert (size - 1) * rounds < result.counts["drafted"] <= size * rounds  # fewer where a draft ends


def test_prompts_of_like_lengths_are_read_together(served):
    """The first waiting request is always among them, and the others keep their order."""
    scheduler = Continuous(served, 6, Letters(), bucket, WIDTHS[-1])
    scheduler.admit([Request([1] * size, Settings()) for size in (3, 20, 4, 5, 21, 6, 7)])
    groups = []
    while scheduler.waiting:
        scheduler._call_up(3)
        groups.append([scheduler.waiting.pop()[0] for _ in range(min(3, len(scheduler.waiting)))])
    assert groups == [[0, 2, 3], [1, 4, 5], [6]]
