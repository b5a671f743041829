"""A drafter that reads its verifier's encoder: two decoders, one encoder."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from member_laws import check_interleaved, check_members, check_rows, products, reference, text_of
from shapes import LENGTH, SOURCE, TARGET, TINY_T5
from tiny_models import in_blocks, prefilled, random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.models import SharedEncoderConfig, model_of
from speccascade_jax.models.quantization import PackedKernel

DRAFTER = dataclasses.replace(TINY_T5, d_model=32, d_ff=40, num_heads=3, num_encoder_layers=0,
                              num_decoder_layers=1, relative_buckets=6, tied_embeddings=True, gated=False)
CONFIG = SharedEncoderConfig(TINY_T5, DRAFTER)


@pytest.fixture(scope="module")
def network():
    model = model_of(CONFIG)
    flat = dict(nnx.to_flat_state(model.init(0)))
    for path, value in flat.items():
        if path[-1].endswith("_bias"):
            flat[path] = value.replace(10 * value[...])
    return model, nnx.from_flat_state(flat)


def own(number):
    return [number]


def test_both_members_obey_the_laws(network):
    check_members(*network, own)


@pytest.mark.full
def test_members_may_read_in_any_order(network):
    check_interleaved(*network, own)


@pytest.mark.full
def test_rows_are_independent_and_can_be_replaced(network):
    check_rows(*network)


def test_the_verifier_is_the_plain_model_bit_for_bit(network):
    model, params = network
    plain, part = model.full, params["verifier"]
    expected, _ = in_blocks(plain, part, TARGET, [3, 1, 26], prefilled(plain, part))
    for full in (model, model.members[1]):
        found, _ = in_blocks(full, params, TARGET, [3, 1, 26], prefilled(full, params))
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.jit(model.forced)(params, SOURCE, LENGTH, TARGET),
                                  jax.jit(plain.forced)(part, SOURCE, LENGTH, TARGET))


def test_the_drafter_reads_the_source_through_the_verifiers_encoder(network):
    """Another source, another encoder or no projection: other drafts."""
    model, params = network
    text = text_of(model, 0)
    usual = reference(model, params, text)[0]
    for part in (("verifier", "encoder_norm", "scale"), ("projection", "kernel")):
        flat = dict(nnx.to_flat_state(params))
        flat[part] = flat[part].replace(0 * flat[part][...])
        assert np.abs(reference(model, nnx.from_flat_state(flat), text)[0] - usual).max() > 0.1
    flat = dict(nnx.to_flat_state(params))
    flat["verifier", "decoder_norm", "scale"] = flat["verifier", "decoder_norm", "scale"].replace(
        0 * flat["verifier", "decoder_norm", "scale"][...])
    np.testing.assert_array_equal(reference(model, nnx.from_flat_state(flat), text)[0], usual)


def test_a_source_is_encoded_once(network):
    """Besides the verifier's own prefill: the projection, and the drafter's keys and values."""
    model, params = network
    verifier = products(model.full.prefill, params["verifier"], SOURCE, LENGTH)
    extra = 1 + 2 * CONFIG.drafter.num_decoder_layers
    for member in (model, *model.members):
        assert products(member.prefill, params, SOURCE, LENGTH) == verifier + extra


def test_nothing_is_copied():
    model = model_of(CONFIG)
    full = model.full.init(0)
    params = model.around(full, 0)
    assert jax.tree.structure(params) == jax.tree.structure(model.abstract_params())
    mine = dict(nnx.to_flat_state(params))
    for path, value in nnx.to_flat_state(full):
        assert mine["verifier", *path].get_value() is value.get_value()
    assert not [path for path in mine if path[0] == "drafter" and "encoder" in path[1]]


# Checkpoints

def test_members_are_loaded_by_name(tmp_path):
    original = random_checkpoint(CONFIG)
    checkpoints.save(tmp_path / "run", original, "native")
    for name, number in (("", 1), ("@verifier", 1), ("@drafter", 0)):
        found = checkpoints.load(f"{tmp_path}/run{name}", config=CONFIG)
        assert found.model == original.model.members[number]
        jax.tree.map(np.testing.assert_array_equal, original.params, found.params)
    with pytest.raises(ValueError, match=r"run holds a drafter and a verifier, no '4': write @drafter or"):
        checkpoints.load(f"{tmp_path}/run@4")
    drafter, verifier = checkpoints.load_all([f"{tmp_path}/run@drafter", f"{tmp_path}/run"])
    assert drafter.params is verifier.params


@pytest.mark.parametrize("change,said", [
    ({"drafter": {"num_encoder_layers": 3}}, "num_encoder_layers is 3, not 0"),
    ({"drafter": {"vocab_size": 98}}, "vocab_size is 98, the verifier's is 97"),
    ({"drafter": {"eos_id": 2}}, "eos_id is 2, the verifier's is 1"),
    ({"drafter": {"num_heads": 0}}, "drafter: num_heads is 0"),
    ({"drafter": {"family": "gemma2"}}, "drafter is damaged: gemma2 has no field"),
    ({"verifier": {"num_encoder_layers": 0}}, "num_encoder_layers is 0"),
    ({"verifier": {"family": "exits"}}, "exits has no field")])
def test_damaged_shapes_are_named(change, said, tmp_path):
    shape = checkpoints.native.shape_of(CONFIG)
    for part, fields in change.items():
        shape[part] |= fields
    (tmp_path / "model.json").write_text(json.dumps(shape))
    with pytest.raises(ValueError, match=said):
        checkpoints.config_of(str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("dtype,within", [("bfloat16", 0.2), ("int8", 0.5)])
def test_both_decode_in_fewer_bits(dtype, within, tmp_path):
    model = model_of(CONFIG)
    original = Checkpoint(model, model.init(0), None, "memory")
    checkpoints.save(tmp_path / "run", original, "native")
    text = text_of(model, 0)
    expected = reference(model, original.params, text)
    loaded = checkpoints.load(tmp_path / "run", jnp.dtype(dtype), packed=True)
    flat = {path: x.get_value() for path, x in nnx.to_flat_state(loaded.params)}
    packed = {path for path, x in flat.items() if isinstance(x, PackedKernel)}
    assert packed == {path for path in flat if path[-1] == "kernel"
                      or (dtype == "int8" and path == ("drafter", "embedding"))}  # the drafter's is tied
    for number, member in enumerate(loaded.model.member_of.members):
        logits, _ = in_blocks(member, loaded.params, text, [1, 23], prefilled(member, loaded.params))
        np.testing.assert_allclose(logits, expected[number], atol=within * np.abs(expected[number]).max())
        assert np.corrcoef(logits.ravel(), expected[number].ravel())[0, 1] > 0.99
