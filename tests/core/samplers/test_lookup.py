"""Drafts without a model: the search, the law of what is written, and that nothing but committed tokens
counts."""

import copy
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lookup_reference import (
    LOOKED_UP,
    choice_law,
    continued,
    followed,
    greedy_choices,
    greedy_rounds,
    token_v3_law,
)
from toys import TableLM, chi_square, sequence_law, table, table_law, target

from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import NO_TOKEN, LanguageModel, Prefix
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative, choosing, lookup, stored
from speccascade_jax.core.samplers.choosing import Choosing, Tried, WithLookup
from speccascade_jax.core.samplers.lookup import Lookup, Text, match_in
from speccascade_jax.core.samplers.proposals import Matched
from speccascade_jax.core.samplers.stored import LONGEST, index_of, search
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN

EOS, STEPS = 3, 4
PROMPT = [1, 2, 0, 1]
LOGITS = table(41, 4)


def texts_of(count, vocab, seed=0, longest=12):
    """Texts that end with the last token of the vocabulary."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(0, vocab - 1, n).tolist(), vocab - 1] for n in rng.integers(1, longest, count)]


TEXTS = texts_of(6, 4)


@pytest.fixture
def roomy(monkeypatch):
    """An index in which no sequence loses its slot to another one."""
    monkeypatch.setattr(stored, "SLOTS", 2**14)


@dataclasses.dataclass(frozen=True)
class Started(TableLM):
    """A toy that reads a source and begins with token 0, as encoder-decoders do."""

    def prefill(self, params, inputs, input_length, max_length):
        first = jnp.zeros((len(inputs), 1), jnp.int32)
        return Prefix(first, jnp.ones((len(inputs),), jnp.int32)), super().prefill(
            params, first, jnp.ones((len(inputs),), jnp.int32), max_length
        )[1]


def sampler_of(method="speculative", size=3, vocab=4, start=None, **fields):
    model = TableLM(vocab) if start is None else Started(vocab)
    return Matched(Autoregressive(Lookup(vocab, start)), model, METHODS[method], size, **fields)


def decode(
    sampler, params, prompts, *, alpha=0.0, temperature=1.0, steps=STEPS, eos=EOS, limits=None, first=0
):
    """generate() of prompts of unlike lengths, which are inputs number `first` and on."""
    inputs = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        inputs[row, : len(prompt)] = prompt
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), first + jnp.arange(len(prompts)))
    return generate(
        sampler,
        params,
        keys,
        inputs,
        np.array([len(prompt) for prompt in prompts], np.int32),
        SamplingOptions(temperature),
        jnp.full(sampler.level, alpha),
        max_new_tokens=steps,
        eos_id=eos,
        limits=limits,
    )


def written(result):
    return [row[:size].tolist() for row, size in zip(np.asarray(result.tokens), result.length, strict=True)]


@pytest.mark.parametrize("width", [0, 9])
def test_the_search_is_the_references(width):
    """Of texts of three letters, where matches of all lengths are common; past the ends lies more text."""
    rng = np.random.default_rng(width)
    source, tokens = (rng.integers(0, 3, (600, n)).astype(np.int32) for n in (width, 14))
    sizes, lengths = rng.integers(0, width + 1, 600), rng.integers(1, 14, 600)
    matches = jax.jit(match_in, static_argnums=1)(Text(source, sizes, tokens, lengths), 5)
    seen = set()
    for row in range(600):
        expected, match = followed(
            source[row, : sizes[row]].tolist(), tokens[row, : lengths[row]].tolist(), LONGEST
        )
        size = int(matches.size[row])
        assert matches.tokens[row, :size].tolist() == expected[:5] and matches.match[row] == match
        seen.add(match)
    assert seen == {0, 1, 2, 3}


def last_tokens(vocab):
    """All sequences of the last tokens of a text, and the arguments of a search."""
    texts = [text for n in range(LONGEST) for text in itertools.product(range(vocab), repeat=n + 1)]
    last = [[*reversed(text), *[NO_TOKEN] * (LONGEST - len(text))] for text in texts]
    return texts, jnp.array(last)


@pytest.mark.parametrize("count,longest", [(1, 6), (8, 30), (300, 12)])
def test_a_search_in_stored_texts_finds_the_best_continuation(count, longest, roomy):
    texts = texts_of(count, 5, count, longest)
    asked, last = last_tokens(4)
    for size in (3, 14):
        matches = jax.jit(search, static_argnums=2)(index_of(texts), last, size)
        for row, text in enumerate(asked):
            expected, match = continued(texts, text)
            assert matches.match[row] == match and matches.size[row] == len(expected[:size])
            assert matches.tokens[row, : matches.size[row]].tolist() == expected[:size]


def test_rare_sequences_lose_their_slots_to_frequent_ones(monkeypatch):
    """What is found instead is a shorter match: never something that the texts do not contain."""
    monkeypatch.setattr(stored, "SLOTS", 1)
    texts = texts_of(40, 12, longest=20)
    asked, last = last_tokens(11)
    matches, known, kept = search(index_of(texts), last, 5), [], []
    text = " ".join(map(str, itertools.chain(*texts)))
    for row, sequence in enumerate(asked):
        match, size = int(matches.match[row]), int(matches.size[row])
        if match:
            seen = [*sequence[len(sequence) - match :], *matches.tokens[row, :size].tolist()]
            assert f" {' '.join(map(str, seen))} " in f" {text} "
        if continued(texts, sequence)[1] == len(sequence):
            known.append(
                sum(list(sequence) == s[n : n + len(sequence)] for s in texts for n in range(len(s)))
            )
            kept.append(match == len(sequence))
    assert 0.5 < np.mean(kept) < 0.95
    assert np.average(kept, weights=known) > np.mean(kept) + 0.02


@pytest.mark.parametrize("texts", [(), TEXTS], ids=["", "stored"])
@pytest.mark.parametrize("start", [None, 0])
def test_the_cache_holds_the_laws_of_a_language_model(start, texts, roomy):
    """append, chunk, rollback and rows; a certain token is the one that followed."""
    params = index_of(texts) if texts else ()
    model, rng = Lookup(5, start), np.random.default_rng(0)
    assert isinstance(model, LanguageModel)
    inputs, lengths = rng.integers(0, 5, (6, 7)).astype(np.int32), rng.integers(1, 8, 6).astype(np.int32)
    tokens = rng.integers(0, 5, (6, 12)).astype(np.int32)
    prefix, begun = model.prefill(params, inputs, lengths, 24)
    tokens[:, 0] = np.asarray(prefix.tokens)[np.arange(6), np.asarray(prefix.length) - 1]
    extend = jax.jit(model.extend)
    whole, cache = extend(params, tokens, begun)
    first, middle = extend(params, tokens[:, :5], begun)
    second, _ = extend(params, tokens[:, 5:], middle)
    np.testing.assert_array_equal(np.concatenate([first, second], axis=1), whole)
    assert (cache.length == begun.length + 12).all()
    again, _ = extend(params, tokens[:, 5:], model.roll_back(cache, begun.length + 5))
    np.testing.assert_array_equal(again, second)
    _, alone = model.prefill(params, inputs[:1, : lengths[0]], lengths[:1], 24)
    np.testing.assert_array_equal(extend(params, tokens[:1], alone)[0][0], whole[0])
    laws = np.asarray(jax.nn.softmax(whole))
    for row in range(6):
        prompt = inputs[row, : lengths[row]].tolist()
        for at in range(12):
            text = tokens[row, : at + 1].tolist()
            after, match = followed(
                *((prompt, text) if start is not None else ([], prompt[:-1] + text)), texts=texts
            )
            law = np.eye(5)[after[0]] if match else np.full(5, 0.2)
            np.testing.assert_allclose(laws[row, at], law, atol=1e-6)


@pytest.mark.parametrize(
    "method,alpha,way,start,texts",
    [
        pytest.param("speculative", 0.0, TOKEN, None, (), marks=pytest.mark.full),
        ("speculative", 0.0, BLOCK, 0, ()),
        ("token_v3", 0.5, TOKEN, None, ()),
        pytest.param("token_v3", 0.5, BLOCK, 0, (), marks=pytest.mark.full),
        ("speculative", 0.0, TOKEN, 0, TEXTS),
        pytest.param("token_v3", 0.5, TOKEN, None, TEXTS, marks=pytest.mark.full),
    ],
)
def test_what_is_written_follows_the_law(method, alpha, way, start, texts, rows, roomy):
    """Lossless: the verifier's law. token_v3: that of the rule on these drafts, enumerated over the prefix
    and the place where the round began."""
    sampler = sampler_of(method, start=start, verification=way)
    params = (index_of(texts) if texts else ()), LOGITS
    result = decode(sampler, params, [PROMPT] * rows, alpha=alpha)
    source, prompt = ([], PROMPT) if start is None else (PROMPT, [0])
    lossless = sequence_law([LOGITS], [], [], tuple(prompt), steps=STEPS, eos=EOS)
    if method == "token_v3":
        assert chi_square(np.asarray(result.tokens), lossless) < 1e-6
    law = lossless if method == "speculative" else rule_law(source, prompt, alpha, texts)
    assert chi_square(np.asarray(result.tokens), law) > 1e-4
    assert np.asarray(result.counts[1].accepted).sum() > 0.2 * rows


def rule_law(source, prompt, alpha, texts, size=3):
    def p(context):
        return table_law(LOGITS, *([0, *context][-2:]))

    return token_v3_law(p, source, prompt, size, alpha, STEPS, EOS, texts)


def prompts_of(count, vocab, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab - 1, rng.integers(1, 24)).tolist() for _ in range(count)]


@pytest.mark.full(quick=["None-5", "0-5-stored"])
@pytest.mark.parametrize(
    "start,size,texts",
    [(None, 5, ()), (0, 2, ()), (0, 5, texts_of(60, 9)), (None, 3, texts_of(60, 9, 1))],
    ids=["None-5", "0-2", "0-5-stored", "None-3-stored"],
)
def test_greedy_rounds_are_the_references(start, size, texts, roomy):
    """Of 1,000 texts: what the verifier writes alone, in exactly the rounds that the reference counts."""
    check_rounds(start, size, texts)


def check_rounds(start, size, texts=(), count=1000, steps=24):
    vocab = 9
    logits, prompts = table(7, vocab, 3.0), prompts_of(count, vocab)
    sampler = sampler_of(size=size, vocab=vocab, start=start)
    options = {"temperature": 0.0, "steps": steps, "eos": vocab - 1}
    limits = np.random.default_rng(1).integers(1, steps + 1, count)
    params = (index_of(texts) if texts else ()), logits
    result = decode(sampler, params, prompts, **options, limits=limits)
    alone = written(decode(Autoregressive(sampler.verifier), logits, prompts, **options, limits=limits))
    assert written(result) == alone
    counts = result.counts[1]
    for row, (prompt, text) in enumerate(zip(prompts, alone, strict=True)):
        source, begun = ([], prompt) if start is None else (prompt, [0])
        expected = greedy_rounds(source, begun, text, size, vocab - 1, texts)
        assert (counts.rounds[row], counts.drafted[row], counts.accepted[row]) == expected
    assert np.sum(counts.accepted) > 0.1 * np.sum(result.length)
    assert (np.asarray(result.counts[0]) == 0).all()


def test_a_row_depends_on_nothing_but_itself():
    prompts = prompts_of(6, 4, seed=3)
    sampler = sampler_of(size=4)
    together = decode(sampler, ((), LOGITS), prompts, steps=12)
    wider = decode(sampler, ((), LOGITS), [*prompts, [1] * 40], steps=12)
    for row in range(6):
        assert written(wider)[row] == written(together)[row]
        for counts in (wider.counts[1], together.counts[1]):
            assert counts.rounds[row] == together.counts[1].rounds[row]


@pytest.mark.full
@pytest.mark.parametrize("hand_over", ["need", pytest.param("truncate", marks=pytest.mark.full)])
def test_a_hierarchy_on_top_of_it_follows_its_law(hand_over, rows):
    """lookup, a small and a large model: the large one's rule reads the small one's law."""
    tables = table(40, 4), LOGITS
    inner = sampler_of(size=2)
    sampler = Speculative(inner, TableLM(4), METHODS["opt"], 3, hand_over)
    params = ((), tables[0]), tables[1]
    result = decode(sampler, params, [PROMPT] * rows, alpha=0.3)
    law = sequence_law(tables, ["opt"], [0.3], tuple(PROMPT), steps=STEPS, eos=EOS)
    assert chi_square(np.asarray(result.tokens), law) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("method", [pytest.param("speculative", marks=pytest.mark.full), "opt"])
def test_greedy_texts_of_a_hierarchy_are_those_without_lookup(method):
    """Over caches that lag behind: a spared bonus pass above a draft of no tokens."""
    vocab, prompts = 9, prompts_of(64, 9)
    small, large = TableLM(9), TableLM(9)
    params = table(8, vocab, 3.0), table(7, vocab, 3.0)
    options = {"temperature": 0.0, "steps": 24, "eos": vocab - 1, "alpha": 0.2}
    inner = sampler_of(size=3, vocab=vocab)
    with_lookup = Speculative(inner, large, METHODS[method], 4)
    without = Speculative(Autoregressive(small), large, METHODS[method], 4)
    result = decode(with_lookup, (((), params[0]), params[1]), prompts, **options)
    assert written(result) == written(decode(without, params, prompts, **options))


# Lookup beside a drafter


@pytest.fixture
def often(monkeypatch):
    """A lookup that is chosen in short texts, too."""
    monkeypatch.setattr(choosing, "LOOKED_UP", LOOKED_UP)
    jax.clear_caches()
    yield
    jax.clear_caches()


def chooser_of(method="speculative", size=3, vocab=4, start=None, **fields):
    model = TableLM(vocab) if start is None else Started(vocab)
    beside = WithLookup(Autoregressive(copy.copy(model)), Lookup(vocab, start))
    return Choosing(beside, model, METHODS[method], size, **fields)


@pytest.mark.parametrize(
    "method,alpha,way,start",
    [
        pytest.param("speculative", 0.0, TOKEN, 0, marks=pytest.mark.full),
        pytest.param("speculative", 0.0, BLOCK, None, marks=pytest.mark.full),
        ("token_v3", 0.5, TOKEN, None),
    ],
)
def test_the_law_beside_a_drafter(method, alpha, way, start, rows, often):
    """token_v3: enumerated over the prefix and all that the choice knows."""
    tables = table(40, 4), LOGITS
    sampler = chooser_of(method, start=start, verification=way)
    result = decode(sampler, (((), tables[0]), tables[1]), [PROMPT] * rows, alpha=alpha)
    source, prompt = ([], PROMPT) if start is None else (PROMPT, [0])
    law = sequence_law(tables[1:], [], [], tuple(prompt), steps=STEPS, eos=EOS)
    if method != "speculative":
        q, p = (lambda text, logits=logits: table_law(logits, *[0, *text][-2:]) for logits in tables)

        def rule(q, p):
            return target(method, q, p, q, p, alpha, False)

        assert chi_square(np.asarray(result.tokens), law) < 1e-6
        law = choice_law(q, p, rule, source, prompt, 3, STEPS, EOS)
    assert chi_square(np.asarray(result.tokens), law) > 1e-4
    looked_up, rounds = np.sum(Tried.of(result.counts[0]).looked_up), np.sum(result.counts[1].rounds)
    assert 0.02 * rounds < looked_up < 0.9 * rounds


@pytest.mark.full
@pytest.mark.parametrize("texts", [(), texts_of(60, 9)], ids=["", "stored"])
@pytest.mark.parametrize("start", [None, pytest.param(0, marks=pytest.mark.full)])
def test_greedy_choices_are_the_references(start, texts, often, roomy):
    check_choices(start, texts)


def check_choices(start, texts=(), count=400, steps=24, size=4, vocab=9):
    """The verifier's texts, in the rounds that the reference counts, whether all rows of a round are looked
    up, some or none; and so in a batch of a few and alone."""
    tables, prompts = (table(7, vocab, 3.0) + table(8, vocab), table(7, vocab, 3.0)), prompts_of(count, vocab)
    sampler = chooser_of(size=size, vocab=vocab, start=start)
    params = ((index_of(texts) if texts else ()), tables[0]), tables[1]
    options = {"temperature": 0.0, "steps": steps, "eos": vocab - 1}
    result = decode(sampler, params, prompts, **options)
    alone = written(decode(Autoregressive(sampler.verifier), tables[1], prompts, **options))
    assert written(result) == alone

    def likeliest(text):
        return int(tables[0][tuple([0, *text][-2:])].argmax())

    tried, counts = Tried.of(result.counts[0]), result.counts[1]
    for row, (prompt, text) in enumerate(zip(prompts, alone, strict=True)):
        source, begun = ([], prompt) if start is None else (prompt, [0])
        expected = greedy_choices(source, begun, text, size, vocab - 1, likeliest, texts)
        row_counts = counts.rounds[row], counts.drafted[row], counts.accepted[row], tried.looked_up[row]
        assert tuple(map(int, row_counts)) == expected
    rounds = np.sum(counts.rounds)
    assert 0.1 * rounds < np.sum(tried.looked_up) < 0.9 * rounds
    for rows in (1, 3):
        few = decode(sampler, params, prompts[:rows], **options)
        for some, every in zip(jax.tree.leaves(few.counts), jax.tree.leaves(result.counts), strict=True):
            np.testing.assert_array_equal(some, every[:rows])


@pytest.mark.parametrize("method,alpha", [("chow", 0.4), ("token_v3", 0.5)])
def test_what_a_row_looks_up_alone_is_what_it_looks_up_in_a_batch(method, alpha, often):
    """Alone, its drafter stops after one token where it looks up its draft; beside others, it may go on."""
    tables, sampler = (table(40, 4), LOGITS), chooser_of(method)
    params = ((), tables[0]), tables[1]
    prompts = np.random.default_rng(5).integers(0, EOS, (60, 6)).tolist()
    options = {"alpha": alpha, "steps": 12, "eos": -1}
    together = decode(sampler, params, prompts, **options)
    looked_up = np.sum(Tried.of(together.counts[0]).looked_up)
    assert 0.05 < looked_up / np.sum(together.counts[1].rounds) < 0.9
    for row, prompt in enumerate(prompts):
        alone = decode(sampler, params, [prompt], first=row, **options)
        assert written(alone) == written(together)[row : row + 1]
        assert (alone.origin == together.origin[row]).all()


# Planted bugs


def past_the_committed_text(monkeypatch):
    """The search sees what lies past the committed text: drafts that were rejected."""
    right = lookup.matches

    def further(tokens, before, followed, last):
        return right(tokens, before, followed | jnp.roll(followed, 2, axis=1), last)

    monkeypatch.setattr(lookup, "matches", further)


def one_position_late(monkeypatch):
    """Drafted tokens are kept a position late."""
    right = lookup.placed

    def late(old, new, start):
        return right(old, new, start + (new.shape[1] > 2))

    monkeypatch.setattr(lookup, "placed", late)


@pytest.mark.full(quick=["one_position_late"])
@pytest.mark.parametrize("plant", [past_the_committed_text, one_position_late])
def test_a_planted_bug_shows_in_the_rounds(plant, monkeypatch):
    plant(monkeypatch)
    jax.clear_caches()
    try:
        with pytest.raises(AssertionError):
            check_rounds(None, 5, count=100)
    finally:
        jax.clear_caches()


@pytest.mark.full
@pytest.mark.parametrize("plant", [past_the_committed_text, one_position_late])
def test_a_planted_bug_shows_in_a_rules_law(plant, rows, monkeypatch):
    plant(monkeypatch)
    jax.clear_caches()
    try:
        test_what_is_written_follows_the_law("token_v3", 0.5, TOKEN, None, (), rows, None)
    except AssertionError:
        return
    finally:
        jax.clear_caches()
    pytest.fail("the law does not show the bug")
