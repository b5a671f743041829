"""Drafters of other tokenizers through the text API."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import SENTENCES, shuffled
from tiny_models import prefill
from toy_vocabularies import Pair

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.config import DEMO, load
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Surface, Tokenizer, by_text, train_tokenizer
from speccascade_jax.vocabularies import VOCABULARIES
from speccascade_jax.vocabularies.joining import translated
from speccascade_jax.vocabularies.matching import cut_as, matched, spelled, spellings
from speccascade_jax.vocabularies.prefix_tree import strings
from speccascade_jax.vocabularies.translated import Resized, Translated

LIMITS = {"max_source_length": 32, "max_new_tokens": 24}
SHAPE = T5Config(
    vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_encoder_layers=1, num_decoder_layers=1
)


def pieces(*texts):
    return [Surface("piece", text.encode()) for text in texts]


def test_tokens_match_by_their_text_and_role():
    target = [Surface("pad", b""), Surface("eos", b""), Surface("byte", b"a"), *pieces(" a", "a", "b", "a")]
    drafter = [
        *pieces("b", "a"),
        Surface("eos", b""),
        Surface("byte", b"c"),
        *pieces(" a"),
        Surface("bos", b""),
    ]
    assert matched(target, drafter).tolist() == [[0, 5], [1, 4], [2, 1], [4, 3]]
    assert matched(target, [Surface("byte", b"a")]).tolist() == [[0, 2]]
    # A piece where the other has only the byte; each id once.
    assert matched(pieces("x", "a", "a"), [Surface("byte", b"a")]).tolist() == [[0, 1]]
    assert matched(target, target).tolist() == [[n, n] for n in range(len(target))]
    assert matched(target, pieces("z")).shape == (0, 2)


def test_texts_are_spelled_in_the_fewest_tokens():
    vocabulary = pieces("a", "ab", "b", "ba", "abb")
    assert spelled(b"abba", by_text(vocabulary)) == [1, 3]
    assert spelled(b"", by_text(vocabulary)) == [] and spelled(b"abc", by_text(vocabulary)) is None
    assert by_text([Surface("byte", b"a"), *pieces("a", "a")]) == {b"a": 1}


@pytest.fixture(scope="module")
def other_spiece(tmp_path_factory):
    """A smaller vocabulary, of other texts."""
    path = tmp_path_factory.mktemp("other") / "spiece.model"
    train_tokenizer(shuffled([text.lower() for text in SENTENCES]), path, 290)
    return path


@pytest.fixture(scope="module")
def foreign(t5_pair, other_spiece, tmp_path_factory):
    """A folder with a drafter of that vocabulary, with rows of padding."""
    folder = tmp_path_factory.mktemp("foreign")
    model = T5Model(dataclasses.replace(SHAPE, vocab_size=304))
    huggingface.save(folder, model, model.init(3), np.float32)
    (folder / "spiece.model").write_bytes(other_spiece.read_bytes())
    return folder


def test_spellings_stand_for_the_texts(spiece, other_spiece):
    target, drafter = Tokenizer(spiece), Tokenizer(other_spiece)
    theirs, ours = target.surfaces(), drafter.surfaces()
    assert {token.kind for token in theirs} == {"pad", "eos", "unknown", "byte", "piece"}
    pairs = matched(theirs, ours)
    assert len(set(pairs[:, 0])) == len(set(pairs[:, 1])) == len(pairs) and (np.diff(pairs[:, 0]) > 0).all()
    drafter_tokens = spellings(theirs, ours, drafter, pairs)
    for surface, tokens in zip(theirs, drafter_tokens, strict=True):
        assert b"".join(ours[n].text for n in tokens) == surface.text
    assert drafter_tokens[target.eos_id] == [drafter.eos_id]
    assert max(map(len, drafter_tokens)) > 1


def test_texts_are_cut_for_training_as_a_drafter_reads_them(spiece, other_spiece):
    """Token by token of the target's, as the translated model's tables spell them."""
    target, drafter, model = Tokenizer(other_spiece), Tokenizer(spiece), T5Model(SHAPE)
    _, (*_, tables, _) = translated(model, model.init(3), drafter, target, 320, 0)
    rows = cut_as(target, drafter)(SENTENCES)
    for row, tokens in zip(rows, target.encode_batch(SENTENCES), strict=True):
        assert row == [int(n) for token in tokens for n in tables.spelled[token][: tables.sizes[token]]]
    assert rows != drafter.encode_batch(SENTENCES)
    assert cut_as(target, target)(SENTENCES) == target.encode_batch(SENTENCES)


@pytest.mark.full
@pytest.mark.parametrize("vocabulary", ["auto", "union", "slrs"])
def test_greedy_texts_are_the_verifiers(foreign, t5_pair, vocabulary, full):
    cascade = Cascade.load(foreign, t5_pair / "verifier", vocabulary=vocabulary, **LIMITS)
    assert isinstance(cascade.drafter, Translated)
    alone = [output.tokens for output in cascade.generate(SENTENCES, method="verifier", batch_size=4)]
    for batch_size in (1, 4) if full else (4,):
        outputs = list(cascade.generate(SENTENCES, block_size=3, batch_size=batch_size))
        assert [output.tokens for output in outputs] == alone
    assert list(cascade.stream(SENTENCES[0], block_size=3))[-1] == outputs[0].text


@pytest.mark.full
def test_a_row_does_not_depend_on_its_batch(foreign, t5_pair):
    cascade = Cascade.load(foreign, t5_pair / "verifier", **LIMITS)
    settings = Settings(method="token_v3", alpha=0.5, temperature=1.0, block_size=3)
    together = list(cascade.generate(SENTENCES, settings, batch_size=3))
    assert any("draft" in output.origin for output in together)
    for n, text in enumerate(SENTENCES):
        [alone] = cascade.generate([text], settings, first_index=n)
        assert (together[n].tokens, together[n].counts) == (alone.tokens, alone.counts)


@pytest.mark.full
def test_a_hierarchy_with_a_foreign_drafter_and_baselines(foreign, t5_pair):
    cascade = Cascade.load(foreign, t5_pair / "middle", t5_pair / "verifier", **LIMITS)
    alone = [output.tokens for output in cascade.generate(SENTENCES, method="verifier", batch_size=4)]
    for batch_size in (1, 3):
        outputs = cascade.generate(SENTENCES, block_size=(2, 4), batch_size=batch_size)
        assert [output.tokens for output in outputs] == alone
    pair = Cascade.load(foreign, t5_pair / "verifier", **LIMITS)
    for method in ("token_cascade", "oracle", "sequence", "bild", "drafter"):
        assert all(output.tokens for output in pair.generate(SENTENCES[:3], method=method, alpha=0.5))


def test_the_drafter_reads_the_source_in_its_own_tokens(foreign, t5_pair):
    """Its law at the first position is that of the model by itself on its own tokens of the text."""
    cascade = Cascade.load(foreign, t5_pair / "verifier", **LIMITS)
    [output] = cascade.generate(SENTENCES[:1], method="drafter", max_new_tokens=1)
    tokenizer = Tokenizer(foreign / "spiece.model")
    model, params = (
        T5Model(dataclasses.replace(SHAPE, vocab_size=304)),
        T5Model(dataclasses.replace(SHAPE, vocab_size=304)).init(3),
    )
    source = np.array([tokenizer.framed(tokenizer.encode_batch(SENTENCES[:1])[0])], np.int32)
    start, cache = prefill(model, params, source, np.array([source.shape[1]]), 4)
    logits, _ = jax.jit(model.extend)(params, start.tokens, cache)
    pairs = matched(cascade.tokenizer.surfaces(), tokenizer.surfaces())
    assert output.tokens == [pairs[int(jnp.argmax(logits[0, 0, pairs[:, 0]])), 1]]


@pytest.mark.full
def test_padded_vocabularies_of_one_tokenizer_are_equal(t5_pair, spiece, tmp_path):
    """What is past the tokenizer gets no mass; the rest is as without padding."""
    plain = Cascade.load(t5_pair / "drafter", t5_pair / "verifier", **LIMITS)
    model = T5Model(dataclasses.replace(SHAPE, vocab_size=336))
    params = model.init(0)
    for path in (("embedding",), ("head", "kernel")):
        whole, small = params, plain.params[0]
        for name in path[:-1]:
            whole, small = whole[name], small[name]
        axis = 0 if path == ("embedding",) else 1
        pads = [(0, 16 if n == axis else 0) for n in range(2)]
        value = np.pad(np.asarray(small[path[-1]].get_value()), pads, constant_values=50.0)
        whole[path[-1]] = whole[path[-1]].replace(jnp.asarray(value))
    for name in ("encoder", "decoder", "encoder_norm", "decoder_norm", "encoder_bias", "decoder_bias"):
        params[name] = plain.params[0][name]
    huggingface.save(tmp_path / "drafter", model, params, np.float32)
    (tmp_path / "drafter" / "spiece.model").write_bytes(spiece.read_bytes())
    padded = Cascade.load(tmp_path / "drafter", t5_pair / "verifier", **LIMITS)
    assert isinstance(padded.drafter, Resized) and not padded.foreign
    known, tokens = padded.tokenizer.size, jnp.array([[0, 5, 7]])
    laws = []
    for cascade in (padded, plain):
        _, cache = prefill(cascade.drafter, cascade.params[0], tokens, jnp.array([3]), 8)
        laws.append(np.asarray(cascade.drafter.extend(cascade.params[0], tokens, cache)[0]))
    np.testing.assert_array_equal(laws[0][..., :known], laws[1][..., :known])
    assert known < 320 and laws[0].shape == laws[1].shape and np.isneginf(laws[0][..., known:]).all()
    texts = [[o.tokens for o in cascade.generate(SENTENCES[:2])] for cascade in (padded, plain)]
    assert texts[0] == texts[1]


def test_vocabularies_that_cannot_be_joined_are_refused(foreign, t5_pair, tmp_path):
    union = Cascade.load(foreign, t5_pair / "verifier", vocabulary="union", **LIMITS)
    for method in ("opt", "token_cascade"):
        with pytest.raises(FieldError) as refused:
            union.generate(SENTENCES, method=method, alpha=0.3)
        assert (refused.value.field, refused.value.value) == ("method", method)
    with pytest.raises(FieldError) as refused:
        Cascade.load(t5_pair / "drafter", foreign, t5_pair / "verifier", vocabulary="union", **LIMITS)


@pytest.mark.full
def test_incompatible_vocabularies_are_refused():
    with pytest.raises(ValueError, match="have no token in common: use another drafter"):
        Pair(drafter=["end", "padding", "c", "d"]).models()
    whole = Tokenizer(DEMO / "verifier" / "spiece.model").surfaces()
    with pytest.raises(FieldError) as refused:
        strings(whole, whole, 2048, 2048)
    assert (refused.value.field, refused.value.value) == ("vocabulary", "slrs")
    with pytest.raises(FieldError) as refused:
        dataclasses.replace(load("demo"), vocabulary="both").check()
    assert (refused.value.field, refused.value.value) == ("vocabulary", "both")
    assert all(name in refused.value.remedy for name in VOCABULARIES)


@pytest.mark.full
def test_bytes_are_asked_after_once_for_each_beginning_of_a_token(tmp_path):
    """The trie of the target's tokens, node by node; every node's next tokens lead to the longest match."""
    target = Tokenizer(DEMO / "verifier" / "spiece.model")
    train_tokenizer(SENTENCES * 20, tmp_path / "bytes.model", 260, pieces="char")
    drafter = Tokenizer(tmp_path / "bytes.model")
    assert drafter.size == 260 and drafter.decode(drafter.encode_batch(["heiß 🙂"])[0]) == "heiß 🙂"
    trie = strings(target.surfaces(), drafter.surfaces(), 2048, 260)
    texts = by_text(target.surfaces())
    inner = {text[:n] for text in texts for n in range(1, len(text))}
    assert len(trie.slot) == len(inner) and len(trie.parent) == len(inner) + 1
    bytes_of, seen = drafter.surfaces(), [b""]
    for parent, token in zip(trie.parent[1:], trie.token[1:], strict=True):
        seen.append(seen[parent] + bytes_of[token].text)
    assert set(seen[1:]) == inner
    node, token = seen.index(b" Ents"), drafter.id_of("<0x78>")
    longest = max((text for text in texts if b" Entsx".startswith(text)), key=len)
    assert trie.goes[node, token] == texts[longest]
    assert trie.goes[0, drafter.eos_id] == target.eos_id
