"""Tokenizers: two files of one vocabulary, sources that begin with bos, and where a text stops."""

import json

import pytest
from corpora import PROMPTS, TURN, shuffled

from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer, up_to_stop


def gemma_json(gemma_vocabulary, path):
    """The vocabulary as Gemma's tokenizer.json has it."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Json

    processor = Tokenizer(gemma_vocabulary).processor
    scores = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(processor.get_piece_size())]
    tokenizer = Json(models.Unigram(scores, unk_id=3, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(name, normalized=False, special=True)
            for name in ("<pad>", "<eos>", "<bos>", "<unk>", *TURN)
        ]
    )
    tokenizer.save(str(path))


def test_tokenizer_json_is_the_vocabulary_of_tokenizer_model(gemma_vocabulary, tmp_path):
    pytest.importorskip("tokenizers")
    gemma_json(gemma_vocabulary, tmp_path / "tokenizer.json")
    ours, theirs = Tokenizer(gemma_vocabulary), Tokenizer(tmp_path / "tokenizer.json")
    assert ours.pieces() == theirs.pieces()
    assert [(t.pad_id, t.eos_id, t.bos_id) for t in (ours, theirs)] == [(0, 1, 2)] * 2
    assert [ours.id_of(piece) for piece in (*TURN, "no such piece")] == [4, 5, None]
    assert [theirs.id_of(piece) for piece in (*TURN, "no such piece")] == [4, 5, None]
    texts = [*PROMPTS, "<start_of_turn>user\nwhy not<end_of_turn>\n", "Grüße: 5 €", " the cat"]
    assert ours.encode_batch(texts) == theirs.encode_batch(texts)
    for row, text in zip(ours.encode_batch(texts), texts, strict=True):
        assert ours.decode([2, *row, 1]) == text
        assert theirs.decode([2, *row, 1]) == text.replace(TURN[0], "").replace(TURN[1], "")


def test_a_text_has_the_same_tokens_each_time(tmp_path):
    """BPE's dropout, which training may leave in the file, is not read."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "</s>": 1, "a": 2, "aa": 3}
    merged = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("a", "a")], dropout=0.9, unk_token="<unk>"))
    merged.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode_batch(["a" * 40] * 5) == [[3] * 20] * 5


def test_the_librarys_errors_are_shortened(tmp_path):
    """Its errors may cite the whole file."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": "x" * 100_000}))
    with pytest.raises(ValueError) as error:
        Tokenizer(tmp_path / "tokenizer.json")
    assert len(str(error.value)) < 800


def test_a_vocabulary_with_bos_begins_sources_with_it(gemma_vocabulary, tmp_path):
    tokenizer = Tokenizer(gemma_vocabulary)
    assert tokenizer.framed([7, 8, 9]) == [2, 7, 8, 9]
    assert tokenizer.framed([7, 8, 9], 3) == [2, 8, 9]  # the question is at the end of a prompt
    assert tokenizer.framed([7, 8, 9], 4) == [2, 7, 8, 9]
    for bos, expected in ((True, [2, 7, 8]), (False, [7, 8, 1])):
        train_tokenizer(shuffled(PROMPTS), tmp_path / "trained.model", 320, bos=bos)
        assert Tokenizer(tmp_path / "trained.model").framed([7, 8]) == expected


@pytest.mark.parametrize("bos", [False, True])
def test_a_vocabulary_of_words(tmp_path, bos):
    """Common words and numbers are one piece each; all else is characters or bytes."""
    texts = ["There are 12 pears.", "There are 3 more nuts than pears."] * 3 + ["zinc"]
    everything = ["There", "are", "12", "pears.", "3", "more", "nuts", "than"]
    path = tmp_path / "words.model"
    train_tokenizer(texts, path, 320, bos=bos, pieces="word")
    tokenizer = Tokenizer(path)
    for word in everything:
        assert len(tokenizer.encode_batch([word])[0]) == 1 + word.endswith("."), word
    for text in (*texts, "12 zincs and 3 pearls?", "Ö"):
        assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
    size = 256 + 3 + bos + len([" There", " are", " pears", ".", " "])
    train_tokenizer(texts, path, size, bos=bos, pieces="word")
    tokenizer = Tokenizer(path)
    assert tokenizer.size == size
    assert [len(tokenizer.encode_batch([word])[0]) for word in ("There", "pears", "zinc")] == [1, 1, 5]
    train_tokenizer(["no sign anywhere"], path, 320, bos=bos, pieces="word")
    assert len(Tokenizer(path).encode_batch(["sign anywhere"])[0]) == 2


def test_up_to_stop(gemma_vocabulary):
    tokenizer = Tokenizer(gemma_vocabulary)
    tokens = tokenizer.encode_batch(["the cat sat<end_of_turn> on the mat"])[0]
    end = tokens.index(5)
    assert up_to_stop(tokenizer, tokens, ("<end_of_turn>",)) == (tokens[: end + 1], "the cat sat")
    assert up_to_stop(tokenizer, tokens, ("mat", "<end_of_turn>")) == (tokens[: end + 1], "the cat sat")
    kept, text = up_to_stop(tokenizer, tokens, ("<end_of_turn>", " sa"))
    assert text == "the cat" and " sa" in tokenizer.decode(kept) and " sa" not in tokenizer.decode(kept[:-1])
    assert up_to_stop(tokenizer, tokens, ("dog", "<start_of_turn>")) is None
    assert up_to_stop(tokenizer, tokens, ()) is None
