"""Drafts that are verified follow their law, by every method; and the pass that a lossless rule spares.

The law is that which enumeration gives: toys.sequence_law shares no code with the package.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import (
    EOS,
    FAIL_BELOW,
    FAMILIES,
    PROMPTS,
    STEPS,
    TABLES,
    TRANSFORMS,
    VOCAB,
    decoded,
    lenience,
    oracle,
    p_value,
    p_values,
    quick,
    unlikely,
)
from toys import TableLM, knows, sequence_law

from speccascade_jax.core.loop import generate
from speccascade_jax.core.methods import Method
from speccascade_jax.core.protocols import NO_TOKEN
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.transforms import SamplingOptions

BY_PREFIX = [name for name, method in METHODS.items() if method.by_prefix]


PAIRS = ("speculative", "speculative"), ("token_v3", "opt"), ("opt", "token_v3"), ("speculative", "chow")
"""Of two verifiers."""


def in_turn(sizes):
    """Each of TRANSFORMS with one of three block sizes."""
    return [(name, sizes[n % 3]) for n, name in enumerate(TRANSFORMS)]


@pytest.mark.parametrize("transform,gamma", quick(*in_turn((2, 5, 1)), among=[("plain", 2), ("min_p", 5)]))
def test_two_models_follow_the_law(transform, gamma, rows):
    settings = [
        ((family,), {"temperature": (0.5, 1.0)[(n + gamma) % 2], **TRANSFORMS[transform]})
        for n, family in enumerate(FAMILIES)
    ]
    assert not unlikely(p_values([tuple(FAMILIES)], [gamma], settings, rows=rows))


@pytest.mark.full
@pytest.mark.parametrize("transform,gamma", quick(*in_turn((5, 1, 2)), among=[("top_k", 1)]))
def test_three_models_follow_the_law(transform, gamma, rows):
    methods = [tuple(dict.fromkeys(names)) for names in zip(*PAIRS, strict=True)]
    settings = [
        (pair, {"temperature": (0.7, 1.0)[(n + gamma) % 2], **TRANSFORMS[transform]})
        for n, pair in enumerate(PAIRS)
        if n % 2 == gamma % 2 or not TRANSFORMS[transform]
    ]
    assert not unlikely(p_values(methods, [2, gamma], settings, rows=rows))


FOURS = [tuple(METHODS)[n : n + 4] for n in range(0, len(METHODS), 4)]
"""Methods that share a program; each one more makes it slower."""


@pytest.mark.full
@pytest.mark.parametrize("methods", FOURS, ids="-".join)
def test_every_method_follows_its_law(methods, rows):
    """At a temperature at which the models' laws are not those that are sampled."""
    settings = [((name,), {"temperature": 0.7}) for name in methods]
    assert not unlikely(p_values([methods], [2], settings, rows=rows))


def chance(method, **options):
    """The p-value of a method's texts, in blocks of 2."""
    return p_value([method], [lenience(method)], [2], **options)


def geometric(scores, alpha):
    """pi in proportion to q~^alpha p~^(1 - alpha): a method that no oracle knows."""
    weights = scores.q_sampled**alpha * scores.p_sampled ** (1 - alpha)
    return weights / weights.sum(-1, keepdims=True), None


def first_drafted(scores, alpha):
    """The drafter's law at the first place of a round, the verifier's after it."""
    first = jnp.arange(scores.q.shape[-2])[:, None] == 0
    return jnp.where(first, alpha * scores.q_sampled + (1 - alpha) * scores.p_sampled, scores.p_sampled), None


@pytest.mark.full
@pytest.mark.parametrize("target,by_prefix", [(geometric, True), (first_drafted, False)])
def test_a_new_entry_of_methods_is_held_against_its_own_target(target, by_prefix, monkeypatch):
    """And a target that gives no distribution is seen."""
    method = Method(target, 0, 1, "new", defers=False, by_prefix=by_prefix)
    monkeypatch.setitem(METHODS, "new", method)
    assert not knows("new") and 0 < lenience("new") < 1
    assert chance("new", rows=20_000) > FAIL_BELOW
    monkeypatch.setitem(
        METHODS, "new", dataclasses.replace(method, target=lambda s, alpha: (target(s, alpha)[0] ** 2, None))
    )
    assert chance("new", rows=20_000) < FAIL_BELOW


@pytest.fixture(scope="module")
def greedy_texts():
    """Each method's texts at temperature 0 and their prompts, 1,024 of them: rows of one program."""
    models, rules = [TableLM(VOCAB)] * 2, [tuple(METHODS[name] for name in BY_PREFIX)]
    number = np.arange(1024 * len(BY_PREFIX)) // 1024
    result, which = decoded(
        hierarchy(models, rules, [3]),
        tuple(TABLES[:2]),
        len(number),
        SamplingOptions(temperature=0.0),
        np.array([lenience(name) for name in BY_PREFIX])[number][:, None],
        methods=number[:, None],
    )
    tokens = np.asarray(result.tokens)
    return {name: (tokens[number == n], which[number == n]) for n, name in enumerate(BY_PREFIX)}


@pytest.mark.parametrize("method", BY_PREFIX)
def test_every_method_at_temperature_zero(method, greedy_texts):
    tokens, which = greedy_texts[method]
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(
            TABLES[:2], [oracle(method)], [lenience(method)], prompt, steps=STEPS, eos=EOS, temperature=0.0
        )
        assert {tuple(int(t) for t in row if t >= 0) for row in tokens[which == n]} == set(law)


@pytest.mark.full
@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("outer", [None, "speculative", "opt"])
def test_a_lossless_drafter_spares_a_pass_and_nothing_else(outer, gamma):
    """The same tokens as with the pass that a lossless rule does not need, for a pass less each round."""

    def run(lossless):
        method = dataclasses.replace(METHODS["speculative"], lossless=lossless)
        methods, sizes = ([method], [gamma]) if outer is None else ([method, METHODS[outer]], [gamma, 6])
        sampler = hierarchy([TableLM(VOCAB)] * (len(methods) + 1), methods, sizes)
        params = (TABLES[0], TABLES[1]) if outer is None else ((TABLES[0], TABLES[1]), TABLES[2])
        keys, ones = jax.vmap(jax.random.key)(jnp.arange(512)), np.ones((512, 1), np.int32)
        return generate(
            sampler,
            params,
            keys,
            ones,
            ones[:, 0],
            SamplingOptions(),
            jnp.full(len(methods), 0.05),
            max_new_tokens=20,
            eos_id=EOS if outer is None else NO_TOKEN,
        )  # at an end neither reads on

    spared, whole = run(True), run(False)
    for name in ("tokens", "origin", "length"):
        np.testing.assert_array_equal(getattr(spared, name), getattr(whole, name))
    passes = [r.counts[0] if outer is None else r.counts[0][0] for r in (whole, spared)]
    rounds = [r.counts[1].rounds if outer is None else r.counts[0][1].rounds for r in (whole, spared)]
    np.testing.assert_array_equal(rounds[0], rounds[1])
    np.testing.assert_array_equal(passes[0] - passes[1], rounds[0])
