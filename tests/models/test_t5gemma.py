"""T5Gemma against transformers: logits, and the folders of both."""

import dataclasses

import jax
import numpy as np
import pytest
from shapes import LENGTH, SOURCE, TARGET, TINY_T5GEMMA
from tiny_models import greedy, in_blocks, prefilled, randomized, their_seq2seq_logits, their_texts

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.checkpoints.t5gemma import describe, read_config

FED = np.concatenate([np.full((3, 1), 2), TARGET[:, :-1]], axis=1)  # behind the decoder's first token
CONFIGS = {
    "tied": TINY_T5GEMMA,
    "untied": dataclasses.replace(
        TINY_T5GEMMA, decoder=dataclasses.replace(TINY_T5GEMMA.decoder, tied_embeddings=False)
    ),
}


def hugging_face(config):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    described = {name: value for name, value in describe(config).items() if name != "architectures"}
    model = transformers.T5GemmaForConditionalGeneration(
        transformers.T5GemmaConfig(**described, attn_implementation="eager")
    )
    return randomized(model)


@pytest.mark.full
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_agree_with_transformers(config, tmp_path):
    """Sources of 20, 13 and 1 tokens around windows of 5, outputs of 30 by one and in blocks around one of
    7."""
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = huggingface.load(tmp_path / "theirs", Placement())
    assert model.config == config
    expected = their_seq2seq_logits(theirs, SOURCE, FED)
    assert np.ptp(expected) > 3
    for sizes in ([1] * 30, [13, 4, 13]):
        logits, _ = in_blocks(model, params, FED, sizes, prefilled(model, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        jax.jit(model.forced)(params, SOURCE, LENGTH, TARGET), expected, rtol=0, atol=1e-4
    )
    huggingface.save(tmp_path / "ours", model, params, np.float32)
    returned = type(theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    for name, array in theirs.state_dict().items():
        np.testing.assert_array_equal(returned.state_dict()[name], array)
    np.testing.assert_allclose(their_seq2seq_logits(returned, SOURCE, FED), expected, atol=1e-4)


@pytest.mark.full
def test_greedy_texts_are_those_of_transformers(tmp_path):
    """Of a hundred sources, all in one batch here and by their lengths there."""
    theirs = hugging_face(CONFIGS["untied"])
    theirs.save_pretrained(tmp_path)
    model, params = huggingface.load(tmp_path, Placement())
    texts = greedy(model, params)
    np.testing.assert_array_equal(texts, their_texts(theirs))
    assert len(np.unique(texts)) > 30


@pytest.mark.parametrize(
    "change,words",
    [
        ({"encoder": None}, "encoder is None"),
        ({"encoder": {}}, "encoder: hidden_size is missing"),
        (
            {"decoder": {**describe(TINY_T5GEMMA)["decoder"], "cross_attention_hidden_size": 7}},
            "cross_attention",
        ),
        ({"decoder": {**describe(TINY_T5GEMMA)["decoder"], "vocab_size": 98}}, "97 tokens, the decoder 98"),
    ],
)
def test_what_cannot_be_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        read_config("it", describe(TINY_T5GEMMA) | change)
