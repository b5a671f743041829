"""Untrusted files may contain anything: each is refused in one sentence, within ten seconds and two
gigabytes. A separate process reads them, so that a hang, a crash or a full memory is a test result.
"""

import base64
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hostile import DEEP, GIGABYTES, INSTEAD, Reader, check_refused
from processes import run
from safetensors.numpy import load_file, save_file
from shapes import TINY_GEMMA, TINY_T5
from tiny_models import random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import decoder, t5


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A folder of each format of each family."""
    folder = tmp_path_factory.mktemp("intact")
    for config in (TINY_T5, TINY_GEMMA):
        for to in checkpoints.MODEL_FAMILIES[config.family].formats:
            checkpoints.save(folder / f"{config.family}-{to}", random_checkpoint(config), to)
    return folder


@pytest.fixture(scope="module")
def read(intact):
    reader = Reader(sorted(intact.iterdir()))
    yield reader
    reader.stop()


@pytest.fixture
def copy(intact, tmp_path):
    """copy(kind): a fresh copy of that folder."""

    def fresh(kind, name="damaged"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        return Path(shutil.copytree(intact / kind, tmp_path / name))

    return fresh


def describe(folder, **values):
    path = next(folder / name for name in ("model.json", "config.json") if (folder / name).exists())
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# ---- the fields of a model's shape ----------------------------------------------------------------------

WRONG = [
    "many",
    "",
    [1],
    [],
    {"a": 1},
    True,
    -1,
    -(10**9),
    10**9,
    10**30,
    float("nan"),
    float("inf"),
    1.5,
    [[[[[[[[1]]]]]]]],
    "\ud800",
]
SMALL = {
    "layer_norm_epsilon",
    "rms_norm_eps",
    "norm_epsilon",
    "rope_theta",
    "dropout_rate",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_softcap",
    "logit_softcap",
}
"""Fields that may be any positive number."""
FREE = {
    "relative_attention_max_distance",
    "relative_max_distance",
    "sliding_window",
    "window",
    "query_pre_attn_scalar",
    "query_scalar",
    "max_positions",
    "max_position_embeddings",
}
"""Fields that may be any positive whole number: no array tells them."""


def names_of(kind, folder):
    """The config's fields as the file that describes the folder spells them."""
    if kind.endswith("native"):
        return [
            name
            for name, value in json.loads((folder / "model.json").read_text()).items()
            if type(value) in (int, float) and not (name.startswith("rope_") and name != "rope_theta")
        ]
    return list((t5.CONFIG_KEYS if kind.startswith("t5") else decoder.SHARED | decoder.OF_GEMMA).values())


@pytest.mark.parametrize("kind", ["t5-huggingface", "gemma2-huggingface", "t5-native", "gemma2-native"])
def test_an_invalid_size_is_refused(kind, intact, read, copy):
    """For every field and value: refused by the field's name, or by an array with another shape."""
    names = names_of(kind, intact / kind)
    for name in names:
        folder = copy(kind)
        for value in (*WRONG, None, 0):
            optional = "softcap" in name or name in (
                "num_decoder_layers",
                "pad_token_id",
                "bos_token_id",
                "query_pre_attn_scalar",
                "query_scalar",
            )
            fits = (
                (value is None and optional)
                or (value == [1] and name == "eos_token_id")
                or (value == 0 and (name == "dropout_rate" or name.endswith("_id")))
                or (value in (1.5, 10**9) and name in SMALL - {"dropout_rate"})
                or (value == 10**9 and name in FREE)
                or (value is True and name == "tie_word_embeddings")
            )
            if fits:  # 10**9 of a free field may be refused for reasons of its own, but not this one's
                continue
            describe(folder, **{name: value})
            outcome = read(folder)
            check_refused(outcome)
            assert (
                name in outcome.said
                or "array" in outcome.said
                or "shape" in outcome.said
                or ("heads" in outcome.said or "relative" in outcome.said)
            ), (name, value, outcome)


@pytest.mark.parametrize("kind", ["t5-huggingface", "gemma2-huggingface", "t5-native", "gemma2-native"])
def test_declared_but_missing_layers_cost_nothing(kind, read, copy):
    """10**9 is refused at once; 1,000, which a model may have, after the first array that is missing."""
    folder = copy(kind)
    field = {
        "t5-huggingface": "num_layers",
        "gemma2-huggingface": "num_hidden_layers",
        "t5-native": "num_encoder_layers",
        "gemma2-native": "num_layers",
    }[kind]
    describe(folder, layer_types=None) if kind == "gemma2-huggingface" else None
    describe(folder, **{field: 10**9})
    check_refused(read(folder), field)
    check_refused(read(folder, "config_of"), field)
    describe(folder, **{field: 1000})
    check_refused(read(folder), "missing")


@pytest.mark.parametrize(
    "change,words",
    [
        ({"feed_forward_proj": ["relu"]}, "feed_forward_proj"),
        ({"model_type": None}, "only t5"),
        ({"model_type": ["t5"]}, "only t5"),
        ({"model_type": {"t5": 1}}, "only t5"),
        ({"scale_decoder_outputs": "yes"}, "tie_word_embeddings"),
        ({"relative_attention_num_buckets": 2}, "too few"),
        ({"relative_attention_max_distance": 4}, "distance"),
        ({"dropout_rate": 1}, "dropout_rate"),
        ({"vocab_size": 1}, "eos_token_id"),
    ],
)
def test_an_impossible_t5_is_refused(change, words, read, copy):
    folder = copy("t5-huggingface")
    describe(folder, **change)
    check_refused(read(folder), words)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"rope_parameters": "x"}, "rope_parameters"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling"),
        ({"num_key_value_heads": 4}, "heads"),
        ({"head_dim": 15}, "even"),
        ({"layer_types": "x"}, "layer_types"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": [[]] * 3}, "layer_types"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
        ({"eos_token_id": [97]}, "eos_token_id"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_an_impossible_gemma_is_refused(change, words, read, copy):
    folder = copy("gemma2-huggingface")
    describe(folder, **change)
    check_refused(read(folder), words)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"family": ["t5"]}, "only t5"),
        ({"family": "t6"}, "only t5"),
        ({"color": "red"}, "color"),
        ({"gated": "no"}, "gated"),
        ({"shared_position_bias": 1}, "shared_position_bias"),
    ],
)
def test_a_run_of_an_unknown_model_is_refused(change, words, read, copy):
    folder = copy("t5-native")
    describe(folder, **change)
    check_refused(read(folder), words)


# ---- files that are none --------------------------------------------------------------------------------

NEEDED = {
    "t5-huggingface": ["config.json", "model.safetensors"],
    "t5-t5x": [
        "checkpoint",
        "t5_config.json",
        "target.token_embedder.embedding/.zarray",
        "target.token_embedder.embedding/0.0",
    ],
    "t5-native": ["model.json", "latest/0/_CHECKPOINT_METADATA", "latest/0/params/manifest.ocdbt"],
}


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("kind,name", [(kind, name) for kind, names in NEEDED.items() for name in names])
def test_anything_but_a_regular_file_is_refused(kind, name, instead, read, copy):
    folder = copy(kind)
    path = folder / name
    path.unlink()
    INSTEAD[instead](path)
    outcome = read(folder)
    if instead == "itself" and name == "t5_config.json":  # a link to nowhere is no file, and none is needed
        return
    check_refused(outcome)


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("name", ["model.json", "config.json", "checkpoint", "_METADATA"])
def test_a_folder_with_only_an_unusable_file_is_refused(name, instead, read, tmp_path):
    (tmp_path / "folder").mkdir()
    INSTEAD[instead](tmp_path / "folder" / name)
    check_refused(read(tmp_path / "folder"))
    check_refused(read(tmp_path / "folder", "config_of"))


@pytest.mark.parametrize("instead", ["a pipe", "a folder", "an endless device"])
def test_any_other_file_of_a_run_may_be_replaced(instead, intact, read, copy):
    """Orbax opens every file of a run; none of them hangs."""
    files = [
        path.relative_to(intact / "t5-native") for path in (intact / "t5-native").rglob("*") if path.is_file()
    ]
    assert len(files) > 5
    for name in files:
        folder = copy("t5-native")
        (folder / name).unlink()
        INSTEAD[instead](folder / name)
        outcome = read(folder)
        assert outcome.kind in ("ValueError", "loaded"), (name, outcome)
        assert outcome.gigabytes < GIGABYTES


@pytest.mark.parametrize(
    "names",
    [
        ["pipe"],
        ["../outside"],
        ["OUTSIDE"],
        [""],
        ["."],
        [".."],
        [None],
        [3],
        [["model.safetensors"]],
        ["nowhere"],
        ["folder"],
        ["a\0b"],
        ["\ud800"],
        ["folder/../model.safetensors"],
        "model.safetensors",
        [],
        None,
        ["x" * 5000],
    ],
    ids=lambda names: ascii(names)[:40],
)
def test_an_index_names_files_of_its_folder_only(names, read, copy):
    folder = copy("t5-huggingface")
    shutil.copy(folder / "model.safetensors", folder.parent / "outside")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    if isinstance(names, list):
        arrays = load_file(folder / "model.safetensors")
        entries = [str(folder.parent / "outside") if name == "OUTSIDE" else name for name in names]
        names = dict.fromkeys(arrays, entries[0]) if entries else {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    check_refused(read(folder))


def test_an_index_of_links_inside_its_folder_is_read(read, copy):
    """As in the hub's cache, where links point to files elsewhere."""
    folder = copy("t5-huggingface")
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "a.safetensors").symlink_to(folder.parent / "blob")
    arrays = load_file(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(arrays, "a.safetensors")})
    )
    assert read(folder).kind == "loaded"


def test_arrays_of_a_t5x_folder_lie_inside_it(read, copy):
    from flax import serialization

    folder = copy("t5-t5x")
    contents = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    for path in ("..", "../..", "/", ".", "", "elsewhere/.."):
        contents["optimizer"]["target"]["token_embedder"]["embedding"]["kvstore"]["path"] = path
        (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(contents))
        check_refused(read(folder))


@pytest.mark.parametrize("rows", [10**8, 10**12, 2**40, 0])
def test_a_t5x_array_with_a_huge_declared_shape_takes_no_memory(rows, read, copy):
    folder = copy("t5-t5x")
    for name in ("token_embedder.embedding", "decoder.logits_dense.kernel"):
        header = folder / f"target.{name}" / ".zarray"
        metadata = json.loads(header.read_text())
        axis = metadata["shape"].index(97)
        metadata["shape"][axis] = rows
        for chunks in (metadata["chunks"][axis], max(rows, 1)):
            metadata["chunks"][axis] = chunks
            header.write_text(json.dumps(metadata))
            check_refused(read(folder))


@pytest.mark.parametrize("value", [b"{}", b'{"relative_max_distance": 12}', b'{"x": 1}', DEEP])
def test_the_settings_of_a_t5x_export_are_complete_or_refused(value, read, copy):
    folder = copy("t5-t5x")
    (folder / "t5_config.json").write_bytes(value)
    check_refused(read(folder), "t5_config.json")
    for name in checkpoints.t5x.UNTOLD:
        describe_untold = {**json.loads((copy("t5-t5x") / "t5_config.json").read_text()), name: "x"}
        (folder / "t5_config.json").write_text(json.dumps(describe_untold))
        check_refused(read(folder), name)


def test_safetensors_of_unknown_kinds_of_numbers_are_refused(read, copy):
    folder = copy("t5-huggingface")
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for dtype in ("F8_E4M3", "I32", "BOOL", "U32"):
        shape = header["shared.weight"]["shape"]
        factor = 4 if dtype in ("F8_E4M3", "BOOL") else 1
        changed = {
            **header,
            "shared.weight": {
                **header["shared.weight"],
                "dtype": dtype,
                "shape": [shape[0], shape[1] * factor],
            },
        }
        text = json.dumps(changed).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        check_refused(read(folder))


def test_an_invalid_checksum_counts_as_different(read, copy):
    folder = copy("t5-huggingface")
    save_file(
        load_file(folder / "model.safetensors"),
        folder / "model.safetensors",
        metadata={"crc32 shared.weight": "many"},
    )
    check_refused(read(folder), "checksum")
    folder = copy("t5-native")
    for value in ("x", [], {"crc32": [1]}, {"crc32": {"embedding": "x"}}, {"crc32": "x"}, 3):
        (folder / "latest" / "0" / "_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": value}))
        check_refused(read(folder))


# ---- paths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "\ud800",
        "\udcff",
        "a\0b",
        "x" * 5000,
        "/dev/zero",
        "/nowhere/at/all",
        "",
        "hf://\ud800",
        "hf://",
        "gs://",
        "gs://\ud800/x",
        "{folder}/config.json",
        "{folder}/config.json/x",
        "{folder}/pipe",
    ],
    ids=lambda path: ascii(path)[:30],
)
@pytest.mark.parametrize("what", ["load", "config_of", "tokenizer"])
def test_a_path_that_is_not_a_folder_is_refused(path, what, read, copy):
    folder = copy("t5-huggingface")
    os.mkfifo(folder / "pipe")
    if what == "tokenizer" and path == "{folder}/config.json":
        pytest.skip("a file")
    check_refused(read(path.replace("{folder}", str(folder)), what))


def test_an_unreadable_file_is_refused(intact):
    """Root can read everything, so it becomes nobody after the imports."""
    with tempfile.TemporaryDirectory() as where:
        os.chmod(where, 0o755)
        names = [".", "config.json", "model.safetensors"]
        for n, name in enumerate(names):
            folder = Path(shutil.copytree(intact / "t5-huggingface", f"{where}/{n}"))
            (folder / name).chmod(0)
        said = json.loads(
            run(f"""
import json, os
from speccascade_jax import checkpoints
checkpoints.load({str(intact / "t5-huggingface")!r})
if os.geteuid() == 0: os.setuid(65534)
said = []
for n in range({len(names)}):
    try: checkpoints.load(f"{where}/{{n}}")
    except ValueError as error: said.append(str(error))
print(json.dumps(said))""")
        )
        Path(where, "0").chmod(0o755)
    assert len(said) == len(names) and all("Permission denied" in words for words in said), said


# ---- vocabularies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_a_file_that_is_no_tokenizer_is_refused(name, instead, read, tmp_path):
    INSTEAD[instead](tmp_path / name)
    check_refused(read(tmp_path / name, "tokenizer"))


@pytest.mark.parametrize("ids", [{}, {"<pad>": 0}, {"<pad>": 0, "</s>": 5}, {"<pad>": 0, "</s>": 0}], ids=str)
def test_a_tokenizer_json_without_its_special_pieces_is_refused(ids, read, tmp_path):
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    check_refused(read(tmp_path / "tokenizer.json", "tokenizer"))


def test_a_tokenizer_json_that_cannot_take_every_text_is_refused(read, tmp_path):
    model = {"type": "Unigram", "vocab": [["<pad>", 0.0], ["</s>", 0.0], ["a", -1.0]], "unk_id": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    check_refused(read(tmp_path / "tokenizer.json", "tokenizer"), "unk")


TEXT, END = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}
OTHER = {"Sequence": {"id": "B", "type_id": 0}}


def template(single=(TEXT, END), ids=(1,), **changes):
    special = {"</s>": {"id": "</s>", "ids": list(ids), "tokens": ["</s>"]}}
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": list(single),
            "pair": [TEXT, OTHER],
            "special_tokens": special,
            **changes,
        }
    }


def charsmap(table):
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
            ],
        }
    }


def vocabulary(**more):
    return {
        "model": {
            "type": "WordLevel",
            "unk_token": "<unk>",
            "vocab": {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, **more},
        }
    }


DAMAGED_JSON = {  # parts of a tokenizer.json that end the library's process, or raise what is no Exception
    "a template's token": (template(special_tokens={}), "special_tokens"),
    "a template's text": (template(single=[OTHER, END]), "TemplateProcessing"),
    "a template without a text": (template(single=[END]), "TemplateProcessing"),
    "a template's id": (template(ids=[4_000_000_000]), "4000000000"),
    "a template's id beyond the vocabulary": (template(ids=[9]), "[3, 9]"),
    "no characters": (charsmap(b""), "precompiled_charsmap"),
    "characters without end": (charsmap(b"\xff" * 8), "precompiled_charsmap"),
    "a table of wrong units": (charsmap(b"\4\0\0\0" + b"\xff" * 4 + b"a\0"), "cannot read"),
    "a large id": (vocabulary(b=4_000_000_000), "4000000000"),
    "an added token's id": (
        {
            "added_tokens": [
                {
                    "id": 4_000_000_000,
                    "content": "<x>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ]
        },
        "4000000000",
    ),
    "a strip": ({"decoder": {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}}, "Strip"),
}


@pytest.mark.parametrize("case", DAMAGED_JSON)
def test_a_tokenizer_part_that_would_abort_the_process_is_refused(case, read, tmp_path):
    damage, words = DAMAGED_JSON[case]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", **vocabulary(), **damage}))
    check_refused(read(tmp_path / "tokenizer.json", "tokenizer"), words)


PADDED = {
    "strategy": {"Fixed": 10**18},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<pad>",
}
CUT = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
WORDS = {"normalizer": {"type": "Prepend", "prepend": "a "}, "pre_tokenizer": {"type": "Whitespace"}}
"""Every text has two tokens or more: one of them would be cut."""


@pytest.mark.parametrize(
    "part",
    [{"padding": PADDED}, {"truncation": CUT}, {"padding": 7, "truncation": 7}],
    ids=["padding", "truncation", "numbers"],
)
def test_truncation_and_padding_are_not_read(part, read, tmp_path):
    """The caller does both: a fixed padding of 10**18 tokens crashed the process."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", **vocabulary(), **WORDS, **part}))
    outcome = read(tmp_path / "tokenizer.json", "tokenizer")
    assert outcome.kind == "loaded" and outcome.gigabytes < GIGABYTES, outcome


def test_a_damaged_vocabulary_is_refused_or_usable(spiece, read, tmp_path):
    """One byte changed, or the end lost: never a crash."""
    whole = spiece.read_bytes()
    for n in range(0, len(whole), max(len(whole) // 60, 1)):
        for damaged in (whole[:n], whole[:n] + bytes([whole[n] ^ 0xFF]) + whole[n + 1 :]):
            (tmp_path / "spiece.model").write_bytes(damaged)
            outcome = read(tmp_path / "spiece.model", "tokenizer")
            assert outcome.kind in ("loaded", "ValueError"), (n, outcome)
