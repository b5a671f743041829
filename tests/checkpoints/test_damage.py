"""A checkpoint that is damaged or cannot be written is refused in a sentence, and no partial files remain."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorstore
from flax import serialization, traverse_util
from processes import REPOSITORY, run
from safetensors.numpy import load_file, save_file
from shapes import TINY_T5
from tiny_models import random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.commands.convert import main as convert
from speccascade_jax.models.t5 import PRESETS

EMBEDDING = "target.token_embedder.embedding"


def truncate(name, keep=0.6):
    def damage(folder):
        for path in folder.glob(name):
            os.truncate(path, int(path.stat().st_size * keep))

    return damage


def rewrite(change):
    """Damage to model.safetensors: change() its dictionary of arrays."""

    def damage(folder):
        arrays = load_file(folder / "model.safetensors")
        change(arrays)
        save_file(arrays, folder / "model.safetensors")

    return damage


def describe(file="config.json", **values):
    """Damage to what describes the model's shape."""

    def damage(folder):
        description = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**description, **values}))

    return damage


def without(name):
    """Damage to T5X's msgpack: one array is not named any more."""

    def damage(folder):
        contents = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
        target = traverse_util.flatten_dict(
            contents["optimizer"]["target"], sep="/", is_leaf=lambda _, x: "driver" in x
        )
        del target[name]
        contents["optimizer"]["target"] = traverse_util.unflatten_dict(target, sep="/")
        (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(contents))

    return damage


def reshape(name, shape):
    """Damage to T5X's arrays: one has another shape."""

    def damage(folder):
        path = folder / f"target.{name.replace('/', '.')}"
        tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}},
            dtype=tensorstore.float32,
            shape=shape,
            create=True,
            delete_existing=True,
        ).result().write(np.ones(shape, np.float32)).result()

    return damage


def flip(name):
    """One bit changed in the middle of the largest file: a finite number becomes another."""

    def damage(folder):
        path = max(folder.glob(name), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return damage


DAMAGE = {
    "safetensors truncated": ("huggingface", truncate("model.safetensors"), "truncated.*fetch it again"),
    "safetensors header": (
        "huggingface",
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 99),
        "not a safetensors",
    ),
    "safetensors gone": ("huggingface", lambda f: (f / "model.safetensors").unlink(), "is missing"),
    "safetensors values": (
        "huggingface",
        rewrite(lambda a: a["shared.weight"].fill(np.nan)),
        "shared.weight.*not finite",
    ),
    "safetensors integers": (
        "huggingface",
        rewrite(lambda a: a.update({"shared.weight": a["shared.weight"].astype(np.int8)})),
        "int8 values",
    ),
    "array gone": (
        "huggingface",
        rewrite(lambda a: a.pop("encoder.block.1.layer.0.layer_norm.weight")),
        r"encoder\.block\.1.*missing",
    ),
    "index": (
        "huggingface",
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        "index.json is damaged",
    ),
    "width": ("huggingface", describe(d_model=32), r"\(97, 48\), config.json says \(97, 32\)"),
    "layers": ("huggingface", describe(num_layers=2), r"encoder\.block\.2.* has no place"),
    "no number": ("huggingface", describe(d_kv="many"), "d_kv is 'many', not a whole number"),
    "heads": ("huggingface", describe(num_heads=5), r"\(\d+, \d+\), config.json says \(\d+, \d+\)"),
    "another file's content": (
        "huggingface",
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "is damaged, or more than a dictionary of tensors",
    ),
    "config": ("huggingface", lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "other model": ("huggingface", describe(model_type="bart"), "only t5"),
    "config gone": ("huggingface", lambda f: (f / "config.json").unlink(), "is not a checkpoint"),
    "msgpack truncated": ("t5x", truncate("checkpoint"), "checkpoint is truncated.*fetch it again"),
    "msgpack empty": ("t5x", truncate("checkpoint", 0), "checkpoint is truncated"),
    "other msgpack": ("t5x", lambda f: (f / "checkpoint").write_bytes(b"\x93\x01\x02\x03"), "not T5X's"),
    "chunk truncated": ("t5x", truncate(f"{EMBEDDING}/0.0"), "token_embedder/embedding is damaged"),
    "chunk changed": ("t5x", flip(f"{EMBEDDING}/0.0"), "token_embedder/embedding is damaged"),
    "chunk gone": ("t5x", lambda f: (f / EMBEDDING / "0.0").unlink(), "embedding is damaged"),
    "zarr header gone": ("t5x", lambda f: (f / EMBEDDING / ".zarray").unlink(), "embedding is missing"),
    "zarr header": ("t5x", truncate(f"{EMBEDDING}/.zarray"), "token_embedder/embedding is missing"),
    "unnamed array": (
        "t5x",
        without("decoder/layers_1/mlp/wi_1/kernel"),
        "layers_1/mlp/wi_1/kernel is missing",
    ),
    "unnamed embedding": ("t5x", without("token_embedder/embedding"), "token_embedder/embedding is missing"),
    "another shape": (
        "t5x",
        reshape("decoder/layers_1/mlp/wo/kernel", (81, 48)),
        r"\(81, 48\), but the other arrays imply \(80, 48\)",
    ),
    "another rank": ("t5x", reshape("token_embedder/embedding", (97,)), "of another rank"),
    "model.json": ("native", lambda f: (f / "model.json").write_text("{}x"), "damaged"),
    "native width": ("native", describe("model.json", d_model=64), r"\(64, \d+\).*\(48, \d+\)"),
    "orbax gone": ("native", lambda f: (f / "latest" / "0").rename(f / "aside"), "no finished checkpoint"),
    "orbax truncated": ("native", truncate("latest/0/params/d/*"), "is missing or damaged"),
    "orbax data truncated": ("native", truncate("latest/0/params/ocdbt.process_0/d/*"), "is damaged"),
    "orbax metadata": ("native", truncate("latest/0/_CHECKPOINT_METADATA"), "METADATA is damaged"),
    "orbax data changed": ("native", flip("latest/0/params/ocdbt.process_0/d/*"), "is damaged"),
    "safetensors data changed": ("huggingface", flip("model.safetensors"), "its checksum differs"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    for to in checkpoints.FORMATS:
        checkpoints.save(folder / to, random_checkpoint(TINY_T5), to)
    return folder


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_when_loading(case, intact, tmp_path, capsys):
    kind, damage, words = DAMAGE[case]
    folder = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(intact / kind), str(folder)], check=True)
    damage(folder)
    with pytest.raises(ValueError, match=words):
        checkpoints.load(folder)
    assert convert([str(folder), str(tmp_path / "out"), "--to=t5x"]) == 2
    assert "error: " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_unexpected_shape_names_both_shapes(intact):
    with pytest.raises(ValueError, match=r"d_model is 48, not 512.*num_heads is 4, not 6"):
        checkpoints.load(intact / "huggingface", config=PRESETS["t5_1_1_small"])


def test_threads_that_are_still_writing_leave_nothing(intact, tmp_path, monkeypatch):
    """A format's library may raise while its threads are still writing."""

    def fails(folder, *rest):
        def write_on():
            for n in range(20):
                (folder / "parts").mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    (folder / "parts" / str(n)).write_text("x")
                time.sleep(0.01)

        threading.Thread(target=write_on).start()
        raise OSError("disk full")

    monkeypatch.setitem(checkpoints.FORMATS, "native", fails)
    with pytest.raises(ValueError, match="disk full"):
        checkpoints.save(tmp_path / "out", checkpoints.load(intact / "t5x"), "native")
    time.sleep(0.3)
    assert [*tmp_path.iterdir()] == []


KILLED = """
import os, signal, sys
from pathlib import Path
from speccascade_jax import checkpoints
from speccascade_jax.commands.convert import main
real = checkpoints.FORMATS["huggingface"]
def killed(folder, *rest):
    real(folder, *rest)
    os.kill(os.getpid(), signal.SIGKILL)
checkpoints.FORMATS["huggingface"] = killed
main([*sys.argv[1:], "--to=huggingface"])
"""


def test_the_next_convert_removes_what_a_killed_one_left(intact, tmp_path):
    """But not folders that another process is writing, or unrelated ones."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(intact / "t5x"), str(tmp_path / "killed")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".killed.") and (left / "model.safetensors").is_file()
    (tmp_path / ".mine").mkdir()
    (tmp_path / ".notes.unfinished").write_text("a file")
    (tmp_path / ".link.unfinished").symlink_to(".mine")
    with checkpoints.locked_folder(tmp_path / ".busy.1.unfinished"):
        assert convert([str(intact / "t5x"), str(tmp_path / "out"), "--to=native"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".busy.1.unfinished",
        ".link.unfinished",
        ".mine",
        ".notes.unfinished",
        "out",
    ]
    assert convert([str(intact / "t5x"), str(tmp_path / "more"), "--to=native"]) == 0
    assert not (tmp_path / ".busy.1.unfinished").exists()


@pytest.mark.full
def test_an_output_that_cannot_be_written_leaves_nothing(intact, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (tmp_path / "file").write_text("")
    for to in checkpoints.FORMATS:
        assert convert([str(intact / "t5x"), str(taken), f"--to={to}"]) == 2
        assert "exists already" in capsys.readouterr().err
        assert convert([str(intact / "t5x"), str(tmp_path / "file" / "out"), f"--to={to}"]) == 2
        assert "cannot write" in capsys.readouterr().err
    # A limit on the size of files fails in the middle of writing, as a full disk does.
    script = f"""
import resource
from speccascade_jax.commands.convert import main
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
source, out = {str(intact / "t5x")!r}, {str(tmp_path / "full")!r}
print(*(main([source, out, "--to=" + to]) for to in {[*checkpoints.FORMATS]}))"""
    assert run(script, JAX_ENABLE_COMPILATION_CACHE="false").split() == ["2"] * len(checkpoints.FORMATS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"] and not list(taken.iterdir())
