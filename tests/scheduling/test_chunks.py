"""Prompts read in chunks: the same tokens, and running rows wait for at most one chunk."""

import dataclasses

import jax
import numpy as np
import pytest
from schedules import Letters, alone, calls
from shapes import TINY_GEMMA, TINY_T5

from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.models import model_of
from speccascade_jax.models.exits import ExitsConfig
from speccascade_jax.scheduling.chunks import any_continues
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.scheduling.programs import Clock, Plan, Programs
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.settings import Settings
from speccascade_jax.vocabularies.translated import Resized

WIDTH = 40
GEMMA = dataclasses.replace(TINY_GEMMA, num_layers=2)


def pair():
    """A drafter with fewer logits than the verifier, whose windows are shorter than the prompts."""
    model = model_of(GEMMA)
    large = model.init(0)
    small = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, large, model.init(1))
    return Speculative(Autoregressive(Resized(model, 97, 90)), model, METHODS["token_v3"], 3), (small, large)


def exits():
    """Two exits of one network as a hierarchy, whose lower rule leaves no law where a draft has ended."""
    model = model_of(ExitsConfig(dataclasses.replace(TINY_GEMMA, num_layers=3), (1, 2)))
    first, second, full = model.members
    lower = Speculative(Autoregressive(first), second, METHODS["opt"], 2)
    return Speculative(lower, full, METHODS["token_v3"], 3), model.init(0)


def single_model():
    model = model_of(GEMMA)
    return Autoregressive(model), model.init(0)


def bucket(length):
    return WIDTH


def plan_of(sampler, **fields):
    return Plan(sampler, max_new_tokens=12, eos_id=1, vocab_size=97, history=8, **fields)


@pytest.fixture(scope="module")
def asked():
    draw = np.random.default_rng(1)
    sizes = [*draw.integers(1, WIDTH + 1, 10), WIDTH, 1, 2, WIDTH - 1]
    return [
        Request(draw.integers(3, 90, size).tolist(), Settings(temperature=0.8, alpha=0.3), number)
        for number, size in enumerate(sizes)
    ]


@pytest.mark.full(quick=["one-7"])
@pytest.mark.parametrize(
    "make,chunk,kept",
    [(single_model, 7, None), (pair, 1, None), (pair, 30, None), (exits, 7, PrefixCache(10**6))],
    ids=["one-7", "pair-1", "pair-30", "exits-7"],
)
def test_prompts_read_in_chunks_are_continued_as_those_read_whole(make, chunk, kept, asked, monkeypatch):
    """Where they are kept, all are asked for twice."""
    sampler, params = make()
    levels = sampler.level
    asked = [
        request._replace(settings=dataclasses.replace(request.settings, alpha=(0.3,) * max(levels, 1)))
        for request in asked
    ]
    whole = alone(Programs(plan_of(sampler), params, None, Clock()), asked, bucket)
    programs = Programs(plan_of(sampler, chunk=chunk), params, None, Clock())
    scheduler = Continuous(programs, 3, Letters(), bucket, WIDTH, kept)
    times = 1 if kept is None else 2
    results, waiting, ids = {}, [*asked] * times, []
    scheduler.precompile([WIDTH])
    before, called = programs.clock.compilations, calls(programs, monkeypatch)
    while waiting or scheduler.busy:
        arrived, waiting = waiting[:2], waiting[2:]
        ids += scheduler.admit(arrived)
        dropped = scheduler.admit(arrived[-1:])  # wait, are read or run when they are given up
        running = bool(scheduler.running)
        begun, was = len(called), {number for number, _ in scheduler.running.values()}
        scheduler.run(rounds=4)
        # Rows that run stand still for one chunk at most, and each of these for one round.
        assert not running or called[begun:].count("read") <= 1
        assert was <= {number for number, _ in scheduler.running.values()} | {n for n, _ in scheduler.done}
        for number in dropped:
            scheduler.cancel(number)
        results |= dict(scheduler.finished())
    assert [results[number] for number in ids] == whole * times
    assert programs.clock.compilations == before
    chunks = sum(-(-(len(prompt.tokens) - 1) // chunk) for prompt in asked)
    assert called.count("read") >= chunks
    assert kept is None or (called.count("read") < 2 * chunks and called.count("put"))


def test_running_rows_do_a_round_after_every_chunk(asked):
    """A row that runs writes on, a round a chunk, while a long prompt is read; so it does while short ones
    wait for their turns next to idle rows."""
    sampler, params = single_model()
    programs = Programs(plan_of(sampler, chunk=4), params, None, Clock())
    scheduler = Continuous(programs, 4, Letters(), bucket, WIDTH)
    first, *rest = scheduler.admit([asked[-3], asked[10], asked[-2], asked[-3]])
    for chunks in range(1, 11):  # of the 40 tokens
        scheduler.run(rounds=8)
        assert len(scheduler.partial(first).tokens) == chunks
        assert (scheduler.partial(rest[0]) is not None) == (chunks == 10)
    assert scheduler.partial(rest[1]) is None  # not in the same pause
    scheduler.run(rounds=8)
    assert len(scheduler.partial(rest[0]).tokens) == 2 and len(scheduler.partial(rest[1]).tokens) == 1


def test_an_encoder_reads_its_source_as_a_whole():
    model = model_of(dataclasses.replace(TINY_T5, num_encoder_layers=1, num_decoder_layers=1))
    assert not any_continues(Autoregressive(model), model.init(0))
