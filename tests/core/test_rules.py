"""Rules and target distributions on numbers that can be checked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from toys import lookahead, target

from speccascade_jax.core.rules import METHODS, Scores, lossy_law, target_probs, total_variation, tuned_beta
from speccascade_jax.core.transforms import SamplingOptions, token_probs

Q, P = jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.3, 0.5])


def random_pairs(count, size, seed=0):
    rng = np.random.default_rng(seed)
    q, p = (np.exp(2 * rng.normal(size=(count, size))) for _ in range(2))
    return [jnp.asarray(x / x.sum(-1, keepdims=True), jnp.float32) for x in (q, p)]


def test_worked_examples_of_the_docstrings():
    np.testing.assert_allclose(target_probs(Q, P, jnp.array([True, False, False])), [0.12, 0.48, 0.40])
    np.testing.assert_allclose(lossy_law(Q, P, 0.4, 1.0), [1 / 3, 0.3, 1.1 / 3], atol=1e-6)
    np.testing.assert_allclose(tuned_beta(Q, P, 0.4), [0.5 / 0.3666667], atol=1e-5)  # 1.3636


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
        pair = [np.asarray(x[n], np.float64) for x in (q, p)]
        laws = (*pair, qs[n], ps[n])
        expected = (
            lookahead(n, 49, alpha, 0.8, 2.0, *laws)
            if method == "lookahead"  # one round's positions
            else target(method, *laws, alpha, temperature == 0)
        )
        np.testing.assert_allclose(pi[n], expected, atol=2e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9])
def test_tuned_beta_balances_rejection_and_residual(alpha):
    q, p = random_pairs(2000, 8, seed=1)
    rejected = np.asarray(total_variation(q, p / (1 - alpha)))
    q, p = (x[rejected[:, 0] > 1e-4] for x in (q, p))  # below, rounding decides
    rejected = rejected[rejected[:, 0] > 1e-4]
    assert len(q) > 500
    beta = np.asarray(tuned_beta(q, p, alpha))
    np.testing.assert_allclose(rejected, np.maximum(p / beta - q, 0).sum(-1, keepdims=True), atol=1e-5)
    assert (beta >= 1).all() and (beta <= 1 / rejected * 1.001).all()


def test_tuned_beta_where_nothing_or_everything_is_rejected():
    same = jnp.array([[0.5, 0.5, 0.0]])
    assert tuned_beta(same, same, 0.3) == 1
    np.testing.assert_allclose(lossy_law(same, same, 0.3, 1.0), same)
    apart = jnp.array([[0.0, 0.0, 1.0]])
    np.testing.assert_allclose(lossy_law(same, apart, 0.3, tuned_beta(same, apart, 0.3)), apart)


def test_limits_of_alpha():
    q, p = random_pairs(200, 6, seed=3)
    scores = Scores(q, p, q, p, jnp.asarray(False))
    for method, alpha, expected in [
        ("diff", 1.0, q),
        ("chow", 1.0, q),
        ("chow", 0.0, p),
        ("lossy", 0.0, p),
        ("lossy_tuned", 0.0, p),
        ("token_v3", 1.0, q),
        ("token_v1", 1.0, q),
        ("token_v2", 1.0, q),
        ("bild_star", 1e9, q),
        ("chow_log", 1e9, q),
    ]:
        np.testing.assert_allclose(METHODS[method].target(scores, alpha)[0], expected, atol=1e-5)
