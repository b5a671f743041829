"""scripts/decode.py and the text API, on a tiny random pair."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from corpora import SENTENCES
from refusals import check_about, refusals

from speccascade_jax.baselines import BASELINES
from speccascade_jax.checkpoints import huggingface
from speccascade_jax.commands import decode
from speccascade_jax.core.rules import METHODS
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.tokenizers.tokenizer import train_tokenizer

SENTENCES = [*SENTENCES[:2], "", *SENTENCES[2:]]


def run(t5_pair, *flags):
    """decode.py on the tiny pair: the exit code."""
    return decode.main(
        [
            f"--drafter={t5_pair / 'drafter'}",
            f"--verifier={t5_pair / 'verifier'}",
            "--max-source-length=32",
            "--max-new-tokens=24",
            *map(str, flags),
        ]
    )


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def inputs(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


def test_writes_every_field_in_input_order(t5_pair, inputs, tmp_path):
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    assert (
        run(
            t5_pair,
            "--input",
            inputs,
            "--output",
            out,
            "--summary",
            summary,
            "--method",
            "token_v3",
            "--alpha",
            0.3,
            "--temperature",
            1,
            "--batch-size",
            4,
        )
        == 0
    )
    written = lines(out)
    assert [(x["index"], x["source"]) for x in written] == list(enumerate(SENTENCES))
    for x in written:
        assert len(x["tokens"]) == len(x["origin"])
        assert set(x["origin"]) <= {"draft", "correction", "bonus"}
        if x["source"]:
            assert x["counts"]["emitted"] == len(x["tokens"])
            assert x["counts"]["accepted"] == x["origin"].count("draft")
            assert sum(x["counts"]["histogram"]) == x["counts"]["rounds"]
        else:
            assert (x["text"], x["tokens"], x["counts"]) == ("", [], {})
    figures = json.loads(summary.read_text())
    total = {
        name: sum(x["counts"].get(name, 0) for x in written)
        for name in ("accepted", "drafted", "emitted", "rounds")
    }
    assert figures["acceptance_rate"] == total["accepted"] / total["drafted"]
    assert figures["tokens_per_verifier_call"] == total["emitted"] / total["rounds"]
    assert figures["compile_seconds"] > 0 and figures["decode_seconds"] > 0


def test_gzip_jsonl_and_stdin_read_alike(t5_pair, inputs, tmp_path, monkeypatch):
    jsonl = tmp_path / "in.jsonl.gz"
    jsonl.write_bytes(gzip.compress("".join(json.dumps({"source": s}) + "\n" for s in SENTENCES).encode()))
    results = []
    for n, source in enumerate((inputs, jsonl, "-")):
        monkeypatch.setattr("sys.stdin", inputs.open())
        assert run(t5_pair, "--input", source, "--output", tmp_path / f"{n}.jsonl", "--limit", 4) == 0
        results.append(lines(tmp_path / f"{n}.jsonl"))
    assert results[0] == results[1] == results[2] and len(results[0]) == 4


@pytest.mark.full
def test_an_interrupted_run_resumes_where_its_output_ends(t5_pair, inputs, tmp_path):
    out = tmp_path / "out.jsonl"
    flags = ("--input", inputs, "--output", out, "--temperature", 1, "--batch-size", 2)
    assert run(t5_pair, *flags) == 0
    whole = out.read_bytes()
    for cut in (0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:cut])
        assert run(t5_pair, *flags) == 0
        assert out.read_bytes() == whole
    assert run(t5_pair, *flags, "--seed", 1) == 2  # other settings are not mixed in
    assert out.read_bytes() == whole
    inputs.write_text("something else\n")
    assert run(t5_pair, *flags) == 2
    assert out.read_bytes() == whole


def test_a_run_resumes_in_the_same_dtype_only(t5_pair, inputs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    flags = ("--input", inputs, "--output", out, "--limit", 1, "--dtype", "auto")
    monkeypatch.setenv("SPECCASCADE_DTYPE", "float32")
    assert run(t5_pair, *flags) == 0
    whole = out.read_bytes()
    monkeypatch.setenv("SPECCASCADE_DTYPE", "bfloat16")  # as on another machine
    assert run(t5_pair, *flags) == 2
    assert "(see dtype in " in capsys.readouterr().err
    assert out.read_bytes() == whole


@pytest.mark.full(quick=["json"])
@pytest.mark.parametrize(
    "line", [b"12", b'{"source": "KEPT"}', b"{", b"\xff"], ids=["number", "fields", "json", "utf-8"]
)
def test_an_output_with_a_damaged_line_is_left_alone(line, t5_pair, inputs, tmp_path, capsys):
    """Except the last line, which a kill may have cut: the lines after a damaged one may be worth keeping."""
    out = tmp_path / "out.jsonl"
    flags = ("--input", inputs, "--output", out)
    assert run(t5_pair, *flags) == 0
    first, *rest = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([line.replace(b"KEPT", json.loads(first)["source"].encode()), b"\n", *rest]))
    damaged = out.read_bytes()
    capsys.readouterr()
    with refusals() as errors:
        assert run(t5_pair, *flags) == 2
    assert out.read_bytes() == damaged
    check_about(errors[0], "output", out)


BAD = {
    "unknown config": (["--config=wmt_smal_large"], "did you mean 'wmt_small_large'"),
    "missing checkpoint": (["--config=wmt_small_large", "--text=x"], ("drafter", "runs/wmt_small")),
    "unknown method": (["--method=tokenv3"], ("method", "tokenv3")),
    "alpha": (["--method=chow", "--alpha=1.5"], ("alpha", 1.5)),
    "lossy alpha": (["--method=lossy", "--alpha=1"], ("alpha", 1.0)),
    "nan alpha": (["--method=chow", "--alpha=nan"], ("alpha", float("nan"))),
    "temperature": (["--temperature=-0.1"], ("temperature", -0.1)),
    "top_p": (["--top-p=0"], ("top_p", 0.0)),
    "top_k": (["--top-k=0"], ("top_k", 0)),
    "block size": (["--block-size=0"], ("block_size", 0)),
    "batch size": (["--batch-size=0"], ("batch_size", 0)),
    "no folder": (["--verifier=/nowhere"], ("verifier", "/nowhere")),
    "too long": (["--text", "cat dog " * 30], ("max_source_length", 32)),
    "unreadable input": (["--input=/nowhere.txt"], "cannot read /nowhere.txt"),
    "unwritable output": (["--output=/nowhere/out.jsonl"], ("output", "/nowhere/out.jsonl")),
    "text and input": (["--text=x", "--input=y"], ("text", "x")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_two(t5_pair, case, capsys):
    flags, about = BAD[case]
    overrides = (
        []
        if "config" in case or "checkpoint" in case
        else [
            f"--drafter={t5_pair / 'drafter'}",
            f"--verifier={t5_pair / 'verifier'}",
            "--max-source-length=32",
        ]
    )
    with refusals() as errors:
        assert decode.main([*overrides, *flags]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if isinstance(about, tuple):
        check_about(errors[0], *about)
    else:
        assert about in said


def test_unknown_flags_exit_with_two(t5_pair):
    with pytest.raises(SystemExit) as stopped:
        run(t5_pair, "--metod", "chow")
    assert stopped.value.code == 2


def test_invalid_utf8_names_the_line(t5_pair, tmp_path, capsys):
    path = tmp_path / "latin1.txt"
    path.write_bytes("fine\nGrüße\n".encode("latin1"))
    assert run(t5_pair, "--input", path) == 2
    assert "line 2: not valid UTF-8" in capsys.readouterr().err


def test_truncation_is_optional_and_counted(t5_pair, tmp_path):
    summary = tmp_path / "summary.json"
    assert run(t5_pair, "--text", "cat dog " * 30, "--truncate", "--summary", summary) == 0
    assert json.loads(summary.read_text())["truncated"] == 1


@pytest.mark.full
def test_a_drafter_of_another_vocabulary(t5_pair, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    train_tokenizer(
        ["eins zwei drei vier fuenf sechs sieben acht neun zehn"] * 50, tmp_path / "spiece.model", 300
    )
    model = T5Model(
        T5Config(
            vocab_size=320,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_heads=4,
            num_encoder_layers=1,
            num_decoder_layers=1,
        )
    )
    huggingface.save(other, model, model.init(0), np.float32)
    (other / "spiece.model").write_bytes((tmp_path / "spiece.model").read_bytes())
    assert run(t5_pair, f"--drafter={other}", "--text", "a dog") == 0
    assert "tli; shared: " in capsys.readouterr().out
    # What the tokenizers tell is refused before the models are read.
    monkeypatch.setattr(decode.Cascade, "from_config", lambda *_: pytest.fail("the models were read"))
    for vocabulary, field, value in (
        ("slem", "method", "opt"),
        ("slem", "method", "typical"),
        ("slem", "method", "cactus"),
        ("union", "method", "relaxed"),
        ("slem", "block_size", "adaptive"),
        ("union", "method", "opt"),
    ):
        flags = [f"--vocabulary={vocabulary}", f"--{field.replace('_', '-')}={value}"]
        flags += ["--alpha=0.3"] if field == "method" else []
        with refusals() as errors:
            assert run(t5_pair, f"--drafter={other}", "--text", "a dog", *flags) == 2
        check_about(errors[0], field, value)


@pytest.mark.full
def test_drafts_that_are_looked_up(t5_pair, inputs, tmp_path, monkeypatch):
    """The verifier's greedy texts, batched; what cannot follow such drafts is refused before the models are
    read."""
    texts = {}
    lookup = ["--drafter=lookup", "--method=speculative", "--batch-size=4"]
    for name, flags in {"alone": ["--method=verifier"], "lookup": lookup}.items():
        out = tmp_path / f"{name}.jsonl"
        assert run(t5_pair, "--input", inputs, "--output", out, *flags) == 0
        texts[name] = [line["text"] for line in lines(out)]
    assert texts["lookup"] == texts["alone"]
    counts = [line["counts"] for line in lines(out) if line["counts"]]
    assert sum(count["accepted"] for count in counts) > 0
    assert {count["drafter_passes"] for count in counts} == {0}
    assert run(t5_pair, "--drafter=lookup", "--text=a dog", "--method=drafter") == 2
    stored, nothing = tmp_path / "lookup.jsonl", tmp_path / "nothing.txt"
    nothing.write_text("\n \n")
    assert run(t5_pair, "--input", inputs, "--output", out, *lookup, "--lookup-texts", stored) == 2
    out = tmp_path / "stored.jsonl"
    assert run(t5_pair, "--input", inputs, "--output", out, *lookup, "--lookup-texts", stored) == 0
    assert [line["text"] for line in lines(out)] == texts["alone"]
    rounds = sum(line["counts"]["rounds"] for line in lines(out) if line["counts"])
    assert rounds < sum(count["rounds"] for count in counts)
    monkeypatch.setattr(decode.Cascade, "load", lambda *_, **__: pytest.fail("the models were read"))
    for flags, field, value in (
        (["--method=opt", "--alpha=0.3"], "method", "opt"),
        (["--method=sequence"], "method", "sequence"),
        (["--block-size=adaptive"], "block_size", "adaptive"),
        (["--verifier=lookup"], "verifier", "lookup"),
        (["--models", "lookup"], "models", "lookup"),
        (["--models", t5_pair / "verifier", "lookup"], "models", "lookup"),
        ([f"--lookup-texts={nothing}"], "lookup_texts", str(nothing)),
        ([f"--lookup-texts={nothing}", f"--output={nothing}"], "output", str(nothing)),
        ([f"--lookup-texts={stored}", f"--drafter={t5_pair / 'drafter'}"], "lookup_texts", str(stored)),
    ):
        with refusals() as errors:
            assert run(t5_pair, "--drafter=lookup", "--text=a dog", *flags) == 2
        check_about(errors[0], field, value)


def test_list_names_configs_to_decode_with_and_methods(capsys):
    """Training configs are not valid here; they have a separate table."""
    assert decode.main(["--list"]) == 0
    shown = capsys.readouterr().out
    decoding, _, training = shown.partition("--config of finetune")
    assert "│ demo_verifier " not in decoding and "│ demo_verifier " in training
    assert "│ demo " in decoding and "│ demo " not in training
    assert all(name in shown for name in [*METHODS, *BASELINES, "demo", "wmt_small_large"])
