"""Random numbers: what they depend on, and how tokens are drawn with them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import chi_square

from speccascade_jax.core.randomness import Role, draw, noise


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


@pytest.mark.parametrize("size", [2, 1000, 4096])
def test_each_token_is_drawn_by_the_middle_of_its_interval(size):
    rng = np.random.default_rng(1)
    weights = (rng.random(size) + 0.5).astype(np.float32)
    weights[1:-1][rng.random(size - 2) < 0.7] = 0
    through, tokens = np.cumsum(weights, dtype=np.float64), np.flatnonzero(weights)
    middle = (through - weights / 2)[tokens] / through[-1]
    drawn = draw(jnp.asarray(middle, jnp.float32), jnp.tile(jnp.asarray(weights), (len(tokens), 1)))
    np.testing.assert_array_equal(drawn, tokens)


def test_noise_depends_on_key_role_and_position_only():
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    table = noise(keys, ((), ()), length=10).levels
    np.testing.assert_array_equal(table[0][1:, :, :4], noise(keys[1:], ((),), length=4).levels[0])
    assert len(np.unique(np.stack(table))) == 3 * 2 * 2 * 10


@pytest.mark.full
@pytest.mark.parametrize("partitionable", [True, False])
def test_noise_of_rounds_depends_on_where_they_began_and_not_on_sizes(partitionable):
    """Nor on how JAX makes random numbers of several shapes."""
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    with jax.threefry_partitionable(partitionable):
        table = noise(keys, ((5, 3), (5, 3), (5,)), length=6).levels
        smaller = noise(keys[1:], ((2, 2), (2, 2), (4,)), length=4).levels
    for whole, part in zip(table, smaller, strict=True):
        np.testing.assert_array_equal(whole[1:][tuple(slice(n) for n in part.shape)], part)
    numbers = np.concatenate([np.ravel(x) for x in table])
    assert len(np.unique(numbers)) == len(numbers)


def test_rows_by_position_use_their_positions_numbers():
    """In a program that has rounds' numbers, too; a round finds them by its start and the offset."""
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    mixed = noise(keys, ((4,), (4,)), length=8, by_round=jnp.array([False, True]))
    plain, rounds = noise(keys, ((), ()), length=8), noise(keys, ((4,), (4,)), length=8)
    start = jnp.array([2, 2])
    for level, role in itertools.product(range(2), Role):
        ours, by_position, fresh = (
            (
                x.at(start, level, role, 4, by_round)
                if level
                else x.within(1, start).at(start, 0, role, 4, False)
            )
            for x, by_round in ((mixed, True), (plain, False), (rounds, True))
        )
        np.testing.assert_array_equal(ours[0], by_position[0])
        np.testing.assert_array_equal(ours[1], fresh[1])
        assert not np.any(by_position[1] == fresh[1])


def test_tokens_drawn_by_the_table_follow_their_weights():
    """At every level, role and position; and two of these share no number."""
    weights = np.array([3.0, 0.0, 1.0, 4.0])
    keys = jax.vmap(jax.random.key)(jnp.arange(20_000))
    table = jnp.stack(noise(keys, ((), ()), length=2).levels, axis=1)
    law = {(token,): weight / weights.sum() for token, weight in enumerate(weights) if weight}
    columns = table.reshape(len(table), -1).T
    for uniforms in columns:
        tokens = draw(uniforms, jnp.tile(jnp.asarray(weights, jnp.float32), (len(table), 1)))
        assert chi_square(np.asarray(tokens)[:, None], law) > 1e-4
    correlations = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlations).max() < 5 / np.sqrt(len(table))
