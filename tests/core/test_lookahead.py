"""The look-ahead rule: its law, which depends on the position in a round, and its price."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, TABLES, TRANSFORMS, VOCAB, decoded, quick
from toys import TableLM, block_law, chi_square, law_as_a_whole, lookahead, target

from speccascade_jax.core.rules import METHODS, Scores
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.adaptive import Adaptive
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN

ALPHA, ACCEPTANCE, ROUND_COST = 1.2, 0.7, 1.5
METHOD = METHODS["lookahead"].tuned(acceptance=ACCEPTANCE, round_cost=ROUND_COST)


def of_two(elsewhere, after_two):
    """A table of two laws: what follows token 2, and what follows any other."""
    return np.log(np.stack([after_two if last == 2 else elsewhere for last in range(VOCAB)])[None]).repeat(
        VOCAB, axis=0
    )


PLACES = (
    of_two((0.35, 0.35, 0.25, 0.05), (0.5, 0.3, 0.15, 0.05)),
    of_two((0.15, 0.15, 0.65, 0.05), (0.1, 0.2, 0.65, 0.05)),
)
"""Deferring gains 3/4 of the distance, and after token 2 less: there it is worth the price at a round's third
place, which rounds reach more often as a block."""


def written(gamma, rows, options, method=METHOD, way=TOKEN, tables=TABLES[:2], alpha=ALPHA):
    ways = TOKEN, BLOCK
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), method, gamma, verification=ways)
    number = np.full(rows, ways.index(way))
    result, which = decoded(
        sampler, tuple(tables), rows, SamplingOptions(**options), [alpha], verifications=number
    )
    return np.asarray(result.tokens), which


def laws(gamma, options, rule=lookahead, law=block_law, tables=TABLES[:2], alpha=ALPHA, **more):
    at = [lambda *laws, j=j: rule(j, gamma, alpha, ACCEPTANCE, ROUND_COST, *laws) for j in range(gamma + 1)]
    return [law(tables, at, prompt, steps=STEPS, eos=EOS, **options, **more) for prompt in PROMPTS]


def p_value(texts, expected):
    tokens, which = texts
    return 2 * min(chi_square(tokens[which == n], law) for n, law in enumerate(expected))


def mid_block(j, gamma, *more):
    """The price of the middle of a block at every position: a law by prefix, as opt's."""
    return lookahead(gamma // 2, gamma, *more)


@pytest.mark.parametrize("gamma,transform", quick((3, "plain"), (2, "top_p"), among=[(3, "plain")]))
def test_lookahead_follows_its_law(gamma, transform, rows):
    options = {"temperature": 1.0, **TRANSFORMS[transform]}
    texts = written(gamma, rows, options)
    assert p_value(texts, laws(gamma, options)) > FAIL_BELOW
    assert p_value(texts, laws(gamma, options, mid_block)) < FAIL_BELOW  # the control: no law by prefix


@pytest.mark.full
def test_its_law_as_a_block(rows):
    """Rounds begin elsewhere than token by token, and so the law of a text is another one."""
    asked = {"tables": PLACES, "alpha": 0.35}
    texts = written(3, rows, {"temperature": 1.0}, way=BLOCK, **asked)
    assert p_value(texts, laws(3, {}, law=law_as_a_whole, **asked)) > FAIL_BELOW
    assert p_value(texts, laws(3, {}, **asked)) < FAIL_BELOW  # the control: token by token
    assert p_value(texts, laws(3, {}, mid_block, law_as_a_whole, **asked)) < FAIL_BELOW


@pytest.mark.full
def test_positions_counted_from_the_end_are_detected():
    """A planted bug: the tokens lost after a rejection are confused with those drafted before it."""

    def wrong(s, alpha):
        turned = Scores(*(x[:, ::-1] for x in s[:4]), s.greedy)
        return tuple(x[:, ::-1] for x in METHOD.target(turned, alpha))

    options = {"temperature": 1.0}
    texts = written(3, 40_000, options, dataclasses.replace(METHOD, target=wrong))
    assert p_value(texts, laws(3, options)) < FAIL_BELOW


@pytest.mark.full
@pytest.mark.parametrize("gamma", [1, 4])
def test_lookahead_at_temperature_zero(gamma):
    tokens, which = written(gamma, 64, {"temperature": 0.0})
    for n, law in enumerate(laws(gamma, {"temperature": 0.0})):
        assert {tuple(int(t) for t in row if t >= 0) for row in tokens[which == n]} == set(law)


@pytest.mark.full
def test_adaptive_blocks_keep_its_law(rows):
    """Every price is known before its token is drawn: of blocks of up to 3, wherever they stop."""
    sampler = Adaptive(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHOD, 3, stop_below=0.6)
    result, which = decoded(sampler, tuple(TABLES[:2]), rows, SamplingOptions(1.0), [ALPHA])
    drafted, rounds = (np.asarray(x) for x in (result.counts[1].drafted, result.counts[1].rounds))
    assert (drafted < 3 * rounds).any() and (drafted > rounds).any()
    texts = np.asarray(result.tokens), which
    assert p_value(texts, laws(3, {}, stop_below=0.6)) > FAIL_BELOW
    assert p_value(texts, laws(3, {})) < FAIL_BELOW


def test_prices_by_hand():
    """gamma = 2, a = 1/2: of 1 + 1/2 + 1/4 tokens 1 + 1/2 are lost at the first position, 1 at the second,
    none at the bonus."""
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.1, 0.6])
    scores = [jnp.asarray(np.tile(x, (1, 3, 1)), jnp.float32) for x in (q, p)]
    price = 3 * 0.4 * np.array([1.5, 1.0, 0.0]) / 1.75  # TV is 0.4
    for alpha in (0.05, 0.09, 0.12, 0.2):  # the gain of deferring is 0.1
        method = METHODS["lookahead"].tuned(acceptance=0.5, round_cost=3.0)
        _, delta = method.target(Scores(*scores, *scores, jnp.asarray(False)), alpha)
        np.testing.assert_array_equal(np.asarray(delta)[0, :, 0], alpha * price < 0.1)
        for j, deferred in enumerate(np.asarray(delta)[0, :, 0]):
            np.testing.assert_array_equal(lookahead(j, 2, alpha, 0.5, 3.0, q, p, q, p), p if deferred else q)


def test_without_a_price_it_is_diff():
    rng = np.random.default_rng(0)
    q, p = (jnp.asarray(rng.dirichlet(np.ones(5), (8, 4)), jnp.float32) for _ in range(2))
    scores = Scores(q, p, q, p, jnp.asarray(False))
    for n in np.ndindex(8, 4):
        pair = [np.asarray(x[n], np.float64) for x in (q, p)]
        np.testing.assert_allclose(
            METHODS["lookahead"].target(scores, 0.0)[0][n],
            target("diff", *pair, *pair, 0.0, False),
            atol=1e-6,
        )
