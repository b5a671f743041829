"""T5Gemma 2's text model against transformers': logits, the folders of both, and greedy texts."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from shapes import LENGTH, SOURCE, TARGET, TINY_T5GEMMA, TINY_T5GEMMA2
from tiny_models import (
    greedy,
    in_blocks,
    prefill,
    prefilled,
    random_checkpoint,
    randomized,
    their_seq2seq_logits,
    their_texts,
)

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface
from speccascade_jax.checkpoints.arrays import Placement
from speccascade_jax.checkpoints.t5gemma2 import describe, read_config
from speccascade_jax.models import decoder, model_of
from speccascade_jax.models.t5gemma2 import PRESETS, T5Gemma2Model

END = TINY_T5GEMMA2.end_of_image
FED = np.concatenate([np.full((3, 1), 2, np.int32), TARGET[:, :-1]], axis=1)  # from the first token on
FED[:, 4] = END  # its other embedding is read on both sides
READ = np.where(np.arange(20) == 7, np.int32(END), SOURCE)
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
    return randomized(model)


def begun(model, params, max_length=64):
    """The cache after READ."""
    return prefill(model, params, READ, LENGTH, max_length)[1]


@pytest.mark.full(quick=["windows"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_agree_with_transformers(config, tmp_path):
    """Their folder here, ours there: sources of 20, 13 and 1 tokens around windows of 6 or 7, outputs of 30
    by one, in blocks, and 13 after a roll back."""
    theirs = hugging_face(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = huggingface.load(tmp_path / "theirs", Placement())
    assert model.config == config
    expected = their_seq2seq_logits(theirs.double(), READ, FED)  # in float32 it is the less exact of the two
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
    np.testing.assert_allclose(
        jax.jit(model.forced)(params, READ, LENGTH, taught), expected, rtol=0, atol=1e-4
    )
    returned = written_by_us(model, params, theirs, tmp_path / "ours")
    np.testing.assert_allclose(
        their_seq2seq_logits(returned.double(), READ, FED), expected, rtol=0, atol=1e-9
    )


def written_by_us(model, params, theirs, folder):
    """Our folder as transformers loads it; its text model is theirs."""
    transformers = pytest.importorskip("transformers")
    huggingface.save(folder, model, params, np.float32)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.encoder.vision_config = theirs.config.encoder.vision_config
    config.encoder.mm_tokens_per_image = 4
    returned = type(theirs).from_pretrained(folder, config=config, attn_implementation="eager").eval()
    state, text = returned.state_dict(), dict(theirs.float().state_dict())
    for name, array in text.items():
        if "vision_tower" not in name and "multi_modal" not in name:
            np.testing.assert_array_equal(state[name], array)
    return returned


@pytest.mark.full
def test_greedy_texts_are_those_of_transformers(tmp_path):
    """Of a hundred sources, all in one batch here and by their lengths there."""
    theirs = hugging_face(TINY_T5GEMMA2)
    theirs.get_input_embeddings().weight.data *= 0.3  # else each token is followed by itself
    theirs.save_pretrained(tmp_path)
    model, params = huggingface.load(tmp_path, Placement())
    texts = greedy(model, params)
    np.testing.assert_array_equal(texts, their_texts(theirs))
    assert len(np.unique(texts)) > 30


@pytest.fixture(scope="module")
def tiny():
    model = model_of(TINY_T5GEMMA2)
    params = random_checkpoint(TINY_T5GEMMA2).params
    return params, in_blocks(model, params, FED, [30], begun(model, params))[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "part,change",
    [
        ("encoder", {"window": 7}),
        ("encoder", {"rope_factor": 7.0}),
        ("encoder", {"local_rope_theta": 60.0}),
        ("decoder", {"window": 6}),
        ("decoder", {"rope_theta": 500.0}),
        ("decoder", {"logit_softcap": 3.1}),
        (None, {"end_of_image": 12}),
    ],
)
def test_every_part_of_the_shape_matters(part, change, tiny):
    """Negative controls: what the comparison with transformers holds, it could have missed."""
    params, usual = tiny
    if part is not None:
        change = {part: dataclasses.replace(getattr(TINY_T5GEMMA2, part), **change)}
    other = T5Gemma2Model(dataclasses.replace(TINY_T5GEMMA2, **change))
    logits = in_blocks(other, params, FED, [30], begun(other, params))[0]
    assert np.abs(logits - usual).max() > 1e-3


@pytest.mark.full(quick=["t5gemma2"])
@pytest.mark.parametrize("config", [TINY_T5GEMMA, TINY_T5GEMMA2], ids=["t5gemma", "t5gemma2"])
def test_tokens_in_parts_attend_as_all_at_once(config, monkeypatch):
    """Also to what was encoded, whose mask is the same for all tokens."""
    model = model_of(config)
    params, logits = model.init(0), []
    cache = prefilled(model, params)
    for scores in (decoder.SCORES, 2**11):  # 3 rows, 4 heads, 84 entries: two tokens at once
        monkeypatch.setattr(decoder, "SCORES", scores)
        read = jax.jit(lambda params: model.extend(params, TARGET[:, :12], cache)[0])
        logits.append(read(params))
    np.testing.assert_allclose(*logits, atol=1e-5)


# ---- folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [True, False], ids=["as published", "with all copies"])
def test_a_folder_of_one_that_sees(published, tmp_path):
    """Under the names that Google's folders have, or transformers' own; next to arrays that are not read."""
    from safetensors.numpy import load_file, save_file

    original = random_checkpoint(TINY_T5GEMMA2)
    checkpoints.save(tmp_path / "text", original, "huggingface")
    arrays = load_file(tmp_path / "text" / "model.safetensors")
    more = [f"encoder.{name}.weight" for name in ("vision_tower.x", "multi_modal_projector.x")]
    if published:
        arrays = {name.removeprefix("model.").replace("text_model.", ""): x for name, x in arrays.items()}
    else:
        table = arrays["model.encoder.text_model.embed_tokens.weight"]
        copies = "lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"
        arrays |= {name: table.copy() for name in copies}
        more = [f"model.{name}" for name in more]
    (tmp_path / "whole").mkdir()
    save_file(
        arrays | {name: np.ones(3, np.float32) for name in more}, tmp_path / "whole" / "model.safetensors"
    )
    content = (tmp_path / "text" / "config.json").read_text()
    (tmp_path / "whole" / "config.json").write_text(content)
    loaded = checkpoints.load(tmp_path / "whole")
    assert loaded.model.config == TINY_T5GEMMA2
    jax.tree.map(np.testing.assert_array_equal, original.params, loaded.params)


def test_what_transformers_writes_of_a_config_is_read():
    """Where the ends are told on both levels and rotary positions by kinds of layers."""
    transformers = pytest.importorskip("transformers")
    for config in (TINY_T5GEMMA2, *PRESETS.values()):
        described = describe(config)
        del described["architectures"]
        written = transformers.T5Gemma2Config(**described).to_dict()
        assert "rope_parameters" in written["decoder"]
        assert read_config("it", json.loads(json.dumps(written))) == config


@pytest.mark.full(quick=["270m-368"])
@pytest.mark.parametrize("size,millions", [("270m", 368), ("1b", 1698), ("4b", 7089)])
def test_presets_have_the_published_sizes(size, millions):
    """Without the tower that sees."""
    shapes = jax.tree.leaves(T5Gemma2Model(PRESETS[f"t5gemma2_{size}_{size}"]).abstract_params())
    assert round(sum(x.size for x in shapes) / 1e6) == millions


DESCRIBED = describe(TINY_T5GEMMA2)
WRONG = [
    ({"encoder": None}, "encoder is None"),
    ({"encoder": {}}, "encoder.text_config is None"),
    ({"decoder": 3}, "decoder is 3"),
    ({"decoder": {}}, "decoder: hidden_size is missing"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ({"eoi_token_index": "x"}, "eoi_token_index is 'x'"),
    ({"decoder": DESCRIBED["decoder"] | {"vocab_size": 98}}, "vocab_size is 97 in the encoder and 98"),
    ({"decoder": DESCRIBED["decoder"] | {"hidden_size": 40}}, "hidden_size is 36 in the encoder and 40"),
    ({"decoder": DESCRIBED["decoder"] | {"attn_logit_softcapping": 2.0}}, "only None is supported"),
    ({"decoder": DESCRIBED["decoder"] | {"hidden_activation": "relu6"}}, "relu6"),
]


@pytest.mark.parametrize("change,words", WRONG, ids=lambda x: str(x)[:50])
def test_what_no_model_can_be_is_one_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        read_config("it", DESCRIBED | change)
