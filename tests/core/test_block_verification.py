"""Verification, enumerated in float64: the law of the output of verify(), and the number of accepted tokens.

Drafts and targets are random functions of the prefix, and so is where a draft ends: at a token (an end of
sequence), at prefixes, or at its longest. verify() is called at both sides of every chance by which it
decides, and tells the law that it draws the next token from.
"""

import inspect

import enumerated_rounds
import jax
import numpy as np
import pytest
from enumerated_rounds import WAYS, Cases, decided, deviation, enumerated

from speccascade_jax.core import verification


@pytest.fixture(autouse=True, scope="module")
def float64():
    """And draw() returns the law that it is to draw from."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "draw", lambda u, weights: weights / weights.sum(axis=1, keepdims=True))
        decided.clear_cache()
        yield
    decided.clear_cache()


def test_the_law_is_the_targets_and_no_fewer_tokens_are_accepted_than_one_by_one():
    """In 1,000 cases; and more in most."""
    gains = []
    for seed in range(5):
        cases = Cases(seed, 200)
        law, (by_token, by_block) = enumerated(cases)
        np.testing.assert_allclose(law, np.stack([cases.target()] * 2), rtol=0, atol=1e-14)
        np.testing.assert_allclose(by_token, cases.accepted_by_token(), rtol=0, atol=1e-14)
        gains.extend(by_block - by_token)
    assert min(gains) > -1e-12
    assert np.mean(np.array(gains) > 1e-6) > 0.6


@pytest.mark.parametrize("way", ["q", "pi", "proposals", "greedy"])
def test_the_law_with_a_drafter_of_another_vocabulary(way):
    """The drafter lacks tokens (tli, slrs), the verifier lacks some (union), or drafts are one-hot (slem, and
    temperature 0); of these exactly as many are accepted as one by one."""
    cases = Cases(7, 200).joined(way)
    law, (by_token, by_block) = enumerated(cases)
    np.testing.assert_allclose(law, np.stack([cases.target()] * 2), rtol=0, atol=1e-14)
    assert (by_block >= by_token - 1e-12).all()
    if way in ("proposals", "greedy"):
        np.testing.assert_allclose(by_block, by_token, rtol=0, atol=1e-12)


MISTAKES = {
    "w is not cut at 1": ("block_weights", "jnp.minimum(1.0, weights[-1] * ratio)", "weights[-1] * ratio"),
    "the residual is that of pi itself": ("verify", "stopped(weights)[:, None]", "1.0"),
    "weights of the other way": ("verify", "jnp.where(chosen[:, None],", "jnp.where(~chosen[:, None],"),
    "h_n has the formula of the others": ("block_chances", "jnp.where(at_end,", "jnp.where(False,"),
    "the draft is cut at the first failure": (
        "by_block",
        "jnp.max(jnp.where((u < chances) & draft.inside, count, 0), axis=1, initial=0)",
        "jnp.sum(jnp.cumprod((u < chances) & draft.inside, axis=1), axis=1)",
    ),
    "the last token stands by its own ratio": (
        "block_chances",
        "at_end, w,",
        "at_end, _of_drafted(pi, draft) / _of_drafted(draft.probs, draft),",
    ),
    "the bonus comes from the residual": ("verify", "num_accepted == draft.size", "draft.size < 0"),
}
"""The function of core.verification, what stands there, and the mistake in its place."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_detected(mistake, monkeypatch):
    name, right, wrong = MISTAKES[mistake]
    function, made = getattr(verification, name), {}
    source = inspect.getsource(function)
    assert source.count(right) == 1
    exec(source.replace(right, wrong), vars(verification), made)
    monkeypatch.setattr(verification, name, made[name])
    for way in WAYS:
        if way.accept is function:
            monkeypatch.setitem(vars(way), "accept", made[name])
    monkeypatch.setattr(enumerated_rounds, "verify", verification.verify)
    decided.clear_cache()
    _, by_block = deviation(Cases(0, 20))
    decided.clear_cache()
    assert max(by_block) > 1e-3
