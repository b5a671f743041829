"""Laws of the divergences: by hand in float64, against what verification accepts, and where they are 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core.divergences import BLEND, DIVERGENCES, target_law
from speccascade_jax.core.methods import Method
from speccascade_jax.core.rules import METHODS, Scores, token_v3
from speccascade_jax.core.verification import Draft, by_token

RULES = {name: method for name, method in METHODS.items() if method.by_prefix and not method.trained}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def laws(seed, rows=4, tokens=6, spread=1.5):
    """Log probabilities of two models, float64 [rows, tokens]."""
    drawn = np.random.default_rng(seed).normal(size=(2, rows, tokens)) * spread
    return tuple(jax.nn.log_softmax(jnp.asarray(x), axis=-1) for x in drawn)


def value(name, target, draft, mask=None, progress=0.25):
    given = {"mask": jnp.ones(target.shape[:-1], bool) if mask is None else mask, "progress": progress}
    entry = DIVERGENCES[name]
    return entry.of(target, draft, **{need: given[need] for need in entry.needs})


def by_hand(name, p, q, progress=0.25):
    """The definitions, in numpy, of probabilities [B, V]; every row counts."""
    kl, overlap = (p * np.log(p / q)).sum(-1), np.minimum(p, q).sum(-1)
    weight = np.exp(-BLEND * overlap.mean())
    return {
        "kl": kl,
        "tv": 1 - overlap,
        "lk": -np.log(overlap),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - overlap),
        "kl_to_lk": (1 - progress) * kl - progress * np.log(overlap),
    }[name]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_its_definition(name):
    target, draft = laws(0)
    expected = by_hand(name, *(np.exp(np.asarray(x)) for x in (target, draft)))
    np.testing.assert_allclose(value(name, target, draft), expected, rtol=1e-12)


def derivative(loss, logits, step=1e-6):
    """Central differences of a scalar of logits."""
    slopes = np.zeros(logits.shape)
    for place in np.ndindex(*logits.shape):
        moved = np.zeros(logits.shape)
        moved[place] = step
        slopes[place] = (float(loss(logits + moved)) - float(loss(logits - moved))) / (2 * step)
    return slopes


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_are_finite_differences(name):
    """Of lk_hybrid with its weight held, which is what it says."""
    target, draft = laws(1)

    def loss(logits):
        return jnp.sum(value(name, target, jax.nn.log_softmax(logits, axis=-1)))

    def of_parts(logits):
        q = jax.nn.log_softmax(logits, axis=-1)
        overlap = jnp.mean(1 - value("tv", target, draft))
        weight = np.exp(-BLEND * float(overlap))
        return jnp.sum(weight * value("kl", target, q) + (1 - weight) * value("tv", target, q))

    held = of_parts if DIVERGENCES[name].needs == ("mask",) else loss
    gradient = jax.grad(loss)(draft)
    np.testing.assert_allclose(gradient, derivative(held, draft), atol=1e-8)
    assert np.abs(gradient).max() > 0.01


def test_the_gradient_of_lk_by_hand():
    """-q(v) / A (1[q(v) < p(v)] - sum of q over such tokens): total variation's, divided by the overlap A."""
    target, draft = laws(2)
    p, q = (np.exp(np.asarray(x)) for x in (target, draft))
    short, overlap = q < p, np.minimum(p, q).sum(-1, keepdims=True)
    expected = -q / overlap * (short - (q * short).sum(-1, keepdims=True))

    def gradient(name):
        return jax.grad(lambda x: jnp.sum(value(name, target, jax.nn.log_softmax(x, axis=-1))))(draft)

    np.testing.assert_allclose(gradient("lk"), expected, atol=1e-12)
    np.testing.assert_allclose(gradient("tv") / overlap, expected, atol=1e-12)


@pytest.mark.parametrize("rule,alpha", [("speculative", 0.0), ("opt", 0.1), ("token_v3", 0.3)])
def test_lk_is_the_log_of_what_verification_accepts(rule, alpha):
    """Over every drafted token and a grid of uniforms, towards pi of a rule as well."""
    cells = 20_000
    verifier, drafter = laws(1, rows=1, tokens=5, spread=0.8)
    target = target_law(verifier, drafter, METHODS[rule], alpha)
    q, pi = np.exp(drafter)[0], np.exp(target)[0]
    uniforms = jnp.asarray((np.arange(cells) + 0.5) / cells)[:, None]
    accepted = 0.0
    for token, chance in enumerate(q):
        draft = Draft(
            jnp.full((cells, 1), token), jnp.broadcast_to(q, (cells, 2, 5)), jnp.ones(cells, jnp.int32)
        )
        taken, _ = by_token(uniforms, draft, jnp.broadcast_to(pi, (cells, 2, 5)))
        accepted += chance * float(jnp.mean(taken))
    np.testing.assert_allclose(value("lk", target, drafter)[0], -np.log(accepted), atol=3 / cells)
    assert 0.3 < accepted < 0.99


@pytest.mark.parametrize("name", DIVERGENCES)
def test_zero_exactly_where_the_laws_are_equal(name):
    target, draft = laws(4, rows=200)
    np.testing.assert_allclose(value(name, target, target), 0.0, atol=1e-12)
    assert (value(name, target, draft) > 1e-3).all()


def test_kl_turns_into_lk():
    target, draft = laws(5)
    kl, lk = value("kl", target, draft), value("lk", target, draft)
    for progress, expected in ((0.0, kl), (0.5, (kl + lk) / 2), (1.0, lk)):
        np.testing.assert_allclose(value("kl_to_lk", target, draft, progress=progress), expected, rtol=1e-12)
    assert (np.abs(kl - lk) > 0.01).all()  # the control


def test_the_blend_weighs_by_real_tokens():
    """Padding does not affect the weight."""
    target, draft = laws(6)
    mask = jnp.array([True, True, True, False])
    short = value("lk_hybrid", target[:3], draft[:3])
    np.testing.assert_allclose(value("lk_hybrid", target, draft, mask)[:3], short, rtol=1e-12)
    assert np.abs(value("lk_hybrid", target, draft)[:3] - short).max() > 1e-4
    accepted = jax.nn.log_softmax(target + 0.01 * draft, axis=-1)  # nearly all: little of KL is left
    weight = np.exp(-BLEND)
    kl, tv = (value(name, target, accepted) for name in ("kl", "tv"))
    np.testing.assert_allclose(
        value("lk_hybrid", target, accepted), weight * kl + (1 - weight) * tv, rtol=0.02
    )


@pytest.mark.full
@pytest.mark.parametrize("name", DIVERGENCES)
def test_float32_stays_finite(name):
    """Overlaps below float32's least number, tokens without mass in either law, 262,144 tokens."""
    size = 262_144
    alone = jnp.full((1, size), -jnp.inf, jnp.float32).at[0, 7].set(0.0)
    peaked = jnp.zeros((1, size), jnp.float32).at[0, 7].set(300.0)
    other = jnp.zeros((1, size), jnp.float32).at[0, 9].set(300.0)
    gone = jnp.zeros((1, size), jnp.float32).at[0, 100:].set(-jnp.inf)
    uneven = gone + 0.5 * (jnp.arange(size, dtype=jnp.float32) % 3)
    for target, logits in ((alone, other), (peaked, other), (gone, uneven), (gone, other)):

        def loss(x, target=target):
            return jnp.sum(value(name, jax.nn.log_softmax(target), jax.nn.log_softmax(x)))

        divergence, slope = jax.jit(jax.value_and_grad(loss))(logits)
        assert divergence.dtype == slope.dtype == jnp.float32
        assert np.isfinite(divergence) and np.isfinite(slope).all()
        if target is alone and name in ("kl", "lk"):  # both are cross-entropy there, however far it is
            np.testing.assert_allclose([divergence, -slope[0, 7], slope[0, 9]], [300.0, 1.0, 1.0], rtol=1e-5)


def test_only_lk_is_finite_if_the_drafter_lacks_tokens():
    """A drafter that cannot write some of the verifier's tokens has an infinite KL."""
    target, draft = laws(7, rows=1)
    short = jax.nn.log_softmax(draft.at[0, :2].set(-jnp.inf), axis=-1)
    p, q = np.exp(np.asarray(target)), np.exp(np.asarray(short))
    np.testing.assert_allclose(value("lk", target, short), -np.log(np.minimum(p, q).sum(-1)), rtol=1e-12)
    assert np.isinf(value("kl", target, short)).all()


@pytest.mark.parametrize("rule", RULES)
def test_pi_is_the_rules(rule):
    """As core.rules has it at temperature 1, without a gradient."""
    verifier, drafter = laws(8, rows=50)
    method, alpha = METHODS[rule], 0.3
    p, q = jnp.exp(verifier), jnp.exp(drafter)
    expected = method.target(Scores(q, p, q, p, jnp.array(False)), alpha)[0]
    target = target_law(verifier, drafter, method, alpha)
    np.testing.assert_allclose(np.exp(target), expected, atol=1e-12)
    for number in range(2):
        slope = jax.grad(lambda *both: jnp.sum(jnp.exp(target_law(*both, method, alpha))), argnums=number)(
            verifier, drafter
        )
        np.testing.assert_array_equal(slope, 0.0)


def test_pi_of_token_v3_and_opt_by_hand():
    """A position and a token at a time, in plain Python."""
    verifier, drafter = laws(9, rows=30)
    both = [np.exp(np.asarray(x)) for x in (verifier, drafter)]
    targets = {
        name: np.exp(target_law(verifier, drafter, METHODS[name], 0.3)) for name in ("opt", "token_v3")
    }
    deferred = 0
    for row, (p, q) in enumerate(zip(*both, strict=True)):
        defers = q.max() < p.max() - 0.3 * np.maximum(p - q, 0).sum()
        deferred += defers
        np.testing.assert_allclose(targets["opt"][row], p if defers else q, rtol=1e-12)
        refused = p < 0.7 * p.max()
        pi = [(0 if no else b) + a * q[refused].sum() for a, b, no in zip(p, q, refused, strict=True)]
        np.testing.assert_allclose(targets["token_v3"][row], pi, rtol=1e-12)
    assert 0 < deferred < 30


def test_rules_without_lenience_have_the_plain_loss():
    """Through the formula of pi, too: the shortcut for lossless rules changes nothing."""
    verifier, drafter = laws(10)
    always = Method(METHODS["speculative"].target, 0, 1, "speculative, not known to be lossless")
    for method in (METHODS["speculative"], always, METHODS["mixture"], METHODS["lossy"]):
        target = target_law(verifier, drafter, method, 0.0)
        np.testing.assert_allclose(target, verifier, rtol=1e-9)
    assert token_v3(Scores(*(jnp.exp(x) for x in (drafter, verifier) * 2), jnp.array(False)), 0.0).any()
