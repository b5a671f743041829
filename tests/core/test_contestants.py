"""Cactus and relaxed acceptance: each rule has the output of the published procedure, token by token."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, TABLES, VOCAB, decoded, p_value, quick
from toys import TableLM, cactus_targets, chi_square, sequence_law, table

from speccascade_jax.core.rules import METHODS, Scores, cactus_law, target_probs
from speccascade_jax.core.samplers import Adaptive, Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions, likeliest
from speccascade_jax.core.verification import BLOCK

DELTAS = (0.0, 0.01, 0.1, 1.0, 5.0)
TOP_K = 2  # of the toys' four tokens
PLAIN = SamplingOptions(temperature=1.0)


def pairs(count, size, seed=0, scale=2.0):
    """(q~, p~) in float64, some of whose probabilities are 0."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        laws = np.exp(scale * rng.normal(size=(2, size)))
        if number % 2:
            laws[rng.integers(2), rng.permutation(size)[: size // 2]] = 0
        yield laws / laws.sum(axis=1, keepdims=True)


def divergence(p, q):
    return np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))


# ---- Cactus ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 5, 60])
def test_cactus_is_rejection_sampling_from_its_law(size):
    """Towards the law, each drafted token is accepted as often as by the procedure, and what replaces a
    rejected one is, over all that are rejected, what the procedure draws. Of 60 tokens more are rejected than
    are summed at once."""
    drafters, verifiers = np.stack([*pairs(20, size)], axis=1)
    law_of = jax.jit(cactus_law)
    for delta in DELTAS:
        with jax.enable_x64(True):
            laws = np.asarray(law_of(drafters, verifiers, delta))
        np.testing.assert_allclose(laws.sum(axis=1), 1, atol=1e-12)
        for q, p, law in zip(drafters, verifiers, laws, strict=True):
            np.testing.assert_allclose(law, toys.cactus(q, p, delta), atol=1e-12)
            replaced = np.zeros(size)
            for drafted, h in cactus_targets(q, p, delta):
                accepted = min(1, h[drafted] / q[drafted])
                assert abs(accepted - min(1, law[drafted] / q[drafted])) < 1e-12
                residual = np.maximum(h - q, 0)
                replaced += q[drafted] * (1 - accepted) * residual / (residual.sum() if accepted < 1 else 1)
            np.testing.assert_allclose(np.maximum(law - q, 0), replaced, atol=1e-12)


def test_how_far_cactus_is_from_the_verifier():
    """Without delta it is p~. No farther than the drafter is (Theorem 3), and a drafted token is verified
    towards a law within delta where that gives it no more than 1/2 (Corollary 6)."""
    within = 0
    for delta in DELTAS:
        for q, p in pairs(40, 6, seed=1):
            law = toys.cactus(q, p, delta)
            if delta == 0:
                np.testing.assert_allclose(law, p, atol=1e-12)
            if (p > 0).all():
                assert divergence(law, p) <= divergence(q, p) + 1e-12
                for drafted, h in cactus_targets(q, p, delta):
                    if h[drafted] <= 0.5:
                        within += 1
                        assert divergence(h, p) <= delta + 1e-12
    assert within > 200


def test_cactus_by_hand():
    """q~ = (.6, .3, .1), p~ = (.2, .3, .5), delta = .02: .28 of the first token's .6 are kept, and of the
    rest's .32 the others have the part (.9 * .5 - .1) / (.9 * .5 - .1) = 1 of the last."""
    law = cactus_law(jnp.array([0.6, 0.3, 0.1]), jnp.array([0.2, 0.3, 0.5]), 0.02)
    np.testing.assert_allclose(law, [0.28, 0.3, 0.42], atol=1e-6)


# ---- Relaxed acceptance ----------------------------------------------------------------------------------


TALKATIVE = [np.where(np.arange(VOCAB) == EOS, logits - 9, logits) for logits in (table(6, 4), table(10, 4))]
"""Tables whose greedy texts differ, and do not end."""


def kernel(name, k, alpha, prompt, steps):
    """TensorRT-LLM's loop over greedy drafts: each is compared with the verifier's k likeliest tokens, until
    one of these is too far below the first."""
    text = [0, *prompt]
    for _ in range(steps):
        q, p = (toys.table_law(logits, *text[-2:]) for logits in TALKATIVE)
        drafted, order = int(np.argmax(q)), np.argsort(-p, kind="stable")
        best, accepted = p[order[0]], False
        for place in range(k):
            here = p[order[place]]
            if place > 0 and (here < best - alpha if name == "relaxed" else here < (1 - alpha) * best):
                break
            accepted |= drafted == order[place]
        text.append(drafted if accepted else int(order[0]))
    return tuple(text[1 + len(prompt) :])


@pytest.mark.full
@pytest.mark.parametrize("name", quick(("relaxed",), ("relaxed_ratio",), among=[("relaxed",)]))
def test_relaxed_acceptance_is_the_libraries_greedy_loop(name):
    """In one program per k, for every alpha."""
    outcomes, leniences = set(), np.array([0.0, 0.1, 0.2, 0.3, 0.5, 1.0])
    rows = len(leniences) * len(PROMPTS)
    for k in (1, TOP_K, VOCAB):
        method = METHODS[name].tuned(relaxed_top_k=k)
        sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), method, 2)
        alphas = np.repeat(leniences, len(PROMPTS))
        result, which = decoded(
            sampler, tuple(TALKATIVE), rows, SamplingOptions(temperature=0.0), alphas[:, None]
        )
        texts = [tuple(map(int, row)) for row in np.asarray(result.tokens)]
        assert texts == [
            kernel(name, k, alpha, PROMPTS[number], STEPS)
            for alpha, number in zip(alphas, which, strict=True)
        ]
        outcomes |= {(k, row % len(PROMPTS), *text) for row, text in enumerate(texts)}
    assert len(outcomes) > 15  # both k and alpha decide


def test_relaxed_acceptance_by_hand():
    """p = (.4, .3, .2, .1). The limits are included: .3 is .1 below the best, and a quarter less."""
    p = jnp.array([[0.4, 0.3, 0.2, 0.1]])
    scores = Scores(p, p, p, p, jnp.asarray(False))
    for name, alpha, k, kept in [
        ("relaxed", 0.0, 10, 1),
        ("relaxed", 0.09, 10, 1),
        ("relaxed", 0.1001, 10, 2),
        ("relaxed", 0.5, 10, 4),
        ("relaxed", 0.5, 3, 3),
        ("relaxed", 0.5, 1, 1),
        ("relaxed_ratio", 0.24, 10, 1),
        ("relaxed_ratio", 0.2501, 10, 2),
        ("relaxed_ratio", 1.0, 10, 4),
        ("relaxed_ratio", 1.0, 2, 2),
    ]:
        _, refused = METHODS[name].tuned(relaxed_top_k=k).target(scores, alpha)
        assert np.asarray(refused)[0].tolist() == [n >= kept for n in range(4)]
    for k in (4, 10):  # all tokens: the rules per token
        for name, rule in (("relaxed", "token_v2"), ("relaxed_ratio", "token_v3")):
            tuned = METHODS[name].tuned(relaxed_top_k=k)
            np.testing.assert_array_equal(
                tuned.target(scores, 0.15)[1], METHODS[rule].target(scores, 0.15)[1]
            )


def relaxed_p_value(name, method, *, rows, k=TOP_K, alpha=0.3, temperature=1.0):
    """Of a method's texts, held against the procedure's with k likeliest tokens."""
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), method, 2)
    options = SamplingOptions(temperature=temperature)
    result, which = decoded(sampler, tuple(TABLES[:2]), rows, options, [alpha])
    tokens = np.asarray(result.tokens)
    laws = [
        sequence_law(
            TABLES[:2],
            [partial(toys.relaxed, name, k)],
            [alpha],
            prompt,
            steps=STEPS,
            eos=EOS,
            temperature=temperature,
        )
        for prompt in PROMPTS
    ]
    return 2 * min(chi_square(tokens[which == n], law) for n, law in enumerate(laws))


# ---- Joint laws ------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("name", quick(("relaxed",), ("relaxed_ratio",), among=[("relaxed",)]))
def test_the_law_of_k_likeliest_tokens(name, rows):
    method = METHODS[name].tuned(relaxed_top_k=TOP_K)
    assert relaxed_p_value(name, method, rows=rows, alpha=0.9) > FAIL_BELOW
    assert relaxed_p_value(name, method, rows=rows, alpha=0.9, k=VOCAB) < FAIL_BELOW  # the control: all four


@pytest.mark.parametrize(
    "methods,alphas,options",
    quick(
        (("cactus",), (0.1,), {"temperature": 0.5, "top_p": 0.8}),
        (("cactus",), (0.1,), {"verification": BLOCK}),
        (("cactus", "relaxed"), (0.1, 0.2), {"hand_over": "need"}),
        (("relaxed", "cactus"), (0.2, 0.5), {"hand_over": "truncate", "verification": BLOCK}),
        among=[(("cactus",), (0.1,), {"verification": BLOCK})],
    ),
)
def test_the_joint_law(methods, alphas, options, rows):
    assert p_value(methods, alphas, [2] * len(methods), rows=rows, **options) > FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("name,alpha", [("cactus", 0.1), ("relaxed", 0.2)])
def test_the_law_of_adaptive_blocks(name, alpha):
    """Blocks of up to 4 that end early when more drafts do not pay off."""
    sampler = Adaptive(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHODS[name], 4, stop_below=0.5)
    result, which = decoded(sampler, tuple(TABLES[:2]), 200_000, PLAIN, [alpha])
    tokens = np.asarray(result.tokens)
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(TABLES[:2], [name], [alpha], prompt, steps=STEPS, eos=EOS)
        assert chi_square(tokens[which == n], law) > FAIL_BELOW


# ---- Planted mistakes ------------------------------------------------------------------------------------


def one_residual(scores, alpha):
    """Every rejected token of Cactus is replaced from (p~ - q~)+, as if p~ had not been scaled for it."""
    q, p = scores.q_sampled, scores.p_sampled
    kept = jnp.minimum(q, jnp.minimum(1.0, p + jnp.sqrt(2 * alpha * p * (1 - p))))
    residual = jnp.maximum(p - q, 0.0)
    total = jnp.sum(residual, axis=-1, keepdims=True)
    return kept + (1 - kept.sum(-1, keepdims=True)) * residual / jnp.where(total > 0, total, 1.0), None


def of_drafts(scores, alpha):
    """Cactus's targets h averaged over drafted tokens, as if each were followed exactly."""
    q, p = scores.q_sampled, scores.p_sampled
    best = jnp.minimum(1.0, p + jnp.sqrt(2 * alpha * p * (1 - p)))
    scale = q * (1 - best) / (1 - p)
    return q * best + p * (scale.sum(-1, keepdims=True) - scale), None


def cut_to_the_likeliest(scores, alpha):
    """What relaxed acceptance refuses is drawn from p~ cut to what it accepts."""
    _, refused = METHODS["relaxed"].tuned(relaxed_top_k=TOP_K).target(scores, alpha)
    kept = jnp.where(refused, 0.0, scores.p_sampled)
    return target_probs(scores.q_sampled, kept / kept.sum(-1, keepdims=True), refused), refused


def of_sampled_p(scores, alpha):
    """Relaxed acceptance decides by p~, where it is to read p."""
    return METHODS["relaxed"].tuned(relaxed_top_k=TOP_K).target(scores._replace(p=scores.p_sampled), alpha)


def likeliest_of_q(scores, alpha):
    """A drafted token must be among the drafter's likeliest."""
    far = scores.p < jnp.max(scores.p, axis=-1, keepdims=True) - alpha
    refused = far | ~likeliest(jnp.log(scores.q), TOP_K, TOP_K)
    return target_probs(scores.q_sampled, scores.p_sampled, refused), refused


@pytest.mark.parametrize("bug", [one_residual, of_drafts])
def test_a_wrong_cactus_is_detected(bug):
    """By enumeration: of four tokens, a residual of the wrong scale differs too little for 200,000 texts."""
    wrong = []
    for delta in DELTAS[1:]:
        for q, p in pairs(20, 5):
            law, _ = bug(Scores(q, p, jnp.asarray(q), jnp.asarray(p), jnp.asarray(False)), delta)
            wrong.append(np.abs(np.asarray(law) - toys.cactus(q, p, delta)).max())
    assert np.mean(np.array(wrong) > 1e-3) > 0.1


@pytest.mark.full
def test_the_law_test_detects_a_wrong_cactus(monkeypatch):
    monkeypatch.setitem(METHODS, "cactus", dataclasses.replace(METHODS["cactus"], target=of_drafts))
    assert p_value(["cactus"], [0.1], [2], rows=20_000) < FAIL_BELOW


@pytest.mark.full
@pytest.mark.parametrize(
    "bug,alpha,temperature",
    [
        pytest.param(cut_to_the_likeliest, 0.3, 1.0, id="cut_to_the_likeliest"),
        pytest.param(of_sampled_p, 0.05, 0.6, id="of_sampled_p"),
        pytest.param(likeliest_of_q, 1.0, 1.0, id="likeliest_of_q"),
    ],
)
def test_the_law_test_detects_a_wrong_relaxed_acceptance(bug, alpha, temperature):
    asked = {"rows": 40_000, "alpha": alpha, "temperature": temperature}
    right = METHODS["relaxed"].tuned(relaxed_top_k=TOP_K)
    assert relaxed_p_value("relaxed", right, **asked) > FAIL_BELOW
    assert relaxed_p_value("relaxed", dataclasses.replace(right, target=bug), **asked) < FAIL_BELOW
