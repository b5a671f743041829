"""Rounds enumerated in float64: every draft, and both sides of every chance by which verify() decides.

draw() must return the law that it is to draw from: see float64 in tests/core/test_block_verification.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core import verification
from speccascade_jax.core.verification import BLOCK, TOKEN, Draft, verify

VOCAB, LONGEST = 3, 3
STRINGS = np.array([*itertools.product(range(VOCAB), repeat=LONGEST)])
CELLS = np.array([*itertools.product((0, 1), repeat=LONGEST)])  # below each chance, or above it
WAYS = TOKEN, BLOCK


def prefixes(size):
    """Of each string, the number of its first `size` tokens."""
    return np.arange(len(STRINGS)) // VOCAB ** (LONGEST - size)


class Cases:
    """Laws q and pi by prefix: for each size [cases, VOCAB**size, VOCAB]; and where drafts end."""

    def __init__(self, seed, count):
        rng = np.random.default_rng(seed)
        sharpness = rng.choice([0.2, 1.0, 5.0], (count, 1, 1))
        short, eos = rng.choice([0.0, 0.3], (count, 1)), rng.choice([VOCAB - 1, VOCAB], (count, 1))
        self.q, self.pi, self.ends = [], [], []
        for size in range(LONGEST + 1):
            for laws in (self.q, self.pi):
                weights = rng.gamma(sharpness, size=(count, VOCAB**size, VOCAB))
                laws.append(weights / weights.sum(axis=-1, keepdims=True))
            last = np.arange(VOCAB**size) % VOCAB if size else -1
            self.ends.append((size == LONGEST) | (rng.random((count, VOCAB**size)) < short) | (last == eos))
        self.rng = rng

    def joined(self, way):
        """As the ways to join two vocabularies make them: one of the two lacks a token, or drafts are given;
        or as temperature 0 makes drafts."""
        for size, (q, pi) in enumerate(zip(self.q, self.pi, strict=True)):
            only = np.eye(VOCAB)[self.rng.integers(VOCAB, size=q.shape[:2])]
            if way == "proposals":
                self.q[size] = only
            elif way == "greedy":
                self.q[size] = np.eye(VOCAB)[q.argmax(axis=-1)]
            else:
                law = np.where(only, 0.0, {"q": q, "pi": pi}[way] + 1e-3)
                vars(self)[way][size] = law / law.sum(axis=-1, keepdims=True)
        return self

    def target(self):
        """The law of LONGEST + 1 tokens."""
        law = np.ones((len(self.pi[0]), 1))
        for pi in self.pi:
            law = (law[..., None] * pi).reshape(len(pi), -1)
        return law

    def along(self, laws):
        """[cases, strings, LONGEST + 1, VOCAB]"""
        return np.stack([laws[size][:, prefixes(size)] for size in range(LONGEST + 1)], axis=2)

    def drafts(self):
        """Every string as a draft, and its chance; what follows a draft's end is any of them, and unread."""
        ended = np.stack([self.ends[size][:, prefixes(size)] for size in range(LONGEST + 1)], axis=2)
        size, q = ended.argmax(axis=2), self.along(self.q)
        drawn = np.take_along_axis(q[:, :, :-1], STRINGS[..., None][None], axis=3)[..., 0]
        chance = np.where(np.arange(LONGEST) < size[..., None], drawn, 1 / VOCAB).prod(axis=2)
        tokens = np.broadcast_to(STRINGS, (*size.shape, LONGEST))
        return Draft(*(jnp.asarray(x.reshape(-1, *x.shape[2:])) for x in (tokens, q, size))), chance

    def accepted_by_token(self):
        """The accepted tokens expected where each is accepted by itself."""
        stands, total = np.ones((len(self.q[0]), 1)), 0.0
        for q, pi, ends in zip(self.q[:-1], self.pi, self.ends, strict=False):
            stands = ((stands * ~ends)[..., None] * np.minimum(q, pi)).reshape(len(q), -1)
            total += stands.sum(axis=1)
        return total


@jax.jit
def decided(draft, pi):
    """Of each way, draft and cell: its volume, how many tokens are accepted and the law of the next one."""
    drafted = [jnp.take_along_axis(x[:, :-1], draft.tokens[..., None], 2)[..., 0] for x in (pi, draft.probs)]
    ratio = drafted[0] / jnp.where(drafted[1] > 0, drafted[1], 1.0)
    chances = jnp.clip(jnp.stack([ratio, verification.block_chances(draft, pi)[0]]), 0, 1)
    chances, above = chances[:, :, None], CELLS == 1
    volume = jnp.where(draft.inside[:, None], jnp.where(above, 1 - chances, chances), 0.5).prod(axis=-1)
    edges = jnp.where(above, jnp.minimum(chances * (1 + 1e-9), 1), chances * (1 - 1e-9))

    def all_rows(x):
        return jnp.broadcast_to(x[None, :, None], (*volume.shape, *x.shape[1:])).reshape(-1, *x.shape[1:])

    rows = Draft(*map(all_rows, draft))
    way = jnp.repeat(jnp.arange(len(WAYS)), len(rows.size) // len(WAYS))
    u = edges.reshape(-1, LONGEST)
    number, law = verify(u, jnp.zeros((len(u), LONGEST + 1)), rows, all_rows(pi), WAYS, way)
    return volume, number.reshape(volume.shape), law.reshape(*volume.shape, VOCAB)


def enumerated(cases):
    """Of each way: the law of what a round writes, continued by pi to LONGEST + 1 tokens; the accepted tokens
    expected."""
    draft, chance = cases.drafts()
    pi = cases.along(cases.pi)
    volume, number, after = decided(draft, jnp.asarray(pi.reshape(-1, *pi.shape[2:])))
    shape = len(WAYS), *chance.shape, len(CELLS)
    mass = np.asarray(volume).reshape(shape) * chance[..., None]
    number, after = np.asarray(number).reshape(shape), np.asarray(after).reshape(*shape, VOCAB)
    law = np.ones(())
    for count in range(LONGEST + 1):
        here = np.where(number == count, mass, 0.0)[..., None]
        written = np.where(here > 0, here * after, 0.0).sum(axis=3)
        written = written.reshape(*shape[:2], VOCAB**count, -1, VOCAB).sum(axis=3)
        if count:
            written += law[..., None] * cases.pi[count]
        law = written.reshape(*shape[:2], -1)
    return law, (mass * number).sum(axis=(2, 3))


def deviation(cases):
    """How far each way's law is from the target's, in each case."""
    law, _ = enumerated(cases)
    return np.abs(law - cases.target()).max(axis=-1)
