"""Drafters with another vocabulary: outputs follow the stated laws, whatever the token ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import FAIL_BELOW, FAMILIES, after, quick, table_of
from shapes import LENGTH, SOURCE, TARGET, TINY_GEMMA, TINY_T5
from tiny_models import in_blocks, prefill, prefilled
from toy_vocabularies import END, PADDING, PROMPTS, Pair
from toy_vocabularies import TARGET as PIECES
from toys import TableLM, chi_square, table

from speccascade_jax.core import loop, verification
from speccascade_jax.core.loop import generate
from speccascade_jax.core.nests import insert
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import autoregressive, hierarchy
from speccascade_jax.core.samplers import speculative as samplers
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import model_of
from speccascade_jax.models.layers import Branches
from speccascade_jax.vocabularies.tli import pruned
from speccascade_jax.vocabularies.translated import (
    NONE,
    Source,
    Tables,
    Translated,
    TranslatedCache,
    TranslatedParams,
)

PAIR = Pair()


def p_value(pair, methods, alphas, block_sizes, rows, prompts=PROMPTS, law=None, above=(), **options):
    """The smaller p-value of the prompts, times their number."""
    result, which = pair.decoded(methods, alphas, block_sizes, rows, prompts=prompts, above=above, **options)
    options = {k: v for k, v in options.items() if k not in ("union", "models", "seed", "verification")}
    tokens = np.asarray(result.tokens)
    law = law or (lambda prompt: pair.law(methods, alphas, prompt, above=above, **options))
    return len(prompts) * min(chi_square(tokens[which == n], law(p)) for n, p in enumerate(prompts))


@pytest.mark.parametrize(
    "family,gamma",
    quick(
        *zip(("speculative", "token_v3", "opt", "speculative", "token_v3"), (2, 4, 1, 4, 1), strict=True),
        among=[("speculative", 2), ("token_v3", 4)],
    ),
)
def test_a_foreign_drafter_follows_the_law(family, gamma, rows):
    """Tokens of several letters, the end under another number, tokens that only one of the two has."""
    assert p_value(PAIR, [family], [FAMILIES[family]], [gamma], rows) > FAIL_BELOW


def test_prompts_that_end_within_a_target_token_follow_the_law(rows):
    """Of ab the drafter has read a and b: its cache covers the a, and the b alone is read first."""
    assert p_value(PAIR, ["opt"], [FAMILIES["opt"]], [2], rows, [(4,), (1, 5)]) > FAIL_BELOW


@pytest.mark.full
@pytest.mark.parametrize(
    "family,options",
    [
        ("speculative", {"temperature": 0.5}),
        ("opt", {"top_k": 2}),
        ("token_v3", {"top_k": 2}),
        ("speculative", {"top_p": 0.8}),
        ("opt", {"min_p": 0.1}),
        ("token_v3", {"min_p": 0.1}),
    ],
)
def test_transforms_with_a_foreign_drafter(family, options, rows):
    assert p_value(PAIR, [family], [FAMILIES[family]], [2], rows, **options) > FAIL_BELOW


LETTERS = Pair(drafter=[END, PADDING, "b", "a"])
MIXED = (["ba", "b", END, "aab", PADDING, "a", "ab", "b", "aab"], ["bb", "a", PADDING, "b", END, "a"], 2)
"""Pieces in any order, some of them twice, and rows of padding."""
OTHER_PROMPTS = [(5,), (6, 1)]


@pytest.mark.parametrize(
    "pair,family",
    [
        pytest.param(LETTERS, "opt", id="letters-opt", marks=pytest.mark.full),
        pytest.param(PAIR, "token_v3", id="pieces-token_v3"),
        pytest.param(LETTERS, "speculative", id="letters-speculative", marks=pytest.mark.full),
        pytest.param(LETTERS, "token_v3", id="letters-token_v3", marks=pytest.mark.full),
    ],
)
def test_drafts_of_the_first_token_of_a_text_follow_the_law(pair, family, rows):
    """SLRS: the law psi over the target's tokens is the drafter's."""
    assert p_value(pair, [family], [FAMILIES[family]], [2], rows, slrs=True) > FAIL_BELOW


@pytest.mark.parametrize("pair", [LETTERS, PAIR])
def test_psi_is_enumerated_exactly(pair):
    drafter, params = (part[0] for part in pair.models(slrs=True))
    params = params._replace(drafter=jnp.asarray(params.drafter))
    source = Source(jnp.array([[1, 0]]), jnp.array([pair.drafter.cut("a") + [0] * 15]), jnp.array([1]))
    _, cache = prefill(drafter, params, source, jnp.array([1]), 12)
    text = [1, 4, 2, 6, 5]
    logits, _ = jax.jit(drafter.extend)(params, jnp.array([text]), cache)
    laws = np.exp(np.asarray(logits[0], np.float64))
    for at in range(len(text)):
        expected = pair.psi((1,))((0, 1, *text[1 : at + 1]))
        np.testing.assert_allclose(laws[at] / laws[at].sum(), expected, atol=1e-6)


def test_union_is_lossless(rows):
    assert p_value(PAIR, ["speculative"], [0.0], [3], rows, union=True) > FAIL_BELOW


@pytest.mark.full(quick=["methods1-way1-transform1"])
@pytest.mark.parametrize(
    "methods,way,transform",
    quick(
        *(((family,), {}, {}) for family in FAMILIES),
        (("opt",), {}, {"top_p": 0.8, "temperature": 0.7}),
        (("opt",), {"slrs": True}, {}),
        (("speculative",), {"union": True}, {}),
        (("token_v3", "opt"), {}, {}),
        among=[(("opt",), {}, {}), (("speculative",), {"union": True}, {})],
    ),
)
def test_drafts_verified_as_a_whole_follow_the_law(methods, way, transform, rows):
    """Whichever way the vocabularies are joined; slem's drafts: core/samplers/test_proposals.py."""
    above = (table(41, PAIR.size),) * (len(methods) - 1)
    options = {"verification": verification.BLOCK, "above": above, **way, **transform}
    alphas = [FAMILIES[method] for method in methods]
    assert p_value(PAIR, methods, alphas, [3] + [2] * len(above), rows, **options) > FAIL_BELOW


@pytest.mark.full
@pytest.mark.parametrize(
    "way", [{}, {"slrs": True}, {"verification": verification.BLOCK}], ids=["tli", "slrs", "block"]
)
def test_lenience_by_span_with_a_foreign_drafter(way, rows):
    """A marker is of the verifier's tokens, whoever drafts them: "ba" in both of its spellings, of which the
    drafter has one."""
    spellings, strict = [((5,), (0.95,)), ((2, 1), (0.95,))], (0.05,)
    options = {"markers": table_of([spellings]), **way}

    def chance(markers):
        def law(prompt):
            return PAIR.law(["token_v3"], after(markers, strict), prompt, slrs="slrs" in way)

        return p_value(PAIR, ["token_v3"], [strict[0]], [3], rows, law=law, **options)

    assert chance(spellings) > FAIL_BELOW
    for fewer in ([], spellings[:1], spellings[1:]):  # the controls
        assert chance(fewer) < FAIL_BELOW


@pytest.mark.long
@pytest.mark.full
def test_numbers_by_position_are_detected_in_blocks_of_a_foreign_drafter(monkeypatch):
    """A planted bug: random numbers belong to positions, not to rounds."""
    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "by_round", lambda sampler, ways: jnp.zeros(ways.shape, bool))
        options = {"verification": verification.BLOCK, "union": True}
        assert p_value(PAIR, ["speculative"], [0.0], [3], 200_000, **options) < FAIL_BELOW
    jax.clear_caches()


@pytest.mark.full
@pytest.mark.parametrize(
    "methods,options", [(("speculative", "opt"), {"slrs": True}), (("token_v3", "speculative"), {})]
)
def test_a_hierarchy_with_a_foreign_bottom_level(methods, options, rows):
    alphas = [FAMILIES[method] for method in methods]
    assert p_value(PAIR, methods, alphas, [2, 2], rows, above=(table(41, PAIR.size),), **options) > FAIL_BELOW


@pytest.mark.full(quick=["opt-options0"])
@pytest.mark.parametrize(
    "family,options",
    [("opt", {}), ("speculative", {"slrs": True}), ("token_v3", {}), ("token_v3", {"slrs": True})],
)
def test_other_numbers_padding_and_duplicates(family, options, rows):
    alphas = [FAMILIES[family]]
    assert p_value(Pair(*MIXED), [family], alphas, [2], rows, OTHER_PROMPTS, **options) > FAIL_BELOW


def test_padding_rows_are_never_drafted():
    pair = Pair(padded=2)
    drafter, params = (part[0] for part in pair.models())
    params = params._replace(drafter=jnp.asarray(params.drafter))
    source = Source(jnp.array([[1]]), jnp.array([[3] + [0] * 15]), jnp.array([1]))
    _, cache = prefill(drafter, params, source, jnp.array([1]), 8)
    logits, _ = jax.jit(drafter.extend)(params, jnp.array([[1]]), cache)
    assert np.isneginf(logits[0, 0, [4, 5, 6, 7, 8]]).all()  # ab, ba, aab and two rows of padding
    assert np.isfinite(logits[0, 0, :4]).all()


@pytest.mark.full
@pytest.mark.parametrize("method", FAMILIES)
def test_identical_vocabularies_change_nothing(method):
    pair = Pair(drafter=PIECES)
    result, _ = pair.decoded([method], [0.3], [3], 256, steps=12)
    sampler = hierarchy([TableLM(pair.size)] * 2, [METHODS[method]], [3])
    tokens = np.array([[1, 0], [4, 2]] * 128, np.int32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(256))
    plain = generate(
        sampler,
        pair.tables,
        keys,
        tokens,
        np.array([1, 2] * 128),
        SamplingOptions(1.0),
        jnp.array([0.3]),
        max_new_tokens=12,
        eos_id=pair.target.eos_id,
    )
    jax.tree.map(np.testing.assert_array_equal, plain, result)


# One position, exactly: a procedure's output and acceptance, and variants that look right


def step(q, p, ratio=None, refill=None):
    """(output, acceptance) of: draw from q, accept with min(1, p / ratio), else draw from refill, by default
    the residual max(0, p - ratio)."""
    ratio = q if ratio is None else ratio
    kept = q * np.minimum(1, np.divide(p, ratio, out=np.zeros_like(p), where=ratio > 0))
    refill = np.maximum(p - ratio, 0) if refill is None else refill
    return kept + (1 - kept.sum()) * refill / refill.sum(), kept.sum()


def matching(psi, p, refill=None):
    """(output, acceptance) of exact match: a token of psi is taken for known, and verified as that."""
    each = [step(law, p, refill=refill) for law in np.eye(len(p))]
    return sum(mass * out for mass, (out, _) in zip(psi, each, strict=True)), psi @ [kept for _, kept in each]


def laws(seed):
    """p and q over the letters' tokens of both vocabularies: a b ab ba aab, and the drafter's bb."""
    rng = np.random.default_rng(seed)
    p, q = np.zeros(6), np.zeros(6)
    p[:5], q[[0, 1, 5]] = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(3))
    return p, q


def first_tokens(seed):
    """p and psi over TARGET: the end and the tokens of letters."""
    p = np.zeros(len(PIECES))
    p[1:] = np.random.default_rng(seed).dirichlet(np.ones(len(PIECES) - 1))
    return p, Pair(seeds=(seed, 0)).psi((1,))((0, 1))


def test_each_verification_gives_p_and_accepts_as_stated():
    for seed in range(50):
        p, q = laws(seed)
        common = np.where([True, True, False, False, False, False], q, 0)
        tli = common / common.sum()
        union, accepted = step(q, p)
        np.testing.assert_allclose(union, p, atol=1e-12)
        assert accepted == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
        output, more = step(tli, p)
        np.testing.assert_allclose(output, p, atol=1e-12)
        assert more == pytest.approx(np.minimum(p, tli).sum(), abs=1e-12) and more >= accepted - 1e-12
        p, psi = first_tokens(seed)
        output, accepted = matching(psi, p)
        np.testing.assert_allclose(output, p, atol=1e-12)
        assert accepted == pytest.approx(p @ psi, abs=1e-12)
        output, more = step(psi, p)
        np.testing.assert_allclose(output, p, atol=1e-12)
        assert more == pytest.approx(np.minimum(p, psi).sum(), abs=1e-12) and more >= accepted


@pytest.mark.parametrize(
    "wrong",
    [
        "ratio not renormalised",
        "target cut to the intersection",
        "p anew for a draft that is no token",
        "p anew for another token",
    ],
)
def test_plausible_variants_are_wrong(wrong):
    def variant(p, q):
        common = np.where([True, True, False, False, False, False], q, 0)
        tli, cut = common / common.sum(), np.where(common > 0, p, 0)
        if wrong == "ratio not renormalised":
            return step(tli, p, common)
        return step(q, p, refill=p) if wrong.startswith("p anew") else step(tli, cut / cut.sum())

    def distance(seed):
        p, q = laws(seed)
        if wrong == "p anew for another token":
            p, psi = first_tokens(seed)
            return np.abs(matching(psi, p, refill=p)[0] - p).sum() / 2
        return np.abs(variant(p, q)[0] - p).sum() / 2

    assert max(map(distance, range(50))) > 0.05


def not_renormalised(monkeypatch):
    """The drafts' laws as they were before what only the drafter has was left out."""
    verify = verification.verify

    def wrong(accept_u, draw_u, draft, pi, *ways):
        return verify(accept_u, draw_u, draft._replace(probs=0.7 * draft.probs), pi, *ways)

    monkeypatch.setattr(samplers, "verify", wrong)


def cut_target(monkeypatch):
    """The verifier's law cut to the intersection."""
    extend = TableLM.extend

    def wrong(self, params, tokens, cache):
        logits, cache = extend(self, params, tokens, cache)
        return (logits.at[..., 4:].set(-jnp.inf) if self.vocab_size == 7 else logits), cache

    monkeypatch.setattr(TableLM, "extend", wrong)


def rolled_back_to_target_positions(monkeypatch):
    """The drafter's cache rolled back to as many own tokens as there are target tokens."""

    def wrong(self, cache, length):
        drafter_cache = self.model.roll_back(cache.drafter, jnp.minimum(cache.drafter.length, length))
        return cache._replace(drafter=drafter_cache, length=length)

    monkeypatch.setattr(Translated, "roll_back", wrong)


def permuted_columns(monkeypatch):
    """Drafts numbered in another order than the laws' columns."""
    draw = autoregressive.draw

    def wrong(u, weights):
        token = draw(u, weights)
        return jnp.where(token < 3, jnp.array([0, 2, 1])[jnp.minimum(token, 2)], token)

    monkeypatch.setattr(autoregressive, "draw", wrong)


@pytest.mark.full(quick=["permuted_columns-speculative"])
@pytest.mark.parametrize(
    "plant,method",
    [
        (not_renormalised, "speculative"),
        (cut_target, "speculative"),
        (permuted_columns, "speculative"),
        (rolled_back_to_target_positions, "token_v3"),
    ],
)
def test_the_law_test_fails_on_a_planted_bug(plant, method, rows, monkeypatch):
    alphas, sizes = [FAMILIES[method]], [2]
    plant(monkeypatch)
    jax.clear_caches()
    try:
        assert p_value(PAIR, [method], alphas, sizes, rows) < FAIL_BELOW
    finally:
        jax.clear_caches()


# The laws of a LanguageModel


def wrapped(config, seed=0, vocab=40):
    """A drafter of 97 tokens for a vocabulary of 40, each spelled by one to four of its own."""
    rng, model = np.random.default_rng(seed), model_of(config)
    keep = np.sort(rng.choice(np.arange(2, 97), 25, replace=False)).astype(np.int32)
    common = rng.permutation(vocab)[:25]
    drafter_params, head, cut = pruned(model, model.init(seed), keep)
    assert cut
    place = np.full(vocab, NONE, np.int32)
    place[common] = np.arange(25)
    spelled, sizes = rng.integers(2, 97, (vocab, 4)), rng.integers(1, 5, vocab)
    spelled[common, 0], sizes[common] = keep, 1
    start = None if hasattr(config, "bos_id") else 0
    drafter = Translated(model, vocab, 4, 3.0, start)
    return drafter, TranslatedParams(
        drafter_params, head, Tables(place, spelled.astype(np.int32), sizes.astype(np.int32))
    )


SHAPES = {"t5": TINY_T5, "t5, tied": dataclasses.replace(TINY_T5, tied_embeddings=True), "gemma": TINY_GEMMA}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def foreign(request):
    return wrapped(request.param)


def begun(model, params, rows=(0, 1, 2), width=SOURCE.shape[1]):
    rows = list(rows)
    read = np.pad(SOURCE[rows, :width] % 97, ((0, 0), (0, model.reads(width) - width)))
    length = np.minimum(LENGTH[rows], width)
    _, cache = prefill(model, params, Source(SOURCE[rows, :width] % 40, read, length), length, width + 40)
    return cache


@pytest.mark.full
def test_a_translated_drafter_is_a_language_model(foreign):
    """Append, chunk, rows and vocabulary; the law is the own model's after the own tokens."""
    model, params = foreign
    assert isinstance(model, LanguageModel)
    tokens, start = TARGET % 40, begun(model, params)
    whole, cache = in_blocks(model, params, tokens, [30], start)
    assert (cache.length - start.length).tolist() == [30] * 3 and whole.shape[-1] == 40
    parts, _ = in_blocks(model, params, tokens, [1, 2, 10, 17], start)
    np.testing.assert_allclose(parts, whole, atol=2e-5)
    tables = params.tables
    for row in range(3):
        drafter_tokens = [int(start.first[row])]
        for token in tokens[row, 1:12]:
            drafter_tokens += tables.spelled[token, : tables.sizes[token]].tolist()
        table = {} if params.head is None else {"table": params.head}
        alone = begun(model, params, [row]).drafter
        logits, _ = model.model.extend(params.drafter, np.array([drafter_tokens]), alone, **table)
        expected = np.append(np.asarray(logits[0, -1]), -np.inf)[np.minimum(tables.place, 25)]
        np.testing.assert_allclose(whole[row, 11], expected, atol=2e-5)


@pytest.mark.full
def test_rolling_back_is_a_length(foreign):
    model, params = foreign
    tokens, start = TARGET % 40, begun(model, params)
    _, cache = in_blocks(model, params, tokens, [20], start)
    kept, new = np.array([3, 20, 11], np.int32), (TARGET[:, ::-1] % 40)[:, :6]
    rolled, _ = in_blocks(model, params, new, [2, 4], model.roll_back(cache, start.length + kept))
    for row, length in enumerate(kept):
        text = np.concatenate([tokens[:, :length], new], axis=1)
        fresh, _ = in_blocks(model, params, text, [text.shape[1]], start)
        np.testing.assert_allclose(rolled[row], fresh[row, length:], atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("widths", [(20, 13), (13, 20)])
def test_rows_can_be_replaced(foreign, widths):
    model, params = foreign

    def read(rows, width, count, sizes):
        return in_blocks(model, params, TARGET[rows, :count] % 40, sizes, begun(model, params, rows, width))

    old, new = read([0, 1], widths[0], 3, [3])[1], read([2], widths[1], 3, [3])[1]
    kept = insert(model, old, new, jnp.array([1]), widths[1] > widths[0])
    assert isinstance(kept, TranslatedCache)
    logits, _ = in_blocks(model, params, TARGET[[0, 2], 3:9] % 40, [2, 4], kept)
    for place, (row, width) in enumerate(((0, widths[0]), (2, widths[1]))):
        alone, _ = read([row], width, 9, [3, 6])
        np.testing.assert_allclose(logits[place], alone[0, 3:], atol=2e-5)


@pytest.mark.full
def test_a_text_with_too_many_drafter_tokens_is_read_to_a_limit():
    """Past it all tokens of the law are equally likely, and what stands before is as it was."""
    model, params = wrapped(TINY_T5)
    model = dataclasses.replace(model, stretch=1.0)
    tables = params.tables
    tokens = np.full((1, 30), np.argmax(tables.sizes), np.int32)
    start = begun(model, params, [0], 20)
    roomy = begun(dataclasses.replace(model, stretch=4.0), params, [0], 20)
    limit = int(start.limit[0]) // int(tables.sizes.max())
    assert limit < 28
    logits, cache = in_blocks(model, params, tokens, [2] * 15, start)
    expected, _ = in_blocks(model, params, tokens, [2] * 15, roomy)
    np.testing.assert_allclose(logits[0, :limit], expected[0, :limit], atol=2e-5)
    assert {0.0, -np.inf} == set(np.unique(logits[0, limit + 2 :]))
    again, _ = in_blocks(model, params, tokens[:, :4], [4], model.roll_back(cache, start.length + 2))
    np.testing.assert_allclose(again[0], expected[0, 2:6], atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("config", [TINY_T5, TINY_GEMMA], ids=["t5", "gemma"])
def test_branches_are_read_as_each_text_by_itself(config):
    """A tree of texts after caches of ragged lengths: the logits of every node, and the cache as it was."""
    rng, model = np.random.default_rng(0), model_of(config)
    params = model.init(0)
    parent = [-1, 0, 1, 0, -1, 4, 5, 6, 2]
    tokens = rng.integers(2, 97, len(parent)).astype(np.int32)
    paths = [[n] for n in range(len(parent))]
    for path in paths:
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
    within = np.full((len(parent),) * 2, -1, np.int32)
    for n, path in enumerate(paths):
        within[n, path[::-1]] = np.arange(len(path))
    cache = prefilled(model, params)
    _, cache = in_blocks(model, params, TARGET, [9], cache)
    cache = model.roll_back(cache, cache.length - jnp.array([0, 4, 8]))
    branches = Branches(jnp.array([len(path) for path in paths]), jnp.asarray(within))
    branch_logits = jax.jit(model.extend_branches)(params, jnp.asarray(tokens), cache, branches)
    extend = jax.jit(model.extend)
    for n, path in enumerate(paths):
        text = np.pad(tokens[path], (0, 4 - len(path)))
        logits, _ = extend(params, np.tile(text, (3, 1)), cache)
        np.testing.assert_allclose(branch_logits[:, n], logits[:, len(path) - 1], atol=2e-5)
