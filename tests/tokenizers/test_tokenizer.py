"""Decoder-only pairs from checkpoint folder to text: prompts, templates, stop sequences."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import PROMPTS, TURN, shuffled

from speccascade_jax import checkpoints
from speccascade_jax.inference.text import Cascade
from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer, up_to_stop


def load(gemma_pair, **fields):
    return Cascade.load(gemma_pair / "drafter", gemma_pair / "verifier", max_source_length=32,
                        max_new_tokens=24, **fields)


def gemma_json(gemma_vocabulary, path):
    """The vocabulary as Gemma's tokenizer.json has it."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Json

    processor = Tokenizer(gemma_vocabulary).processor
    scores = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(processor.get_piece_size())]
    tokenizer = Json(models.Unigram(scores, unk_id=3, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)
                                  for name in ("<pad>", "<eos>", "<bos>", "<unk>", *TURN)])
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


def test_a_vocabulary_with_bos_begins_sources_with_it(gemma_vocabulary, tmp_path):
    tokenizer = Tokenizer(gemma_vocabulary)
    assert tokenizer.framed([7, 8, 9]) == [2, 7, 8, 9]
    assert tokenizer.framed([7, 8, 9], 3) == [2, 8, 9]  # the question is at the end of a prompt
    assert tokenizer.framed([7, 8, 9], 4) == [2, 7, 8, 9]
    for bos, expected in ((True, [2, 7, 8]), (False, [7, 8, 1])):
        train_tokenizer(shuffled(PROMPTS), tmp_path / "trained.model", 320, bos=bos)
        assert Tokenizer(tmp_path / "trained.model").framed([7, 8]) == expected


@pytest.mark.parametrize("to", ["native", "huggingface"])
def test_every_format_brings_it_back(to, gemma_pair, tmp_path):
    original = checkpoints.load(gemma_pair / "verifier")
    checkpoints.save(tmp_path / "out", original, to)
    again = checkpoints.load(tmp_path / "out", config=original.model.config)
    jax.tree.map(np.testing.assert_array_equal, original.params, again.params)
    assert again.tokenizer.name == "tokenizer.model"
    with pytest.raises(ValueError, match=r"window is 7, not 9"):
        checkpoints.load(tmp_path / "out", config=dataclasses.replace(original.model.config, window=9))
    with pytest.raises(ValueError, match="t5x holds no gemma2 models"):
        checkpoints.save(tmp_path / "t5x", original, "t5x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change,words", [
    ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
    ({"layer_types": ["full"] * 3}, "layer_types is"),
    ({"hidden_activation": "relu"}, "relu"), ({"model_type": "gemma3"}, "only t5, .* nearest is gemma3_text"),
    ({"num_hidden_layers": 2, "layer_types": None}, "model.layers.2.* has no place"),
    ({"sliding_window": None}, "sliding_window is None, but")])
def test_another_config_is_refused(change, words, gemma_pair, tmp_path):
    import json
    import shutil

    shutil.copytree(gemma_pair / "drafter", tmp_path / "changed")
    described = json.loads((gemma_pair / "drafter" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps({**described, **change}))
    with pytest.raises(ValueError, match=words):
        checkpoints.load(tmp_path / "changed")


@pytest.mark.full
def test_speculative_is_the_verifier_whatever_the_batch(gemma_pair):
    cascade = load(gemma_pair)
    outputs = {(method, size): [o.tokens for o in cascade.generate(PROMPTS, method=method, batch_size=size)]
               for method, size in itertools.product(("speculative", "verifier"), (1, 4))}
    assert len({str(tokens) for tokens in outputs.values()}) == 1
    tokens = outputs["verifier", 1]
    assert tokens[2] == [] and all(len(row) == 24 for n, row in enumerate(tokens) if n != 2)
    sampled = [[o.tokens for o in cascade.generate(PROMPTS, method="token_v3", alpha=0.3, temperature=1.0,
                                                   batch_size=size)] for size in (1, 4)]
    assert sampled[0] == sampled[1] != tokens


def test_suffix_and_prefix_are_the_template(gemma_pair):
    template = {"prefix": "<start_of_turn>user\n", "suffix": "<end_of_turn>\n<start_of_turn>model\n"}
    rows, _ = load(gemma_pair, **template).encode(["why not"])
    assert rows[0][:2] == [2, 4] and rows[0].count(5) == 1 and rows[0].count(4) == 2
    whole = load(gemma_pair).encode(["<start_of_turn>user\nwhy not<end_of_turn>\n<start_of_turn>model\n"])[0]
    assert rows == whole


def test_up_to_stop(gemma_vocabulary):
    tokenizer = Tokenizer(gemma_vocabulary)
    tokens = tokenizer.encode_batch(["the cat sat<end_of_turn> on the mat"])[0]
    end = tokens.index(5)
    assert up_to_stop(tokenizer, tokens, ("<end_of_turn>",)) == (tokens[:end + 1], "the cat sat")
    assert up_to_stop(tokenizer, tokens, ("mat", "<end_of_turn>")) == (tokens[:end + 1], "the cat sat")
    kept, text = up_to_stop(tokenizer, tokens, ("<end_of_turn>", " sa"))
    assert text == "the cat" and " sa" in tokenizer.decode(kept) and " sa" not in tokenizer.decode(kept[:-1])
    assert up_to_stop(tokenizer, tokens, ("dog", "<start_of_turn>")) is None
    assert up_to_stop(tokenizer, tokens, ()) is None


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_sequences_end_outputs_early(temperature, gemma_pair):
    """The same tokens as without, cut; rows that stopped are not decoded on."""
    free = load(gemma_pair)
    options = {"method": "opt", "alpha": 0.2, "temperature": temperature, "block_size": 3}
    whole = list(free.generate(PROMPTS, **options))
    stop = tuple({o.text[n:n + 2] for o, n in zip(whole, (8, 12, 0, 10, 14), strict=True)} - {""})
    held = load(gemma_pair, stop=stop)
    for size in (1, 4):
        for output, full in zip(held.generate(PROMPTS, **options, batch_size=size), whole, strict=True):
            kept, text = up_to_stop(free.tokenizer, full.tokens, stop) or (full.tokens, full.text)
            assert (output.tokens, output.text) == (kept, text)
            assert output.origin == full.origin[:len(kept)]
            if kept:
                assert len(kept) <= output.counts["emitted"] < len(kept) + 4
    longest = max(whole, key=lambda output: len(output.text))
    text = next(o.text for o in held.generate([longest.source], **options, first_index=longest.index))
    assert list(held.stream(longest.source, **options, index=longest.index))[-1] == text
    assert text == longest.text[:len(text)] and len(text) < len(longest.text)


@pytest.mark.full
def test_logits_of_training_are_those_of_decoding(gemma_pair):
    loaded = checkpoints.load(gemma_pair / "verifier")
    model, params = loaded.model, loaded.params
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, 300, (3, 11)), rng.integers(4, 300, (3, 9))
    length = jnp.array([11, 4, 1])
    forced = model.forced(params, source, length, jnp.asarray(target))
    for row in range(3):
        _, cache = model.prefill(params, source[row:row + 1], length[row:row + 1], 32)
        fed = np.concatenate([source[row, length[row] - 1][None], target[row, :-1]])
        logits, _ = model.extend(params, fed[None], cache)
        np.testing.assert_allclose(forced[row], logits[0], atol=1e-5)
