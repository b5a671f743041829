"""Planted bugs: the law test must fail on each, for the families that can show it."""

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
    VOCAB,
    decoded,
    p_value,
    quick,
)
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core import loop, verification
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Speculative, hierarchy
from speccascade_jax.core.samplers import speculative as samplers
from speccascade_jax.core.transforms import SamplingOptions


def with_p(monkeypatch, wrong):
    """Every verification becomes wrong(verify, p~, its arguments ...)."""
    step, verify = Speculative.step, samplers.verify

    def patched(self, params, caches, rows, eos_id):
        def knowing_p(accept_u, draw_u, draft, pi, *ways):
            tokens = jnp.concatenate([rows.last[:, None], draft.tokens], axis=1)
            logits, _ = self.verifier.extend(params[1], tokens, caches[1])
            return wrong(verify, samplers.token_probs(logits, rows.options), accept_u, draw_u, draft, pi)

        monkeypatch.setattr(samplers, "verify", knowing_p)
        return step(self, params, caches, rows, eos_id)

    monkeypatch.setattr(Speculative, "step", patched)


def bonus_from_p(monkeypatch):
    """The bonus drawn from p~ (the preprint's print) instead of pi."""
    with_p(
        monkeypatch,
        lambda verify, p, accept_u, draw_u, draft, pi: verify(
            accept_u, draw_u, draft, pi.at[:, -1].set(p[:, -1])
        ),
    )


def residual_of_p(monkeypatch):
    """The residual max(0, p - q) whatever the target."""

    def wrong(verify, p, accept_u, draw_u, draft, pi):
        right = verify(accept_u, draw_u, draft, pi)
        at = right.num_accepted[:, None]
        weights = verification.residual(
            *(jnp.take_along_axis(x, at[..., None], 1)[:, 0] for x in (p, draft.probs))
        )
        token = verification.draw(jnp.take_along_axis(draw_u, at, 1)[:, 0], weights)
        bonus = right.num_accepted == draft.tokens.shape[1]
        return right._replace(next_token=jnp.where(bonus, right.next_token, token))

    with_p(monkeypatch, wrong)


def no_roll_back(monkeypatch):
    """The verifier's cache keeps the first rejected token."""
    roll_back = samplers.roll_back

    def late(models, caches, length):
        rolled = roll_back(models, caches, length)
        if type(models) is not tuple:
            return rolled
        return rolled[0], caches[1]._replace(length=jnp.minimum(caches[1].length, length + 1))

    monkeypatch.setattr(samplers, "roll_back", late)


def one_uniform(monkeypatch):
    """Every drafted position of a block accepts with the same uniform."""
    monkeypatch.setattr(
        samplers,
        "verify",
        lambda accept_u, *others: verification.verify(
            jnp.broadcast_to(accept_u[:, :1], accept_u.shape), *others
        ),
    )


def shared_key(monkeypatch):
    """Drafting and accepting share a random number."""
    noise = loop.noise

    def shared(*args):
        made = noise(*args)
        return made._replace(levels=tuple(jnp.broadcast_to(x[:, :1], x.shape) for x in made.levels))

    monkeypatch.setattr(loop, "noise", shared)


def own_of_sampled_p(monkeypatch):
    """A drafter's own law is built from p~ in place of p."""
    target, kept = Speculative.target, {}

    def wrong(self, scores, rows, tokens):
        if scores.q_sampled is scores.q:
            scores = scores._replace(p_sampled=kept[self.level])
        kept[self.level] = scores.p_sampled
        return target(self, scores, rows, tokens)

    monkeypatch.setattr(Speculative, "target", wrong)


def own_is_sampled_pi(monkeypatch):
    """A drafter's own law is the one it samples from."""
    target, kept = Speculative.target, {}

    def wrong(self, scores, rows, tokens):
        if scores.q_sampled is not scores.q:
            kept[self.level] = target(self, scores, rows, tokens)
        return kept[self.level]

    monkeypatch.setattr(Speculative, "target", wrong)


def bild_star_of_sampled_q(monkeypatch):
    """The rule reads q~ in place of q."""
    right = METHODS["bild_star"]
    monkeypatch.setitem(
        METHODS,
        "bild_star",
        dataclasses.replace(right, target=lambda s, alpha: right.target(s._replace(q=s.q_sampled), alpha)),
    )


def weights_exchanged(monkeypatch):
    """The mixture gives the verifier the drafter's weight."""
    right = METHODS["mixture"]
    monkeypatch.setitem(
        METHODS, "mixture", dataclasses.replace(right, target=lambda s, alpha: right.target(s, 1 - alpha))
    )


def typical_tokens_of_p(monkeypatch):
    """Typical acceptance taken for what it is called: p~ cut to its typical tokens."""
    right = METHODS["typical"]

    def wrong(s, alpha):
        _, refused = right.target(s, alpha)
        kept = jnp.where(refused, 0.0, s.p_sampled)
        mass = jnp.sum(kept, axis=-1, keepdims=True)
        return jnp.where(mass > 0, kept / jnp.where(mass > 0, mass, 1.0), s.p_sampled), refused

    monkeypatch.setitem(METHODS, "typical", dataclasses.replace(right, target=wrong))


def one_temperature(monkeypatch):
    """Every row is sampled as the first one is."""
    token_probs = samplers.token_probs
    monkeypatch.setattr(
        samplers,
        "token_probs",
        lambda logits, options: token_probs(
            logits, jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), options)
        ),
    )


SEEN_BY = {
    bonus_from_p: ["opt", "token_v3"],
    residual_of_p: ["token_v3"],
    no_roll_back: list(FAMILIES),
    one_uniform: ["speculative", "token_v3"],
    shared_key: list(FAMILIES),
}


QUICK = [(bonus_from_p, "token_v3")]


@pytest.mark.long
@pytest.mark.parametrize(
    "bug,family",
    quick(*((b, f) for b, families in SEEN_BY.items() for f in families), among=QUICK),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_law_test_catches(bug, family, monkeypatch):
    jax.clear_caches()
    with monkeypatch.context() as patch:
        bug(patch)
        assert p_value([family], [FAMILIES[family]], [2], rows=200_000) < FAIL_BELOW
    jax.clear_caches()


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize(
    "bug,methods,alphas,temperature",
    [
        (own_of_sampled_p, ("speculative", "chow"), (0.0, 0.3), 0.7),
        (own_is_sampled_pi, ("speculative", "chow"), (0.0, 0.3), 0.7),
        (bild_star_of_sampled_q, ("bild_star",), (1.5,), 0.5),
        (weights_exchanged, ("mixture",), (0.4,), 1.0),
        (typical_tokens_of_p, ("typical",), (0.5,), 1.0),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_law_test_catches_what_only_one_method_or_temperature_shows(
    bug, methods, alphas, temperature, monkeypatch
):
    sizes = [2] * len(methods)
    assert p_value(methods, alphas, sizes, rows=200_000, temperature=temperature) > FAIL_BELOW
    jax.clear_caches()
    with monkeypatch.context() as patch:
        bug(patch)
        assert p_value(methods, alphas, sizes, rows=200_000, temperature=temperature) < FAIL_BELOW
    jax.clear_caches()


@pytest.mark.long
@pytest.mark.full
def test_a_batch_sampled_as_its_first_row_is_seen(monkeypatch):
    def chances():
        """p-values of two kinds of rows that take turns."""
        kind = np.arange(100_000) // len(PROMPTS) % 2
        temperatures = np.array([0.5, 1.5])
        sampler = hierarchy([TableLM(VOCAB)] * 2, [METHODS["opt"]], [2])
        result, which = decoded(
            sampler, tuple(TABLES[:2]), len(kind), SamplingOptions(temperatures[kind]), [0.05]
        )
        tokens = np.asarray(result.tokens)
        return [
            chi_square(
                tokens[(kind == n) & (which == 0)],
                sequence_law(
                    TABLES[:2], ["opt"], [0.05], PROMPTS[0], steps=STEPS, eos=EOS, temperature=temperature
                ),
            )
            for n, temperature in enumerate(temperatures)
        ]

    assert min(chances()) > FAIL_BELOW
    jax.clear_caches()
    with monkeypatch.context() as patch:
        one_temperature(patch)
        first, second = chances()
    jax.clear_caches()
    assert first > FAIL_BELOW > second
