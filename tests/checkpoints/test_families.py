"""Every family round-trips through each of its formats; unsupported models are refused in advance."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import SENTENCES, shuffled
from flax import nnx
from processes import run
from shapes import (
    DECODERS,
    EAGLE_VERIFIER,
    GEMMA4S,
    TINY_ASSISTANT,
    TINY_DFLASH,
    TINY_EAGLE,
    TINY_GEMMA,
    TINY_GEMMA4,
    TINY_T5,
    TINY_T5_1_0,
    TINY_T5GEMMA,
    TINY_T5GEMMA2,
)
from tiny_models import random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.families import MODEL_FAMILIES, PRESETS
from speccascade_jax.commands.convert import main as convert
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import (
    MODELS,
    AssistedConfig,
    BlockDrafterConfig,
    DFlashPairConfig,
    EaglePairConfig,
    ExitsConfig,
    SharedEncoderConfig,
    model_of,
)
from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer

# Every field differs from its default: a field that a format forgets shows.
UNLIKE = {
    "t5": [
        dataclasses.replace(
            TINY_T5,
            relative_max_distance=50,
            dropout_rate=0.25,
            layer_norm_epsilon=1e-3,
            pad_id=3,
            eos_id=4,
            num_heads=4,
        ),
        dataclasses.replace(TINY_T5_1_0, relative_max_distance=50, layer_norm_epsilon=1e-5),
        dataclasses.replace(TINY_T5, relative_max_distance=51, dropout_rate=0.0, shared_position_bias=False),
    ],
    "gemma2": [
        dataclasses.replace(TINY_GEMMA, rope_theta=500.0, norm_epsilon=1e-3, pad_id=5, eos_id=6, bos_id=7),
        dataclasses.replace(TINY_GEMMA, attention_softcap=None, logit_softcap=None),
    ],
}
UNLIKE = {name: [config] for name, config in DECODERS.items()} | UNLIKE
UNLIKE |= {
    "gemma4_text": list(GEMMA4S.values()),
    "gemma4_assistant": [
        TINY_ASSISTANT,
        dataclasses.replace(TINY_ASSISTANT, vocab_size=96, num_centroids=24, active_centroids=5),
    ],
    "assisted": [AssistedConfig(TINY_GEMMA4, TINY_ASSISTANT)],
    "eagle3": [
        TINY_EAGLE,
        dataclasses.replace(
            TINY_EAGLE, own_embedding=True, norm_before_residual=True, head_norms=True, draft_vocab_size=97
        ),
    ],
    "eagle3_pair": [EaglePairConfig(EAGLE_VERIFIER, TINY_EAGLE)],
    "t5gemma": [
        TINY_T5GEMMA,
        dataclasses.replace(
            TINY_T5GEMMA,
            decoder=dataclasses.replace(TINY_T5GEMMA.decoder, tied_embeddings=False, more_eos=(7,)),
        ),
    ],
    "t5gemma2": [TINY_T5GEMMA2],
    "exits": [
        ExitsConfig(UNLIKE["t5"][0], (1,)),
        ExitsConfig(UNLIKE["t5"][2], (1,), "norm"),
        ExitsConfig(UNLIKE["t5"][1], (1,), "own"),
        ExitsConfig(UNLIKE["gemma2"][0], (1, 2), "adapter", 3),
    ],
    "dflash": [TINY_DFLASH, dataclasses.replace(TINY_DFLASH, query_bias=True, output_bias=True, states=(3,))],
    "dflash_pair": [DFlashPairConfig(EAGLE_VERIFIER, TINY_DFLASH)],
    "block_drafter": [
        BlockDrafterConfig(UNLIKE["t5"][0], (0, 2), 5, num_heads=3, d_kv=6, d_ff=10),
        BlockDrafterConfig(UNLIKE["t5"][1], (1,), 3, num_layers=2, num_heads=2, d_kv=8, d_ff=9),
    ],
    "shared_encoder": [
        SharedEncoderConfig(
            UNLIKE["t5"][0],
            dataclasses.replace(UNLIKE["t5"][0], d_model=24, num_encoder_layers=0, gated=False),
        )
    ],
}
CASES = [
    (config, to)
    for family in MODEL_FAMILIES
    for config in UNLIKE[family]
    for to in MODEL_FAMILIES[family].formats
]


@pytest.mark.parametrize("config,to", CASES, ids=lambda x: x if isinstance(x, str) else x.family)
def test_a_model_survives_a_round_trip(config, to, tmp_path):
    """The same config and the same bits, hence the same logits."""
    original = random_checkpoint(config)
    if to == "huggingface" and not getattr(config, "shared_position_bias", True):
        with pytest.raises(ValueError, match="relative-position table of its own"):
            checkpoints.check_savable(config, to)
        return
    checkpoints.save(tmp_path / "out", original, to)
    again = checkpoints.load(tmp_path / "out", config=config)
    assert again.model.config == config == checkpoints.config_of(str(tmp_path / "out"))
    jax.tree.map(np.testing.assert_array_equal, original.params, again.params)


def test_a_family_is_one_table_entry():
    assert MODEL_FAMILIES.keys() == UNLIKE.keys()
    assert {row.config for row in MODEL_FAMILIES.values()} == MODELS.keys()
    for name, family in MODEL_FAMILIES.items():
        assert family.usual.family == name and set(family.formats) <= set(checkpoints.FORMATS)
        for preset, config in family.presets.items():
            family.check(preset, config)  # no preset is refused
            assert PRESETS[preset] is config and model_of(config).config is config
    assert len(PRESETS) == sum(len(family.presets) for family in MODEL_FAMILIES.values())


@pytest.mark.parametrize("family", MODEL_FAMILIES)
def test_the_names_of_a_family_are_those_of_its_parameters(family):
    """Each array occurs once: a missing or repeated name would lose weights."""
    for config in UNLIKE[family]:
        params = {path for path, _ in nnx.to_flat_state(model_of(config).abstract_params())}
        names = list(MODEL_FAMILIES[family].parameter_names(config))
        assert {path for path, _, _ in names} == params and len(names) == len(params)
        assert len({name for _, name, _ in names}) == len(names)


@pytest.mark.parametrize("family", MODEL_FAMILIES)
def test_a_trained_vocabulary_has_the_special_pieces_of_its_family(family, tmp_path):
    train_tokenizer(shuffled(SENTENCES), tmp_path / "spiece.model", 320, bos=MODEL_FAMILIES[family].bos)
    tokenizer = Tokenizer(tmp_path / "spiece.model")
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (
        0,
        1,
        2 if MODEL_FAMILIES[family].bos else -1,
    )


def test_t5x_folders_without_our_file_are_t5_1_1(tmp_path):
    """Without our own file, settings that the arrays do not determine are those of T5 1.1."""
    config = UNLIKE["t5"][0]
    checkpoints.save(tmp_path / "out", random_checkpoint(config), "t5x")
    (tmp_path / "out" / checkpoints.t5x.UNTOLD_FILE).unlink()
    loaded_config = checkpoints.load(tmp_path / "out").model.config
    usual = type(config)()
    assert loaded_config == dataclasses.replace(
        config, **{name: getattr(usual, name) for name in checkpoints.t5x.UNTOLD}
    )


# ---- where and how a checkpoint is written --------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "in"
    checkpoints.save(path, random_checkpoint(TINY_T5), "huggingface")
    return path


def refused(arguments, words, capsys):
    assert convert(list(map(str, arguments))) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said


def everything(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_out_is_checked_before_in_is_read(folder, tmp_path, capsys, monkeypatch):
    """Nothing is loaded, nothing is made, nothing is overwritten."""
    monkeypatch.setattr(checkpoints, "load", None)
    before = everything(folder)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for out, words in (
        (folder, "exists already"),
        (folder / ".", "exists already"),
        (f"{folder}/../in", "exists already"),
        (tmp_path / "file", "exists already"),
        (tmp_path / "nowhere", "exists already"),
        (tmp_path / "file" / "out", "is not a folder"),
        ("\ud800", "UTF-8"),
        ("x" * 300, "too long"),
        ("/dev/null/out", "is not a folder"),
        ("", "exists already"),
    ):
        refused([folder, out, "--to=native"], words, capsys)
    assert everything(folder) == before and (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere"]


def test_an_unsupported_model_is_refused_before_it_is_read(tmp_path, capsys, monkeypatch):
    checkpoints.save(tmp_path / "gemma", random_checkpoint(TINY_GEMMA), "native")
    checkpoints.save(tmp_path / "t5", random_checkpoint(UNLIKE["t5"][2]), "t5x")
    monkeypatch.setattr(checkpoints, "load", None)
    refused([tmp_path / "gemma", tmp_path / "out", "--to=t5x"], "t5x does not support gemma2", capsys)
    refused([tmp_path / "t5", tmp_path / "out", "--to=huggingface"], "table of its own", capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user who may not write")
def test_a_read_only_folder_is_reported_before_reading(folder, tmp_path):
    code = f"""
import os
from speccascade_jax import checkpoints
os.setuid(65534)
try: checkpoints.check_absent({str(tmp_path / "out")!r})
except ValueError as error: print(error)"""
    tmp_path.chmod(0o755)
    assert "no permission to write in" in run(code)


def test_missing_parents_of_out_are_created(folder, tmp_path):
    assert convert([str(folder), str(tmp_path / "a" / "b" / "out"), "--to=t5x"]) == 0
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["out"]
    checkpoints.load(tmp_path / "a" / "b" / "out", config=TINY_T5)


@pytest.mark.parametrize("dtype", ["int8", "int32", "float64", "complex64", "float17", "", None, 3])
def test_weights_are_written_as_floats_only(dtype, folder, tmp_path):
    calls = [lambda: checkpoints.save(tmp_path / "out", random_checkpoint(TINY_T5), "native", dtype)]
    for call in calls if dtype == "int8" else [*calls, lambda: checkpoints.load(folder, dtype)]:
        with pytest.raises(FieldError) as refused:
            call()
        assert (refused.value.field, refused.value.value) == ("dtype", dtype)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype,packed", [("int8", False), ("bfloat16", True)])
def test_packed_weights_are_not_written(dtype, packed, folder, tmp_path):
    loaded = checkpoints.load(folder, dtype, packed=packed)
    for to in checkpoints.FORMATS:
        with pytest.raises(ValueError, match="load it again in float32"):
            checkpoints.save(tmp_path / "out", loaded, to)
    assert not list(tmp_path.iterdir())


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(FieldError) as refused:
        checkpoints.save(tmp_path / "out", random_checkpoint(TINY_T5), "pickle")
    assert (refused.value.field, refused.value.value) == ("to", "pickle")
    assert all(name in refused.value.remedy for name in checkpoints.FORMATS)


@pytest.mark.full
@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_a_full_disk_names_the_unwritten_file(to, folder, tmp_path):
    """A limit on file sizes makes writing fail in the middle, like a full disk."""
    code = f"""
import resource
from speccascade_jax import checkpoints
found = checkpoints.load({str(folder)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try: checkpoints.save({str(tmp_path / "out")!r}, found, {to!r})
except ValueError as error: print(ascii(str(error)))"""
    said = run(code, JAX_ENABLE_COMPILATION_CACHE="false")
    assert f"cannot write {tmp_path / 'out'}" in said and "too large" in said.lower() and len(said) < 900
    assert not list(tmp_path.iterdir())


def test_every_format_loads_as_int8(tmp_path):
    """For each dtype, the parameters for decoding are the same from every format."""
    original = random_checkpoint(TINY_T5)
    for to in checkpoints.FORMATS:
        checkpoints.save(tmp_path / to, original, to)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        first, *others = (checkpoints.load(tmp_path / to, dtype).params for to in checkpoints.FORMATS)
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, first, other)


def test_a_vocabulary_is_copied_or_refused(folder, tmp_path, capsys):
    """A pipe in place of the tokenizer neither hangs nor leaves an incomplete folder."""
    subprocess.run(["cp", "-r", str(folder), str(tmp_path / "in")], check=True)
    os.mkfifo(tmp_path / "in" / "spiece.model")
    refused([tmp_path / "in", tmp_path / "out", "--to=native"], "not a regular file", capsys)
    assert not (tmp_path / "out").exists()


def test_our_file_has_the_settings_that_t5x_lacks(tmp_path):
    checkpoints.save(tmp_path / "out", random_checkpoint(UNLIKE["t5"][0]), "t5x")
    assert json.loads((tmp_path / "out" / "t5_config.json").read_text()) == {
        "relative_max_distance": 50,
        "layer_norm_epsilon": 1e-3,
        "dropout_rate": 0.25,
        "pad_id": 3,
        "eos_id": 4,
    }
