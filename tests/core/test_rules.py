"""Rules, target distributions and verification on numbers a person can check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import lookahead, target

from speccascade_jax.core.randomness import draw, noise
from speccascade_jax.core.rules import METHODS, Scores, lossy_law, target_probs, total_variation, tuned_beta
from speccascade_jax.core.transforms import SamplingOptions, largest, token_probs
from speccascade_jax.core.verification import Draft, accepted_prefix, residual, verify

Q, P = jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.3, 0.5])


def random_pairs(count, size, seed=0):
    rng = np.random.default_rng(seed)
    q, p = (np.exp(2 * rng.normal(size=(count, size))) for _ in range(2))
    return [jnp.asarray(x / x.sum(-1, keepdims=True), jnp.float32) for x in (q, p)]


def test_worked_examples_of_the_docstrings():
    np.testing.assert_allclose(target_probs(Q, P, jnp.array([True, False, False])), [0.12, 0.48, 0.40])
    np.testing.assert_allclose(lossy_law(Q, P, 0.4, 1.0), [1 / 3, 0.3, 1.1 / 3], atol=1e-6)
    np.testing.assert_allclose(tuned_beta(Q, P, 0.4), [0.5 / 0.3666667], atol=1e-5)  # 1.3636
    np.testing.assert_allclose(token_probs(jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1])),
                                           SamplingOptions(1.0, top_p=0.7)), [2 / 3, 1 / 3, 0, 0], atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_targets_equal_the_table_token_by_token(method, alpha, temperature):
    options = SamplingOptions(temperature, top_k=4)
    q, p = random_pairs(50, 6)
    shaped = [token_probs(jnp.log(x), options) for x in (q, p)]
    pi, _ = METHODS[method].target(Scores(q, p, *shaped, jnp.asarray(temperature == 0)), alpha)
    np.testing.assert_allclose(pi.sum(-1), 1, atol=1e-5)
    qs, ps = (np.asarray(x, np.float64) for x in shaped)
    for n in range(len(q)):
        own = [np.asarray(x[n], np.float64) for x in (q, p)]
        laws = (*own, qs[n], ps[n])
        expected = (lookahead(n, 49, alpha, 0.8, 2.0, *laws) if method == "lookahead"  # one round's positions
                    else target(method, *laws, alpha, temperature == 0))
        np.testing.assert_allclose(pi[n], expected, atol=2e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9])
def test_tuned_beta_balances_rejection_and_residual(alpha):
    q, p = random_pairs(2000, 8, seed=1)
    rejected = np.asarray(total_variation(q, p / (1 - alpha)))
    q, p = (x[rejected[:, 0] > 1e-4] for x in (q, p))  # below, rounding decides
    rejected = rejected[rejected[:, 0] > 1e-4]
    assert len(q) > 500
    beta = np.asarray(tuned_beta(q, p, alpha))
    np.testing.assert_allclose(rejected, np.maximum(p / beta - q, 0).sum(-1, keepdims=True),
                               atol=1e-5)
    assert (beta >= 1).all() and (beta <= 1 / rejected * 1.001).all()


def test_tuned_beta_where_nothing_or_everything_is_rejected():
    same = jnp.array([[0.5, 0.5, 0.0]])
    assert tuned_beta(same, same, 0.3) == 1
    np.testing.assert_allclose(lossy_law(same, same, 0.3, 1.0), same)
    apart = jnp.array([[0.0, 0.0, 1.0]])
    np.testing.assert_allclose(lossy_law(same, apart, 0.3, tuned_beta(same, apart, 0.3)), apart)


def test_top_k_and_top_p_break_ties_by_id():
    flat = jnp.zeros(5)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_k=2)), [0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_p=0.5)), [1 / 3] * 3 + [0, 0],
                               atol=1e-6)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(1.0, top_p=1.0)), [0.2] * 5, atol=1e-6)
    np.testing.assert_allclose(token_probs(flat, SamplingOptions(0.0)), [1, 0, 0, 0, 0])


@pytest.mark.parametrize("flatness", [0.2, 1.0, 5.0])
def test_the_largest_are_those_that_a_sort_finds(flatness):
    """Of 3,000, many of them equal, with a mass or a number of each row's own."""
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(4, 3, 3000)) / flatness, 1)
    probs = np.asarray(token_probs(jnp.asarray(logits), SamplingOptions(1.0)))
    order = np.argsort(-probs, axis=-1, kind="stable")
    descending = np.take_along_axis(probs, order, axis=-1).astype(np.float64)
    before, place = np.cumsum(descending, axis=-1) - descending, np.arange(3000)
    for weights, enough, ranked in (
            (probs, np.array([0.11, 0.5, 0.93, 0.999]), before),
            (1, np.array([1, 7, 300, 2999]), place)):
        inside = np.zeros(probs.shape, bool)
        enough = enough[:, None, None]
        np.put_along_axis(inside, order, np.broadcast_to(ranked < enough, inside.shape), axis=-1)
        found = largest(jnp.asarray(probs), weights, enough)
        np.testing.assert_array_equal(found, inside)


@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2**-24])
def test_draw_never_returns_a_token_without_weight(u):
    rng = np.random.default_rng(0)
    weights = rng.random((500, 4096)).astype(np.float32) ** 8
    weights[rng.random(weights.shape) < 0.9] = 0
    weights[:, -1] = weights[:, 0] = 0
    tokens = draw(jnp.full(500, u, jnp.float32), jnp.asarray(weights))
    assert (np.take_along_axis(weights, np.asarray(tokens)[:, None], axis=1) > 0).all()


def test_draw_inverts_the_distribution():
    u = jnp.array([0.0, 0.0999, 0.1, 0.3999, 0.4, 0.9999])
    tokens = draw(u, jnp.tile(jnp.array([0.1, 0.3, 0.0, 0.6]), (6, 1)))
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]


def test_zero_never_accepts_what_the_target_excludes():
    draft = Draft(jnp.array([[2]]), jnp.array([[Q, Q]]), jnp.array([1]))
    pi = jnp.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    assert accepted_prefix(jnp.zeros((1, 1)), draft, pi) == 0
    assert verify(jnp.zeros((1, 1)), jnp.zeros((1, 2)), draft, pi).next_token in (0, 1)


def test_residual_without_mass_falls_back_to_the_target():
    np.testing.assert_array_equal(residual(jnp.array([Q]), jnp.array([Q])), jnp.array([Q]))


def test_verify_by_hand():
    """x = (0, 1): 0 is accepted where u * .6 < .2, 1 always; the residual of position 0 is {2}."""
    draft = Draft(jnp.array([[0, 1]] * 3), jnp.tile(Q, (3, 3, 1)), jnp.array([2] * 3))
    pi = jnp.tile(P, (3, 3, 1))
    accept_u = jnp.array([[0.34, 0.0], [0.33, 0.99], [0.0, 0.5]])
    verdict = verify(accept_u, jnp.array([[0.5] * 3, [0.5] * 3, [0.5, 0.5, 0.1]]), draft, pi)
    assert verdict.num_accepted.tolist() == [0, 2, 2]
    assert verdict.next_token.tolist() == [2, 2, 0]  # residual; bonus at u = .5; bonus at u = .1


def test_noise_depends_on_key_role_and_position_only():
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    table = noise(keys, levels=2, length=10)
    np.testing.assert_array_equal(table[1:, :1, :, :4], noise(keys[1:], levels=1, length=4))
    assert len(np.unique(table)) == table.size


def test_limits_of_alpha():
    q, p = random_pairs(200, 6, seed=3)
    scores = Scores(q, p, q, p, jnp.asarray(False))
    for method, alpha, expected in [("diff", 1.0, q), ("chow", 1.0, q), ("chow", 0.0, p), ("lossy", 0.0, p),
                                    ("lossy_tuned", 0.0, p), ("token_v3", 1.0, q), ("token_v1", 1.0, q),
                                    ("token_v2", 1.0, q), ("bild_star", 1e9, q), ("chow_log", 1e9, q)]:
        np.testing.assert_allclose(METHODS[method].target(scores, alpha)[0], expected, atol=1e-5)
