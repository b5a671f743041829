"""The number of accepted tokens and the token after them, checked by hand and by their law."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import chi_square

from speccascade_jax.core.randomness import draw
from speccascade_jax.core.rounds import cut_after
from speccascade_jax.core.verification import (
    VERIFICATIONS,
    Draft,
    block_chances,
    deferred_drafts,
    leading,
    residual,
    verify,
)

Q, P = jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.3, 0.5])


def test_zero_never_accepts_what_the_target_excludes():
    draft = Draft(jnp.array([[2]]), jnp.array([[Q, Q]]), jnp.array([1]))
    pi = jnp.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    for way in VERIFICATIONS.values():
        assert way.accept(jnp.zeros((1, 1)), draft, pi)[0] == 0
        assert verify(jnp.zeros((1, 1)), jnp.zeros((1, 2)), draft, pi, (way,)).next_token in (0, 1)


def test_tokens_that_all_stand_stand_with_a_chance_of_exactly_1():
    """Where w_j is 1 no rounding of R_j leaves a chance that they do not."""
    q, pi = np.random.default_rng(0).dirichlet(np.ones(5), (2, 500, 4)).astype(np.float32)
    tokens = np.argmax(pi / q, axis=-1)[:, :3]  # of each place, the one that pi prefers most
    draft = Draft(jnp.array(tokens), jnp.array(q), jnp.full(500, 3))
    chances, weights = block_chances(draft, jnp.array(pi))
    assert (weights == 1).all() and (chances == 1).all()


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


@pytest.mark.parametrize("way", VERIFICATIONS.values(), ids=VERIFICATIONS)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_emitted_tokens_follow_the_target(size, way):
    """Two drafted tokens at most, of which a row may hold fewer; pi differs from place to place. After a 0
    the second residual is another one without its weight."""
    rows, pi = 40_000, np.array([[0.4, 0.35, 0.25], [0.0, 0.5, 0.5], [0.1, 0.8, 0.1]], np.float32)
    uniforms = jax.random.uniform(jax.random.key(size), (3, rows, 3))
    laws = jnp.tile(jnp.asarray(Q), (rows, 3, 1))
    tokens = jnp.stack([draw(uniforms[0, :, n], laws[:, n]) for n in range(2)], axis=1)
    draft = Draft(tokens, laws, jnp.full(rows, size))
    verdict = verify(uniforms[1, :, :2], uniforms[2], draft, jnp.tile(jnp.asarray(pi), (rows, 1, 1)), (way,))
    number = np.asarray(verdict.num_accepted)
    assert number.max() == size
    emitted = np.where(number > 0, np.asarray(tokens)[:, 0], np.asarray(verdict.next_token))
    assert chi_square(emitted[:, None], {(n,): mass for n, mass in enumerate(pi[0])}) > 1e-4
    second = np.where(number > 1, np.asarray(tokens)[:, 1], np.asarray(verdict.next_token))[number > 0]
    if size:
        assert chi_square(second[:, None], {(n,): mass for n, mass in enumerate(pi[1]) if mass}) > 1e-4


def test_deferrals_are_counted_at_drafted_positions_only():
    """Of a position or of its drafted token; the bonus position and what was not drafted count nothing."""
    draft = Draft(jnp.array([[0, 2], [1, 1]]), jnp.tile(Q, (2, 3, 1)), jnp.array([2, 1]))
    every, token = np.ones((2, 3, 1), bool), np.zeros((2, 3, 3), bool)
    token[0, 1, 2] = token[1, 1, 1] = token[:, 2] = True
    assert deferred_drafts(jnp.asarray(every), draft).tolist() == [2, 1]
    assert deferred_drafts(jnp.asarray(token), draft).tolist() == [1, 0]
    assert deferred_drafts(None, draft).tolist() == [0, 0]


def test_a_run_of_accepted_tokens_ends_at_the_first_rejection():
    masks = np.array(list(itertools.product([False, True], repeat=4)))
    expected = [next((n for n, kept in enumerate(mask) if not kept), 4) for mask in masks]
    assert leading(masks).tolist() == expected
    assert leading(masks[:, :0]).tolist() == [0] * len(masks)


def test_tokens_are_cut_after_the_first_end():
    for tokens in itertools.product([5, 6, 7], repeat=3):
        for size in range(4):
            written = tokens[:size]
            expected = written.index(7) + 1 if 7 in written else size
            assert cut_after(np.array([tokens]), np.array([size]), 7).tolist() == [expected]
