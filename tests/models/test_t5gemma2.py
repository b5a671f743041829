"""T5Gemma 2's text model against transformers': logits, the folders of both, and greedy texts."""

import dataclasses

import jax
import numpy as np
import pytest
from shapes import LENGTH, SOURCE, TARGET, TINY_T5GEMMA2
from tiny_models import greedy, in_blocks, their_texts

from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.checkpoints.t5gemma2 import describe

END = TINY_T5GEMMA2.end_of_image
FED = np.concatenate([np.full((3, 1), 2), TARGET[:, :-1]], axis=1)  # behind the decoder's first token
FED[:, 4] = SEEN = END  # the embedding that this token has of its own is read on both sides
READ = np.where(np.arange(20) == 7, SEEN, SOURCE)
CONFIGS = {
    "windows": TINY_T5GEMMA2,
    "other way round": dataclasses.replace(
        TINY_T5GEMMA2, encoder=TINY_T5GEMMA2.decoder, decoder=TINY_T5GEMMA2.encoder
    ),
}
SIGHT = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


def hugging_face(config):
    """transformers' model of that shape with random weights, which also sees, as all published ones do."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    described = describe(config)
    del described["architectures"]
    described["encoder"] |= {"vision_config": {"model_type": "siglip_vision_model"} | SIGHT}
    described["encoder"]["mm_tokens_per_image"] = 4
    model = transformers.T5Gemma2ForConditionalGeneration(
        transformers.T5Gemma2Config(**described, attn_implementation="eager")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model.eval()


def their_logits(theirs):
    """[3, 30, V] after each of FED, a row at a time."""
    torch, rows = pytest.importorskip("torch"), []
    for source, length, fed in zip(READ, LENGTH, FED, strict=True):
        with torch.no_grad():
            rows.append(
                theirs(
                    input_ids=torch.tensor(source[None, :length].astype(np.int64)),
                    attention_mask=torch.ones((1, int(length)), dtype=torch.long),
                    decoder_input_ids=torch.tensor(fed[None].astype(np.int64)),
                    decoder_attention_mask=torch.ones((1, len(fed)), dtype=torch.long),
                )
                .logits[0]
                .numpy()
            )
    return np.stack(rows)


def begun(model, params, max_length=64):
    """The cache after READ."""
    return jax.jit(model.prefill, static_argnums=3)(params, READ, LENGTH, max_length)[1]


@pytest.mark.full(quick=["windows"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_agree_with_transformers(config, tmp_path):
    """Their folder here, ours there: sources of 20, 13 and 1 tokens around windows of 6 or 7, outputs of 30
    by one, in blocks, and 13 after a roll back."""
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = huggingface.load(tmp_path / "theirs", Placement())
    assert model.config == config
    expected = their_logits(theirs.double())  # in float32 it is the less exact of the two
    assert np.ptp(expected) > 3
    for sizes in ([1] * 30, [13, 4, 13]):
        logits, cache = in_blocks(model, params, FED, sizes, begun(model, params))
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    kept = np.array([3, 17, 0])
    again = FED[np.arange(3)[:, None], kept[:, None] + np.arange(13)]
    logits, _ = in_blocks(model, params, again, [13], model.roll_back(cache, kept))
    for row, begin in enumerate(kept):
        np.testing.assert_allclose(logits[row], expected[row, begin : begin + 13], rtol=0, atol=1e-4)
    taught = np.concatenate([FED[:, 1:], TARGET[:, -1:]], axis=1)
    np.testing.assert_allclose(model.forced(params, READ, LENGTH, taught), expected, rtol=0, atol=1e-4)
    returned = written_by_us(model, params, theirs, tmp_path / "ours")
    np.testing.assert_allclose(their_logits(returned.double()), expected, rtol=0, atol=1e-9)


def written_by_us(model, params, theirs, folder):
    """Our folder as transformers loads it; its text model is theirs."""
    transformers = pytest.importorskip("transformers")
    huggingface.save(folder, model, params, np.float32)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.encoder.vision_config = theirs.config.encoder.vision_config
    config.encoder.mm_tokens_per_image = 4
    returned = type(theirs).from_pretrained(folder, config=config, attn_implementation="eager").eval()
    found, text = returned.state_dict(), dict(theirs.float().state_dict())
    for name, array in text.items():
        if "vision_tower" not in name and "multi_modal" not in name:
            np.testing.assert_array_equal(found[name], array)
    return returned


@pytest.mark.full
def test_greedy_texts_are_those_of_transformers(tmp_path):
    """Of a hundred sources, all in one batch here and by their lengths there."""
    theirs = hugging_face(TINY_T5GEMMA2)
    theirs.save_pretrained(tmp_path)
    model, params = huggingface.load(tmp_path, Placement())
    texts = greedy(model, params)
    np.testing.assert_array_equal(texts, their_texts(theirs))
    assert len(np.unique(texts)) > 30
