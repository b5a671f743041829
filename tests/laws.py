"""The laws: every model's, every sampler's and every rule's, and planted bugs that they must catch.

A LanguageModel obeys append, chunk, rollback, rows and vocabulary. A sampler's texts follow the law that
enumeration gives (toys.sequence_law shares no code with the package), whatever else is in the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import (
    EOS,
    FAIL_BELOW,
    FAMILIES,
    LENIENCE,
    PROMPTS,
    STEPS,
    TABLES,
    TRANSFORMS,
    VOCAB,
    decoded,
    p_value,
    quick,
    texts,
)
from shapes import DECODERS, LENGTH, SOURCE, TARGET, TINY_GEMMA, TINY_T5, TINY_T5GEMMA
from tiny_models import in_blocks, prefilled
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core.loop import generate
from speccascade_jax.core.nests import insert
from speccascade_jax.core.protocols import NO_TOKEN
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative, hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import model_of

BY_PREFIX = [name for name, method in METHODS.items() if method.by_prefix]  # others: test_lookahead.py
SHAPES = {"t5": TINY_T5, "t5, a table a layer": dataclasses.replace(TINY_T5, shared_position_bias=False),
          "gemma": TINY_GEMMA}
TODAY = {name: shape for name, shape in DECODERS.items() if name != "gemma2"} | {"t5gemma": TINY_T5GEMMA}


# Laws of models

@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def tiny(request):
    model = model_of(request.param)
    params = model.init(0)
    if model.config.family == "t5":
        for name in ("encoder_bias", "decoder_bias"):  # far from zero: a table that is missed shows
            params[name] = params[name].replace(10 * params[name][...])
    return model, params


def test_append_and_chunk(tiny):
    model, params = tiny
    start = prefilled(model, params)
    whole, cache = in_blocks(model, params, TARGET, [30], start)
    assert (cache.length - start.length).tolist() == [30, 30, 30]
    parts, cache = in_blocks(model, params, TARGET, [1, 11, 18], start)
    assert (cache.length - start.length).tolist() == [30, 30, 30]
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def test_rollback_with_ragged_lengths(tiny):
    model, params = tiny
    start = prefilled(model, params)
    _, cache = in_blocks(model, params, TARGET, [20], start)
    kept = np.array([3, 20, 11], np.int32)
    new = TARGET[:, ::-1][:, :6]
    rolled, _ = in_blocks(model, params, new, [2, 4], model.roll_back(cache, start.length + kept))
    for row, length in enumerate(kept):
        tokens = np.concatenate([TARGET[:, :length], new], axis=1)
        fresh, _ = in_blocks(model, params, tokens, [tokens.shape[1]], start)
        np.testing.assert_allclose(rolled[row], fresh[row, length:], atol=1e-5)


def test_rows_are_independent(tiny):
    model, params = tiny
    together, _ = in_blocks(model, params, TARGET, [10, 20], prefilled(model, params))
    for row in range(3):
        _, cache = model.prefill(params, SOURCE[row:row + 1], LENGTH[row:row + 1], 64)
        alone, _ = in_blocks(model, params, TARGET[row:row + 1], [10, 20], cache)
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


def test_vocabulary(tiny):
    model, params = tiny
    logits, _ = in_blocks(model, params, TARGET, [30], prefilled(model, params))
    assert logits.shape[-1] == model.vocab_size > TARGET.max()
    assert np.isfinite(logits).all()


def test_padding_does_not_matter(tiny):
    model, params = tiny
    _, cache = model.prefill(params, SOURCE[:, :13], np.minimum(LENGTH, 13), 64)
    short, _ = in_blocks(model, params, TARGET, [30], cache)
    long, _ = in_blocks(model, params, TARGET, [30], prefilled(model, params))
    np.testing.assert_allclose(short[1:], long[1:], atol=1e-5)


@pytest.mark.full(quick=["gemma-widths2-1-1"])
@pytest.mark.parametrize("widths,rows,fresh_rows", [
    pytest.param(widths, rows, fresh, id=f"widths{n}-{rows}-{fresh}") for n, widths in enumerate(
        [(20, 20), (20, 13), (13, 20)]) for rows, fresh in [((1, 1), (3, 4)), ((1, 2), (3, 1)),
                                                           ((1, 1), (3, 3))][n]])
def test_rows_can_be_replaced(tiny, rows, fresh_rows, widths):
    """Any number of rows into any batch, from inputs of another width: each goes on as it would have."""
    model, params = tiny
    old_width, new_width = widths

    def begun(which, width):
        source, length = SOURCE[which % 3, :width], np.minimum(LENGTH[which % 3], width)
        _, cache = model.prefill(params, source, length, width + 34)
        return in_blocks(model, params, TARGET[which % 3], [3], cache)[1]

    old, new = np.arange(rows), np.arange(1, 1 + fresh_rows)
    slots = np.arange(fresh_rows) + rows - 1  # the first of them is in the batch, others are left out
    like_fresh = new_width > old_width
    kept = insert(model, begun(old, old_width), begun(new, new_width), jnp.array(slots), like_fresh)
    expected = {n: (n, old_width) for n in range(rows)}
    expected |= {int(slot): (which, new_width) for slot, which in zip(slots, new, strict=True) if slot < rows}
    tokens = np.stack([TARGET[which % 3, 3:9] for which, _ in expected.values()])
    found, _ = in_blocks(model, params, tokens, [2, 4], kept)
    for row, (which, width) in expected.items():
        alone, _ = in_blocks(model, params, tokens[row:row + 1], [2, 4], begun(np.array([which]), width))
        np.testing.assert_allclose(found[row], alone[0], atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("shape", TODAY.values(), ids=TODAY)
def test_todays_families_keep_the_five_laws(shape):
    """Append, chunk, vocabulary, rollback with ragged lengths and rows, in as few programs as possible."""
    model = model_of(shape)
    params, extend = model.init(0), jax.jit(model.extend)
    start, text, other = prefilled(model, params), TARGET[:, :12], TARGET[:, 12:20]

    def read(tokens, cache, *sizes):
        found = []
        for begin, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
            logits, cache = extend(params, tokens[:, begin:begin + size], cache)
            found.append(logits)
        return np.concatenate(found, axis=1), cache

    whole, cache = read(text, start, 12)
    assert (cache.length - start.length).tolist() == [12, 12, 12]
    assert whole.shape[-1] == model.vocab_size and np.isfinite(whole).all()
    parts, cache = read(text, start, 4, 8)
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    kept = np.array([4, 12, 8], np.int32)
    rolled, _ = read(other, model.roll_back(cache, start.length + kept), 8)
    for row, length in enumerate(kept):
        tokens = np.tile(np.concatenate([text[row, :length], other[row]]), (3, 1))
        fresh, _ = read(tokens, start, *[4] * (tokens.shape[1] // 4))
        np.testing.assert_allclose(rolled[row], fresh[row, length:], atol=1e-5)
    _, alone = model.prefill(params, SOURCE[1:2], LENGTH[1:2], 64)
    np.testing.assert_allclose(read(text[1:2], alone, 12)[0][0], whole[1], atol=1e-5)


# Laws of samplers and rules

@pytest.mark.parametrize("family,transform,gamma", quick(
    *((f, t, (1, 2, 5)[(n + k) % 3]) for n, f in enumerate(FAMILIES) for k, t in enumerate(TRANSFORMS)),
    among=[("speculative", "plain", 1), ("opt", "top_p", 1), ("token_v3", "min_p", 5)]))
def test_two_models_follow_the_law(family, transform, gamma, rows, full):
    for temperature in (0.5, 1.0) if full else (0.5,):
        assert p_value([family], [FAMILIES[family]], [gamma], rows=rows, temperature=temperature,
                       **TRANSFORMS[transform]) > FAIL_BELOW


@pytest.mark.parametrize("families,transform,gamma", quick(
    *((f, t, (1, 2, 5)[(n + k) % 3]) for n, f in enumerate((
        ("speculative", "speculative"), ("token_v3", "opt"), ("opt", "token_v3"), ("speculative", "chow")))
        for k, t in enumerate(TRANSFORMS)),
    among=[(("opt", "token_v3"), "top_k", 1)]))
def test_three_models_follow_the_law(families, transform, gamma, rows, full):
    alphas = [LENIENCE[f] for f in families]
    for temperature in (0.7, 1.0) if full else (0.7,):
        assert p_value(families, alphas, [2, gamma], rows=rows, temperature=temperature,
                       **TRANSFORMS[transform]) > FAIL_BELOW


@pytest.mark.full
@pytest.mark.parametrize("method", BY_PREFIX)
def test_every_method_follows_its_law(method, rows):
    for temperature in (0.5, 1.0):
        assert p_value([method], [LENIENCE[method]], [2], rows=rows, temperature=temperature) > FAIL_BELOW


@pytest.mark.parametrize("method", BY_PREFIX)
def test_every_method_at_temperature_zero(method):
    tokens, which = texts([method], [LENIENCE[method]], [3], rows=1024, temperature=0.0)
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(TABLES[:2], [method], [LENIENCE[method]], prompt, steps=STEPS, eos=EOS,
                           temperature=0.0)
        assert {tuple(int(t) for t in row if t >= 0) for row in tokens[which == n]} == set(law)


def test_one_model_follows_its_law(rows):
    assert p_value([], [], [], rows=rows) > FAIL_BELOW


# Unlike rows: all that a row may choose for itself
ASKED = [{"method": "speculative", "temperature": 1.0}, {"method": "opt", "alpha": 0.05, "temperature": 0.7},
         {"method": "token_v3", "alpha": 0.4, "temperature": 1.3, "top_k": 3},
         {"method": "chow", "alpha": 0.5, "temperature": 2.0, "top_p": 0.8},
         {"method": "lossy", "alpha": 0.3, "temperature": 2.0, "min_p": 0.15},
         {"method": "token_v1", "alpha": 0.3, "temperature": 3.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
         {"method": "speculative", "temperature": 1.0, "limit": 2},
         {"method": "lossy_tuned", "alpha": 0.3, "temperature": 0.7},
         {"method": "opt", "alpha": 0.3, "temperature": 0.0},
         {"method": "bild_star", "alpha": 1.5, "temperature": 1.5, "top_p": 0.9}]


def test_unlike_rows_follow_each_its_own_law(full, rows):
    """One batch, one compiled program: methods, leniences, limits and options of all kinds together."""
    calls = len(ASKED) if full else 2  # with all of them, so many rows of each kind
    kind = np.random.default_rng(0).integers(0, len(ASKED), rows)
    column = {name: np.array([asked.get(name, off) for asked in ASKED])[kind] for name, off in (
        ("alpha", 0.0), ("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("limit", STEPS))}
    methods = np.array([list(METHODS).index(asked["method"]) for asked in ASKED])[kind][:, None]
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), tuple(METHODS.values()), 2)
    before, found = generate._cache_size(), []
    for seed in range(calls):
        order = np.random.default_rng(seed).permutation(rows)  # every kind at every place in the batch
        options = SamplingOptions(**{name: column[name][order]
                                     for name in ("temperature", "top_k", "top_p", "min_p")}, max_top_k=3)
        result, which = decoded(sampler, tuple(TABLES[:2]), rows, options, column["alpha"][order][:, None],
                                seed, methods=methods[order], limits=column["limit"][order])
        found.append((np.asarray(result.tokens), which, kind[order]))
    assert generate._cache_size() == before + 1
    tokens, which, kinds = (np.concatenate(parts) for parts in zip(*found, strict=True))
    chances, others = [], []
    for number, asked in enumerate(ASKED):
        options = {name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in asked}
        for n, prompt in enumerate(PROMPTS):
            law = sequence_law(TABLES[:2], [asked["method"]], [asked.get("alpha", 0.0)], prompt,
                               steps=asked.get("limit", STEPS), eos=EOS, **options)
            chances.append(chi_square(tokens[(kinds == number) & (which == n)], law))
            neighbour = (number + 1) % len(ASKED)
            others.append(chi_square(tokens[(kinds == neighbour) & (which == n)], law))
    assert len(chances) * min(chances) > FAIL_BELOW
    assert max(others) < FAIL_BELOW  # the control: no kind passes for another


@pytest.mark.parametrize("alphas,methods", [((), None), ((0.1, 0.2), None), ((0.1,), (0, 0)), (0.1, None)])
def test_values_for_another_number_of_verifiers_are_refused(alphas, methods):
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHODS["opt"], 2)
    with pytest.raises(ValueError, match="1 verifiers: give"):
        decoded(sampler, tuple(TABLES[:2]), 4, SamplingOptions(), alphas, methods=methods)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k"])
def test_options_for_another_number_of_rows_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        decoded(Autoregressive(TableLM(VOCAB)), TABLES[0], 4, SamplingOptions(**{name: np.ones(3)}), ())


def test_limits_cut_and_change_nothing_else():
    """Limits of 1 .. gamma + 2 tokens with gamma = 5, each row its own: texts are prefixes of the longest."""
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHODS["opt"], 5)
    keys = jax.vmap(jax.random.key)(jnp.arange(64))
    inputs, lengths = np.ones((64, 1), np.int32), np.ones(64, np.int32)

    def run(most, limits=None):
        return np.asarray(generate(sampler, tuple(TABLES[:2]), keys, inputs, lengths, SamplingOptions(),
                                   jnp.array([0.3]), max_new_tokens=most, eos_id=EOS, limits=limits).tokens)

    longest = run(7)
    np.testing.assert_array_equal(run(4), longest[:, :4])
    limits = np.arange(64) % 8
    np.testing.assert_array_equal(run(7, limits), np.where(np.arange(7) < limits[:, None], longest, -1))


@pytest.mark.full
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
                        jnp.full(len(methods), 0.05), max_new_tokens=20,
                        eos_id=EOS if outer is None else NO_TOKEN)  # at an end neither reads on

    spared, whole = run(True), run(False)
    for name in ("tokens", "origin", "length"):
        np.testing.assert_array_equal(getattr(spared, name), getattr(whole, name))
    passes = [r.counts[0] if outer is None else r.counts[0][0] for r in (whole, spared)]
    rounds = [r.counts[1].rounds if outer is None else r.counts[0][1].rounds for r in (whole, spared)]
    np.testing.assert_array_equal(rounds[0], rounds[1])
    np.testing.assert_array_equal(passes[0] - passes[1], rounds[0])
