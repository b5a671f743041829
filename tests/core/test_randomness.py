"""Random numbers: what they depend on, and how tokens are drawn by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import chi_square

from speccascade_jax.core.randomness import draw, noise


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


def test_noise_depends_on_key_role_and_position_only():
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    table = noise(keys, levels=2, length=10)
    np.testing.assert_array_equal(table[1:, :1, :, :4], noise(keys[1:], levels=1, length=4))
    assert len(np.unique(table)) == table.size


def test_tokens_drawn_by_the_table_follow_their_weights():
    """At every level, role and position; and two of these share no number."""
    weights = np.array([3.0, 0.0, 1.0, 4.0])
    table = noise(jax.vmap(jax.random.key)(jnp.arange(20_000)), levels=2, length=2)
    law = {(token,): weight / weights.sum() for token, weight in enumerate(weights) if weight}
    columns = table.reshape(len(table), -1).T
    for uniforms in columns:
        tokens = draw(uniforms, jnp.tile(jnp.asarray(weights, jnp.float32), (len(table), 1)))
        assert chi_square(np.asarray(tokens)[:, None], law) > 1e-4
    correlations = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlations).max() < 5 / np.sqrt(len(table))
