"""A drafter that reads its verifier's encoder: two decoders, one encoder."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from member_laws import (
    check_full,
    check_interleaved,
    check_members,
    check_rows,
    check_shared,
    products,
    reference,
    text_of,
)
from shapes import LENGTH, SOURCE, TINY_T5
from tiny_models import in_blocks, prefill, prefilled, random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.models import SharedEncoderConfig, model_of
from speccascade_jax.models.quantization import PackedKernel

DRAFTER = dataclasses.replace(
    TINY_T5,
    d_model=32,
    d_ff=40,
    num_heads=3,
    num_encoder_layers=0,
    num_decoder_layers=1,
    relative_buckets=6,
    tied_embeddings=True,
    gated=False,
)
CONFIG = SharedEncoderConfig(TINY_T5, DRAFTER)


@pytest.fixture(scope="module")
def network():
    model = model_of(CONFIG)
    flat = dict(nnx.to_flat_state(model.init(0)))
    for path, value in flat.items():
        if path[-1].endswith("_bias"):
            flat[path] = value.replace(10 * value[...])
    return model, nnx.from_flat_state(flat)


def same_member(number):
    return [number]


@pytest.mark.full
def test_both_members_obey_the_laws(network):
    check_members(*network, same_member)


@pytest.mark.full
def test_members_may_read_in_any_order(network):
    check_interleaved(*network, same_member)


@pytest.mark.full
def test_rows_are_independent_and_can_be_replaced(network):
    check_rows(*network)


@pytest.mark.full
def test_the_verifier_is_the_plain_model_bit_for_bit(network):
    model, params = network
    check_full(model, params, "verifier", model.members[1])


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
        0 * flat["verifier", "decoder_norm", "scale"][...]
    )
    np.testing.assert_array_equal(reference(model, nnx.from_flat_state(flat), text)[0], usual)


def test_a_source_is_encoded_once(network):
    """Besides the verifier's own prefill: the projection, and the drafter's keys and values."""
    model, params = network
    verifier = products(model.full.prefill, params["verifier"], SOURCE, LENGTH)
    extra = 1 + 2 * CONFIG.drafter.num_decoder_layers
    for member in (model, *model.members):
        assert products(member.prefill, params, SOURCE, LENGTH) == verifier + extra


def test_nothing_is_copied():
    mine = check_shared(model_of(CONFIG))
    assert not [path for path in mine if path[0] == "drafter" and "encoder" in path[1]]


# A drafter that reads the verifier's states, too

READS = dataclasses.replace(CONFIG, states=True)


@pytest.fixture(scope="module")
def reading():
    original = random_checkpoint(READS)
    flat = {
        path: x.replace(x[...] * 0.2) if path[-1] == "kernel" else x
        for path, x in nnx.to_flat_state(original.params)
    }
    return original.model, jax.tree.map(jnp.asarray, nnx.from_flat_state(flat))


def in_rounds(network, params, text, cache, sizes=(1, 2, 1)):
    """The drafter's logits where it reads a round of tokens, in blocks of `sizes`, and then the verifier."""
    (drafter, verifier), blocks = (map(jax.jit, (member.extend for member in network.members)), [])
    for begin in range(0, text.shape[1], sum(sizes)):
        at = begin
        for size in sizes:
            logits, cache = drafter(params, text[:, at : at + size], cache)
            blocks.append(logits)
            at += size
        expected, cache = verifier(params, text[:, begin:at], cache)
    return np.concatenate(blocks, axis=1), expected, cache


def test_a_drafter_reads_the_verifiers_last_state(reading):
    """As it was trained to, in rounds of four; in other rounds its logits differ."""
    network, params = reading
    text = text_of(network, 0)
    expected = reference(network, params, text)
    logits, last, cache = in_rounds(network, params, text, prefilled(network, params))
    scale = np.abs(expected[0]).max()
    np.testing.assert_allclose(logits, expected[0], atol=2e-5 * scale)
    np.testing.assert_allclose(last, expected[1][:, -4:], atol=2e-5 * np.abs(expected[1]).max())
    other, *_ = in_rounds(network, params, text, prefilled(network, params), (2,))
    assert np.abs(other - expected[0]).max() > 0.01 * scale
    np.testing.assert_allclose(other[:, 0], logits[:, 0], atol=2e-5 * scale)  # nothing is read yet

    # Rolled back, and with rows in each other's place: as if nothing had been written past.
    begins, order = np.array([8, 12, 4]), np.array([2, 0, 1])
    text = np.where(np.arange(24) < begins[:, None], text, text_of(network, 9))[order]
    cache = network.insert(cache, network.roll_back(cache, jnp.asarray(begins)), jnp.argsort(order), False)
    places = begins[order][:, None] + np.arange(4)
    logits, _ = jax.jit(network.members[0].extend)(params, text[np.arange(3)[:, None], places], cache)
    expected = reference(network, params, text[np.argsort(order)])[0][order]
    np.testing.assert_allclose(logits, expected[np.arange(3)[:, None], places], atol=2e-5 * scale)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 3])
def test_states_are_those_before_the_round(reading, rows):
    """The last one that the verifier has read, and not its own place's: that is what is to be drafted."""
    network, params = reading
    text = text_of(network, 0)[:rows]
    _, cache = prefill(network, params, SOURCE[:rows], LENGTH[:rows], 64)
    drafter, verifier = (partial(jax.jit(member.extend), params) for member in network.members)
    _, cache = verifier(text[:, :6], cache)  # ahead of the drafter
    at_once, _ = drafter(text[:, :6], cache)
    for n in range(6):
        logits, ahead = drafter(text[:, n : n + 1], cache)
        np.testing.assert_allclose(logits, at_once[:, n : n + 1], atol=1e-4)
        for places, matters in ((slice(n - 1, n), n > 0), (slice(n, None), False)):
            changed = cache._replace(states=cache.states.at[..., places, :].add(1.0))
            assert matters == (np.abs(drafter(text[:, n : n + 1], changed)[0] - logits).max() > 1e-3)
        cache = ahead
    states = np.asarray(cache.states).reshape(rows, 64, -1)
    assert np.abs(states[:, :6]).max(axis=-1).min() > 0 and not states[:, 6:].any()


# Checkpoints


def test_a_drafter_is_shipped_next_to_its_verifier(tmp_path):
    """Its folder has no copy of the verifier: what it lacks is read from the folder that it names."""
    original = random_checkpoint(READS)
    verifier = Checkpoint(original.model.full, original.params["verifier"], None, "memory")
    checkpoints.save(tmp_path / "verifier", verifier, "huggingface")
    checkpoints.native.export(tmp_path / "drafter", original.model, original.params, full_at="verifier")
    drafter, full = checkpoints.load_all([f"{tmp_path}/drafter@drafter", f"{tmp_path}/drafter"])
    assert drafter.model == original.model.members[0] and drafter.params is full.params
    jax.tree.map(np.testing.assert_array_equal, original.params, drafter.params)
    assert checkpoints.config_of(f"{tmp_path}/drafter") == READS

    def bytes_of(folder):
        return sum(path.stat().st_size for path in (tmp_path / folder).rglob("*") if path.is_file())

    drafter_size = sum(x.size for path, x in nnx.to_flat_state(original.params) if path[0] != "verifier")
    assert bytes_of("drafter") < 4 * drafter_size + 30_000 < bytes_of("verifier")

    described = json.loads((tmp_path / "drafter" / "model.json").read_text())
    narrow = random_checkpoint(dataclasses.replace(TINY_T5, d_ff=64))
    checkpoints.save(tmp_path / "other", narrow, "huggingface")
    for name, said in (
        ("gone", "there is no checkpoint folder"),
        ("../verifier", "not the name of a folder"),
        ("..", "not the name of a folder"),
        (3, "full_at is 3, not the name"),
        ("other", "a different shape from the requested one: d_ff is 64, not 80"),
        ("drafter", "a different shape from the requested one"),
    ):
        (tmp_path / "drafter" / "model.json").write_text(json.dumps(described | {"full_at": name}))
        with pytest.raises(ValueError, match=said):
            checkpoints.load(f"{tmp_path}/drafter")
    (tmp_path / "drafter" / "model.json").write_text(
        json.dumps(checkpoints.native.shape_of(TINY_T5) | {"full_at": "verifier"})
    )
    with pytest.raises(ValueError, match="one model has no full_at"):
        checkpoints.load(f"{tmp_path}/drafter")


def test_members_are_loaded_by_name(tmp_path):
    original = random_checkpoint(CONFIG)
    checkpoints.save(tmp_path / "run", original, "native")
    for name, number in (("", 1), ("@verifier", 1), ("@drafter", 0)):
        checkpoint = checkpoints.load(f"{tmp_path}/run{name}", config=CONFIG)
        assert checkpoint.model == original.model.members[number]
        jax.tree.map(np.testing.assert_array_equal, original.params, checkpoint.params)
    with pytest.raises(ValueError, match=r"run holds a drafter and its verifier, no '4': write @drafter or"):
        checkpoints.load(f"{tmp_path}/run@4")
    drafter, verifier = checkpoints.load_all([f"{tmp_path}/run@drafter", f"{tmp_path}/run"])
    assert drafter.params is verifier.params


@pytest.mark.parametrize(
    "change,said",
    [
        ({"drafter": {"num_encoder_layers": 3}}, "num_encoder_layers is 3, not 0"),
        ({"drafter": {"vocab_size": 98}}, "vocab_size is 98, the verifier's is 97"),
        ({"drafter": {"eos_id": 2}}, "eos_id is 2, the verifier's is 1"),
        ({"drafter": {"num_heads": 0}}, "drafter: num_heads is 0"),
        ({"drafter": {"family": "gemma2"}}, "drafter is damaged: gemma2 has no field"),
        ({"verifier": {"num_encoder_layers": 0}}, "num_encoder_layers is 0"),
        ({"verifier": {"family": "exits"}}, "exits has no field"),
    ],
)
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
    assert packed == {
        path for path in flat if path[-1] == "kernel" or path == ("drafter", "embedding")
    }  # the drafter's is tied
    for number, member in enumerate(loaded.model.member_of.members):
        logits, _ = in_blocks(member, loaded.params, text, [1, 23], prefilled(member, loaded.params))
        np.testing.assert_allclose(logits, expected[number], atol=within * np.abs(expected[number]).max())
        assert np.corrcoef(logits.ravel(), expected[number].ravel())[0, 1] > 0.99
