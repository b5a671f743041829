"""Requests that begin like others, what each writes alone, and schedulers that keep what they have read."""

import dataclasses

import numpy as np
from digests import Digest, logits
from schedules import Letters, alone

from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.programs import Clock, Plan, Programs
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import Scheduler
from speccascade_jax.settings import Settings
from speccascade_jax.vocabularies.translated import Resized

WIDTH, CHUNK = 44, 4
HOW = Settings(temperature=0.8, alpha=0.3)


def bucket(length):
    return WIDTH


def pair(seed=0):
    large = logits(seed, 97)
    model = Digest(97)
    sampler = Speculative(Autoregressive(Resized(model, 97, 90)), model, METHODS["token_v3"], 3)
    return sampler, (logits(seed + 1, 97, large), large)


def hierarchy():
    large = logits(0, 97)
    model = Digest(97)
    lower = Speculative(Autoregressive(model), Digest(97), METHODS["opt"], 2)
    sampler = Speculative(lower, model, METHODS["token_v3"], 3)
    return sampler, ((logits(1, 97, large), logits(2, 97, large)), large)


def programs_of(sampler, params, mesh=None, prefixes=None, **fields):
    plan = Plan(sampler, **{"max_new_tokens": 8, "eos_id": 1, "vocab_size": 97, "history": 8, **fields})
    return Programs(plan, params, mesh, Clock(), prefixes)


def requests_like(count, levels=1, seed=0):
    """Requests that begin like others, to any point of three texts. Of these one ends like another."""
    draw = np.random.default_rng(seed)
    heads = [draw.integers(3, 90, 24).tolist() for _ in range(3)]
    heads[1][:10] = heads[0][:10]
    heads[2][8:] = heads[0][8:]
    settings = dataclasses.replace(HOW, alpha=(0.3,) * levels)
    return [
        Request(
            heads[draw.integers(3)][: draw.integers(0, 25)]
            + draw.integers(3, 90, draw.integers(1, 20)).tolist(),
            settings,
            number,
        )
        for number in range(count)
    ]


def served(programs, kept, asked, rows=3):
    """What a server's scheduler gives for requests that come two at a time, and some of which are given up;
    and how many tokens of each prompt it has found."""
    scheduler = Continuous(programs, rows, Letters(), bucket, WIDTH, kept)
    scheduler.precompile([WIDTH])
    before, results, waiting, ids = programs.clock.compilations, {}, [*asked], []
    while waiting or scheduler.busy:
        arrived, waiting = waiting[:2], waiting[2:]
        ids += scheduler.admit(arrived)
        dropped = scheduler.admit(arrived[-1:])
        scheduler.run(rounds=3)
        for number in dropped:
            scheduler.cancel(number)
        results |= dict(scheduler.finished())
        assert kept is None or kept.bytes <= kept.limit
    assert programs.clock.compilations == before
    return [results[number] for number in ids], [scheduler.cached[number] for number in ids]


class Case:
    """Requests, what each writes alone, and the programs of a server for them."""

    def __init__(self, sampler, params, asked, **fields):
        self.sampler, self.params, self.asked = sampler, params, asked
        self.whole = alone(programs_of(sampler, params, **fields), asked, bucket)
        self.programs = programs_of(sampler, params, chunk=CHUNK, **fields)


def decoded(programs, kept, asked, rows, others=()):
    scheduler = Scheduler(programs, rows, Letters(), bucket, None, kept)
    ids, results = scheduler.admit(asked), {}
    scheduler.prompts.expect([*zip(ids, asked, strict=True)], others)
    while scheduler.busy:
        scheduler.run()
        results |= dict(scheduler.finished())
    return [results[number] for number in ids]
