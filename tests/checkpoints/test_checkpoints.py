"""Every checkpoint format round-trips bit for bit, and a pair decodes the same from each."""

import dataclasses
import http.server
import os
import re
import threading
import urllib.parse
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore
from corpora import SENTENCES
from flax import serialization, traverse_util
from processes import REPOSITORY, devices, run
from safetensors.numpy import load_file, save_file
from shapes import TINY_T5, TINY_T5_1_0
from tiny_models import prefill, random_checkpoint, transformers_t5

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import huggingface
from speccascade_jax.commands.convert import main as convert
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.t5 import PRESETS
from speccascade_jax.tokenizers.tokenizer import Tokenizer

FIXTURES = Path(os.environ.get("SPECCASCADE_FIXTURES", REPOSITORY.parent / "shared" / "fixtures")) / "t5x"
CONFIGS = {
    "t5_1_1": TINY_T5,
    "t5_1_0": TINY_T5_1_0,
    "table_a_layer": dataclasses.replace(TINY_T5, shared_position_bias=False),
}


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


def read_t5x(folder):
    """Name -> array of a T5X directory written here, by msgpack and TensorStore only."""
    contents = msgpack.unpackb((folder / "checkpoint").read_bytes())
    arrays = {}

    def walk(tree, name):
        if "driver" not in tree:
            for key, value in tree.items():
                walk(value, f"{name}/{key}" if name else key)
            return
        spec = {**tree, "kvstore": {**tree["kvstore"], "path": f"{folder}/{tree['kvstore']['path']}"}}
        arrays[name] = tensorstore.open(spec, open=True).result().read().result()

    walk(contents["optimizer"]["target"], "")
    return arrays


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("to", checkpoints.FORMATS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_round_trip(kind, to, dtype, tmp_path):
    original = random_checkpoint(CONFIGS[kind])
    if (kind, to) == ("table_a_layer", "huggingface"):
        with pytest.raises(ValueError, match="relative-position table of its own"):
            checkpoints.save(tmp_path / "out", original, to)
        assert not list(tmp_path.iterdir())
        return
    checkpoints.save(tmp_path / "out", original, to, dtype)
    again = checkpoints.load(tmp_path / "out", dtype)
    assert again.model.config == CONFIGS[kind]
    assert_equal(jax.tree.map(lambda x: x.astype(dtype), original.params), again.params)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert len({p.stat().st_mode for p in (tmp_path / "out").iterdir() if p.is_file()}) <= 1, "unlike modes"


@pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no fixtures at {FIXTURES}")
@pytest.mark.parametrize(
    "folder,reference", [("checkpoint_0", "reference.npz"), ("scanned_checkpoint_0", "scanned_reference.npz")]
)
def test_t5x_checkpoints_reproduce_t5x_logits(folder, reference, tmp_path):
    expected = dict(np.load(FIXTURES / reference))
    source, target, logits = (expected.pop(name) for name in ("enc", "dec", "logits"))
    loaded = checkpoints.load(FIXTURES / folder)
    model, params = loaded.model, loaded.params
    values = [
        np.sort(np.concatenate([np.ravel(x) for x in arrays]))
        for arrays in (jax.tree.leaves(params), expected.values())
    ]
    np.testing.assert_array_equal(*values)  # all values; the logits show that each is in its place

    source, target = jnp.asarray(source), jnp.asarray(target)
    length = jnp.array([source.shape[1]], jnp.int32)
    forced = model.head_logits(params, model.merged(params)(source, length, target))
    np.testing.assert_allclose(forced, logits, rtol=0, atol=1e-5)
    _, cache = prefill(model, params, source, length, target.shape[1])
    for begin, end in ((0, 3), (3, 4), (4, 8)):
        part, cache = jax.jit(model.extend)(params, target[:, begin:end], cache)
        np.testing.assert_allclose(part, logits[:, begin:end], rtol=0, atol=1e-5)

    checkpoints.save(tmp_path / "again", loaded, "t5x")
    again = read_t5x(tmp_path / "again")
    assert again.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(again[name], array)
    # What T5X restores for inference, its InferenceState: written as T5X itself writes it.
    theirs, ours = (
        serialization.msgpack_restore((place / "checkpoint").read_bytes())
        for place in (FIXTURES / folder, tmp_path / "again")
    )
    assert ours["version"] == theirs["version"]
    assert ours["optimizer"]["target"] == theirs["optimizer"]["target"]
    assert ours["optimizer"]["state"]["step"] == theirs["optimizer"]["state"]["step"]


def renamed(name):
    """transformers' name of an array of T5X's, by rules: a second account of both name tables."""
    if name == "token_embedder/embedding":
        return "shared.weight"
    if name == "decoder/logits_dense/kernel":
        return "lm_head.weight"
    mlp = "layer.2" if name.startswith("decoder") else "layer.1"
    for pattern, replacement in (
        (r"^(\w+)/\1_norm/scale", r"\1.final_layer_norm"),
        (r"/relpos_bias/rel_embedding", ".block.0.layer.0.SelfAttention.relative_attention_bias"),
        (r"/layers_(\d+)/", r".block.\1."),
        (r"pre_cross_attention_layer_norm/scale", "layer.1.layer_norm"),
        (r"pre_(self_)?attention_layer_norm/scale", "layer.0.layer_norm"),
        (r"pre_mlp_layer_norm/scale", f"{mlp}.layer_norm"),
        (r"mlp/(\w+)/kernel", rf"{mlp}.DenseReluDense.\1"),
        (r"encoder_decoder_attention/(\w)\w+/kernel", r"layer.1.EncDecAttention.\1"),
        (r"(self_)?attention/(\w)\w+/kernel", r"layer.0.SelfAttention.\2"),
    ):
        name = re.sub(pattern, replacement, name)
    return f"{name}.weight"


@pytest.mark.full
def test_a_t5_small_of_transformers_through_every_format(tmp_path):
    """transformers -> ours -> T5X -> ours -> transformers: the same bits and the same logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers_t5(PRESETS["t5_1_1_small"])
    theirs.save_pretrained(tmp_path / "theirs", safe_serialization=True, max_shard_size="60MB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 3
    first = checkpoints.load(tmp_path / "theirs", config=PRESETS["t5_1_1_small"])
    checkpoints.save(tmp_path / "t5x", first, "t5x")
    second = checkpoints.load(tmp_path / "t5x", config=PRESETS["t5_1_1_small"])
    assert_equal(first.params, second.params)
    exported = read_t5x(tmp_path / "t5x")
    state = theirs.state_dict()
    for name, array in exported.items():
        theirs_name = renamed(name)
        value = state[theirs_name].numpy()
        assert np.array_equal(array, value if theirs_name == "shared.weight" else value.T), name
    checkpoints.save(tmp_path / "ours", second, "huggingface")
    ours = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    for name, array in ours.state_dict().items():
        assert torch.equal(array, state[name]), name
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert torch.equal(*(m(input_ids=tokens, decoder_input_ids=tokens).logits for m in (theirs, ours)))


def old_t5x(folder, change):
    """Rewrites the file `checkpoint` of an export: change(name, spec) gives each array's new entry."""
    contents = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    target = traverse_util.flatten_dict(
        contents["optimizer"]["target"], sep="/", is_leaf=lambda _, x: "driver" in x
    )
    target = {name: change(name, spec) for name, spec in target.items()}
    contents["optimizer"]["target"] = traverse_util.unflatten_dict(target, sep="/")
    contents["version"] = 2
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(contents))


def test_t5x_files_of_older_versions(tmp_path):
    """Paths from another machine, the path outside `kvstore`, bfloat16 as uint16, inline arrays."""
    original = random_checkpoint(TINY_T5)
    checkpoints.save(tmp_path / "out", original, "t5x", jnp.bfloat16)
    expected = checkpoints.load(tmp_path / "out", jnp.bfloat16).params
    arrays = read_t5x(tmp_path / "out")

    def change(name, spec):
        bits, path = arrays[name].view(np.uint16), spec["kvstore"]["path"]
        if name.endswith("norm/scale"):
            return bits
        folder = tmp_path / "out" / path
        tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}},
            dtype=tensorstore.uint16,
            shape=bits.shape,
            create=True,
            delete_existing=True,
        ).result().write(bits).result()
        if name.startswith("encoder"):
            return {
                "driver": "zarr",
                "dtype": "uint16",
                "metadata": spec["metadata"],
                "kvstore": {"driver": "gfile", "path": f"/elsewhere/checkpoint_1/{path}"},
            }
        return {
            "driver": "zarr",
            "dtype": "uint16",
            "metadata": spec["metadata"],
            "path": path,
            "kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket"},
        }

    old_t5x(tmp_path / "out", change)
    assert_equal(checkpoints.load(tmp_path / "out", jnp.bfloat16).params, expected)


class Bucket(http.server.BaseHTTPRequestHandler):
    """The one request of Google Cloud Storage's that reading makes: an object, or its absence."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = urllib.parse.unquote(urllib.parse.urlparse(self.path).path.split("/o/")[-1])
        path = self.server.folder / name
        body = path.read_bytes() if path.is_file() else b""
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.full
def test_gs_is_read_in_place(tmp_path):
    original = random_checkpoint(CONFIGS["table_a_layer"])
    checkpoints.save(tmp_path / "checkpoint_1", original, "t5x")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        server.folder = tmp_path
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {
            "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.server_port}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        }
        run(
            "from speccascade_jax import checkpoints\n"
            "found = checkpoints.load('gs://some-bucket/checkpoint_1')\n"
            f"checkpoints.save({str(tmp_path / 'copy')!r}, found, 'native')\nprint()",
            **where,
        )
        said = run(
            "from speccascade_jax import checkpoints\n"
            "try: checkpoints.load('gs://some-bucket/checkpoint_2')\n"
            "except ValueError as error: print(error)",
            **where,
        )
        server.shutdown()
    assert_equal(checkpoints.load(tmp_path / "copy").params, jax.tree.map(jnp.asarray, original.params))
    assert "checkpoint_2 is not a T5X checkpoint" in said or "neither" in said


MEASURE = """
import sys, jax, jax.numpy as jnp
from speccascade_jax import checkpoints

def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

checkpoints.load({tiny!r})  # the libraries' own memory is not the checkpoint's
before = memory("VmRSS")
params = jax.block_until_ready(checkpoints.load({large!r}).params)
print((memory("VmHWM") - before) / sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_loading_takes_little_more_memory_than_the_parameters(to, tmp_path):
    large = dataclasses.replace(
        TINY_T5, d_model=512, d_kv=64, num_heads=8, d_ff=2048, num_encoder_layers=6, num_decoder_layers=6
    )
    for name, config in (("tiny", TINY_T5), ("large", large)):
        checkpoints.save(tmp_path / name, random_checkpoint(config), to)
    measured = MEASURE.format(tiny=str(tmp_path / "tiny"), large=str(tmp_path / "large"))
    # Less than a half: nothing was measured. Twice: on a busy machine more may be on its way from the disk.
    assert any(0.5 < float(run(measured)) < 1.3 for _ in range(2))


@pytest.mark.full
def test_each_device_gets_its_part(tmp_path):
    for to in checkpoints.FORMATS:
        checkpoints.save(tmp_path / to, random_checkpoint(TINY_T5), to)
    script = f"""
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from speccascade_jax import checkpoints
mesh = jax.make_mesh((4,), ("data",))
sharding = lambda path, shape: NamedSharding(mesh, P("data") if shape[0] % 4 == 0 else P())
for to in checkpoints.FORMATS:
    split, whole = (checkpoints.load(f"{tmp_path}/{{to}}", "bfloat16", s).params for s in (sharding, None))
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        assert a.sharding == sharding((), a.shape) and a.dtype == "bfloat16"
        np.testing.assert_array_equal(a, b)
print("split", jax.tree.leaves(split)[0].addressable_shards[0].data.shape)"""
    assert run(script, XLA_FLAGS=devices(4)) == "split (12, 64)"


def test_importing_the_package_imports_no_checkpoint_library():
    heavy = ["orbax.checkpoint", "tensorstore", "torch", "transformers", "tokenizers", "huggingface_hub"]
    assert run(f"import sys, speccascade_jax; print([m for m in {heavy} if m in sys.modules])") == "[]"


def write_tokenizer_json(spiece, path):
    """The vocabulary of a SentencePiece file as T5's tokenizer.json has it: sentinels last, </s> added."""
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Json

    processor = Tokenizer(spiece).processor
    scores = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(processor.get_piece_size())]
    sentinels = [f"<extra_id_{n}>" for n in reversed(range(100))]
    tokenizer = Json(
        models.Unigram([*scores, *((name, 0.0) for name in sentinels)], unk_id=2, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<pad>", "</s>", "<unk>", *sentinels)]
    )
    tokenizer.enable_truncation(3)  # as published files may have it
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))


def test_tokenizer_json_is_the_vocabulary_of_spiece_model(spiece, tmp_path):
    pytest.importorskip("tokenizers")
    write_tokenizer_json(spiece, tmp_path / "tokenizer.json")
    ours, theirs = Tokenizer(spiece), Tokenizer(tmp_path / "tokenizer.json")
    assert ours.pieces() == theirs.pieces()
    assert (ours.size, ours.pad_id, ours.eos_id) == (theirs.size, theirs.pad_id, theirs.eos_id)
    assert ours.surfaces() == theirs.surfaces()
    texts = [*SENTENCES, "Grüße: 5 €", "cats"]
    rows = ours.encode_batch(texts)
    assert rows == theirs.encode_batch(texts) and max(map(len, rows)) > 3
    for row in rows:
        assert ours.decode([*row, 1, 0, 0, 400]) == theirs.decode([*row, 1, 0, 0, 400])


@pytest.mark.full
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_a_pair_decodes_alike_in_every_format(name, spiece, tmp_path):
    """Converted by convert.py with its tokenizer; without one, --tokenizer is needed."""
    pytest.importorskip("tokenizers")
    config = dataclasses.replace(TINY_T5, vocab_size=448, relative_max_distance=128)
    checkpoints.save(tmp_path / "from", random_checkpoint(config), "huggingface")
    options = {"max_source_length": 32, "max_new_tokens": 12}
    with pytest.raises(ValueError, match=r"no tokenizer.*--tokenizer"):
        Cascade.load(tmp_path / "from", tmp_path / "from", **options)
    cascades = [Cascade.load(tmp_path / "from", tmp_path / "from", tokenizer=spiece, **options)]
    if name == "spiece.model":
        (tmp_path / "from" / name).write_bytes(spiece.read_bytes())
    else:
        write_tokenizer_json(spiece, tmp_path / "from" / name)
    folder = tmp_path / "from"
    for to in ("t5x", "native", "huggingface"):
        assert convert([str(folder), str(tmp_path / to), f"--to={to}"]) == 0
        folder = tmp_path / to
        assert checkpoints.load(folder, config=config).tokenizer == folder / name
        cascades.append(Cascade.load(folder, folder, **options))
    outputs = [[o.tokens for o in cascade.generate(SENTENCES)] for cascade in cascades]
    for rows in outputs[1:]:
        assert rows == outputs[0]
    assert outputs[0][0] != outputs[0][1]


def test_an_untied_head_missing_from_the_file_is_the_embedding(tmp_path):
    """transformers omits lm_head if it equals the embedding, even if config.json says untied."""
    checkpoints.save(tmp_path / "tied", random_checkpoint(TINY_T5), "huggingface")
    arrays = load_file(tmp_path / "tied" / "model.safetensors")
    del arrays["lm_head.weight"]
    save_file(arrays, tmp_path / "tied" / "model.safetensors")
    params = checkpoints.load(tmp_path / "tied").params
    np.testing.assert_array_equal(params["head"]["kernel"][...], params["embedding"][...].T)


def test_half_precision_files_are_read(tmp_path):
    original = random_checkpoint(TINY_T5)
    huggingface.save(tmp_path, original.model, original.params, np.float16)
    expected = jax.tree.map(lambda x: x.astype(np.float16).astype(ml_dtypes.bfloat16), original.params)
    assert_equal(checkpoints.load(tmp_path, jnp.bfloat16).params, expected)
