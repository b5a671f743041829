"""The real compiled loop against the enumerated law, and planted bugs that it must catch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TableLM, chi_square, sequence_law, table

from speccascade_jax.core import loop, samplers, verification
from speccascade_jax.core.loop import generate
from speccascade_jax.core.methods import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative, hierarchy
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.evaluation.rates import check_identities

VOCAB, EOS, STEPS, ROWS = 4, 3, 4, 200_000
FAIL_BELOW = 1e-4
PROMPTS = [(1,), (2, 0, 1)]  # uneven: half of the rows each
TABLES = [table(seed, VOCAB) for seed in (39, 40, 41)]  # rules defer in about half of their contexts
TRANSFORMS = {"plain": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.8}}
FAMILIES = {"speculative": 0.0, "opt": 0.05, "token_v3": 0.4}  # lenience at which each defers and trusts
LENIENCE = {"chow": 0.5, "chow_log": 1.17, "diff": 0.03, "diff_log": 0.05, "opt": 0.05, "opt_log": 0.1,
            "token_v1": 0.3, "token_v2": 0.2, "token_v3": 0.4, "bild_star": 1.6, "lossy": 0.3,
            "lossy_tuned": 0.3, "lossy_greedy": 0.3, "speculative": 0.0}


def texts(methods, alphas, block_sizes, *, rows=ROWS, seed=0, **options):
    """Tokens [rows, STEPS] of the compiled loop, and the prompt number of each row."""
    models = [TableLM(VOCAB)] * (len(methods) + 1)
    sampler = hierarchy(models, [METHODS[m] for m in methods], block_sizes)
    params = TABLES[0]
    for larger in TABLES[1:len(models)]:
        params = (params, larger)
    which = np.arange(rows) % len(PROMPTS)
    inputs = np.zeros((rows, max(map(len, PROMPTS))), np.int32)
    for n, prompt in enumerate(PROMPTS):
        inputs[which == n, :len(prompt)] = prompt
    lengths = np.array([len(p) for p in PROMPTS], np.int32)[which]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    options = SamplingOptions(**{"temperature": 1.0, **options})
    result = generate(sampler, params, keys, inputs, lengths, options, jnp.array(alphas),
                      max_new_tokens=STEPS, eos_id=EOS)
    if methods:
        check_identities(result.counts[1])
        assert (np.asarray(result.counts[1].emitted) == result.length).all()
    return np.asarray(result.tokens), which


def p_value(methods, alphas, block_sizes, **options):
    """The smaller p-value of the two prompts, times two (Bonferroni)."""
    tokens, which = texts(methods, alphas, block_sizes, **options)
    options.pop("seed", None)
    laws = [sequence_law(TABLES[:len(methods) + 1], methods, alphas, prompt, steps=STEPS, eos=EOS, **options)
            for prompt in PROMPTS]
    return 2 * min(chi_square(tokens[which == n], law) for n, law in enumerate(laws))


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_models_follow_the_law(family, transform, gamma):
    for temperature in (0.5, 1.0):
        assert p_value([family], [FAMILIES[family]], [gamma], temperature=temperature,
                       **TRANSFORMS[transform]) > FAIL_BELOW


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("families", [("speculative", "speculative"), ("token_v3", "opt"),
                                      ("opt", "token_v3")])
def test_three_models_follow_the_law(families, transform, gamma):
    alphas = [FAMILIES[f] for f in families]
    for temperature in (0.5, 1.0):
        assert p_value(families, alphas, [2, gamma], temperature=temperature,
                       **TRANSFORMS[transform]) > FAIL_BELOW


@pytest.mark.parametrize("method", METHODS)
def test_every_method_follows_its_law(method):
    for temperature in (0.5, 1.0):
        assert p_value([method], [LENIENCE[method]], [2], temperature=temperature) > FAIL_BELOW


@pytest.mark.parametrize("method", METHODS)
def test_every_method_at_temperature_zero(method):
    tokens, which = texts([method], [LENIENCE[method]], [3], rows=64, temperature=0.0)
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(TABLES[:2], [method], [LENIENCE[method]], prompt, steps=STEPS, eos=EOS,
                           temperature=0.0)
        assert {tuple(int(t) for t in row if t >= 0) for row in tokens[which == n]} == set(law)


def test_one_model_follows_its_law():
    assert p_value([], [], []) > FAIL_BELOW


def test_blocks_beyond_the_limit_and_one_token_texts():
    """Limits of 1 .. gamma + 2 tokens with gamma = 5: texts are prefixes of the longest ones."""
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHODS["opt"], 5)
    keys = jax.vmap(jax.random.key)(jnp.arange(64))
    inputs, lengths = np.ones((64, 1), np.int32), np.ones(64, np.int32)

    def run(limit):
        return np.asarray(generate(sampler, tuple(TABLES[:2]), keys, inputs, lengths, SamplingOptions(),
                                   jnp.array([0.3]), max_new_tokens=limit, eos_id=EOS).tokens)

    longest = run(7)
    for limit in range(1, 7):
        np.testing.assert_array_equal(run(limit), longest[:, :limit])


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("outer", [None, "speculative", "opt"])
def test_a_lossless_drafter_spares_a_pass_and_nothing_else(outer, gamma):
    """The same tokens as with the pass that a lossless rule does not need, for a pass less each round."""
    def run(lossless):
        method = dataclasses.replace(METHODS["speculative"], lossless=lossless)
        methods, sizes = ([method], [gamma]) if outer is None else ([method, METHODS[outer]], [gamma, 6])
        sampler = hierarchy([TableLM(VOCAB)] * (len(methods) + 1), methods, sizes)
        params = (TABLES[0], TABLES[1]) if outer is None else ((TABLES[0], TABLES[1]), TABLES[2])
        keys, ones = jax.vmap(jax.random.key)(jnp.arange(512)), np.ones((512, 1), np.int32)
        return generate(sampler, params, keys, ones, ones[:, 0], SamplingOptions(),
                        jnp.full(len(methods), 0.05), max_new_tokens=20, eos_id=EOS)

    spared, whole = run(True), run(False)
    for name in ("tokens", "origin", "length"):
        np.testing.assert_array_equal(getattr(spared, name), getattr(whole, name))
    passes = [r.counts[0] if outer is None else r.counts[0][0] for r in (whole, spared)]
    rounds = [r.counts[1].rounds if outer is None else r.counts[0][1].rounds for r in (whole, spared)]
    np.testing.assert_array_equal(rounds[0], rounds[1])
    np.testing.assert_array_equal(passes[0] - passes[1], rounds[0])


# Planted bugs: the law test must fail on each, for the families that can show it.

def with_p(monkeypatch, wrong):
    """Every verification becomes wrong(verify, p~, its arguments ...)."""
    step, verify = Speculative.step, samplers.verify

    def patched(self, params, caches, rows, eos_id):
        def knowing_p(accept_u, draw_u, draft, pi):
            tokens = jnp.concatenate([rows.last[:, None], draft.tokens], axis=1)
            logits, _ = self.verifier.extend(params[1], tokens, caches[1])
            return wrong(verify, samplers.token_probs(logits, rows.options), accept_u, draw_u, draft, pi)

        monkeypatch.setattr(samplers, "verify", knowing_p)
        return step(self, params, caches, rows, eos_id)

    monkeypatch.setattr(Speculative, "step", patched)


def bonus_from_p(monkeypatch):
    """The bonus drawn from p~ (the preprint's print) instead of pi."""
    with_p(monkeypatch, lambda verify, p, accept_u, draw_u, draft, pi: verify(
        accept_u, draw_u, draft, pi.at[:, -1].set(p[:, -1])))


def residual_of_p(monkeypatch):
    """The residual max(0, p - q) whatever the target."""
    def wrong(verify, p, accept_u, draw_u, draft, pi):
        right = verify(accept_u, draw_u, draft, pi)
        at = right.num_accepted[:, None]
        weights = verification.residual(*(jnp.take_along_axis(x, at[..., None], 1)[:, 0]
                                          for x in (p, draft.probs)))
        token = samplers.draw(jnp.take_along_axis(draw_u, at, 1)[:, 0], weights)
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
    monkeypatch.setattr(samplers, "verify", lambda accept_u, *others: verification.verify(
        jnp.broadcast_to(accept_u[:, :1], accept_u.shape), *others))


def shared_key(monkeypatch):
    """Drafting and accepting share a random number."""
    noise = loop.noise
    monkeypatch.setattr(loop, "noise", lambda *args: jnp.broadcast_to(
        (table := noise(*args))[:, :1, :1], table.shape))


SEEN_BY = {bonus_from_p: ["opt", "token_v3"], residual_of_p: ["token_v3"],
           no_roll_back: list(FAMILIES), one_uniform: ["speculative", "token_v3"],
           shared_key: list(FAMILIES)}


@pytest.mark.parametrize("bug,family", [(b, f) for b, families in SEEN_BY.items() for f in families],
                         ids=lambda x: getattr(x, "__name__", x))
def test_law_test_catches(bug, family, monkeypatch):
    jax.clear_caches()
    with monkeypatch.context() as patch:
        bug(patch)
        assert p_value([family], [FAMILIES[family]], [2]) < FAIL_BELOW
    jax.clear_caches()
