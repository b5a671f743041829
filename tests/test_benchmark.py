"""scripts/benchmark.py on a tiny pair, and what its figures stand on."""

import json

import benchmark
import jax
import numpy as np
import pytest

from speccascade_jax import parts
from speccascade_jax.models.t5 import T5Config, T5Model

TINY = T5Config(vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_encoder_layers=2,
                num_decoder_layers=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_reads_the_decoder_and_the_head(dtype):
    """Not the encoder, the embedding it indexes, nor the projections of cross-attention's keys."""
    model = T5Model(TINY, dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), model.init(0))
    square, layers = 16 * 16, TINY.num_decoder_layers
    entries = layers * (6 * square + 3 * 16 * 24 + 3 * 16) + 16 + 16 * 96  # norms; the last one; the head
    # The position table is read by prefill, which lays it out by distance.
    assert parts.bytes_read(model, params) == entries * np.dtype(dtype).itemsize


def test_parts_are_printed_and_kept_with_what_they_were_measured_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "PRESETS", {"tiny": TINY})
    monkeypatch.setattr(parts, "read_bandwidth", lambda: 1e9)
    path = tmp_path / "figures.jsonl"
    benchmark.benchmark(benchmark.Arguments(preset=("tiny", "tiny"), block_sizes=(2,), output=str(path)))
    lines = {(line["of"], line["figure"]): line for line in map(json.loads, path.read_text().splitlines())}
    title = "parts, batch 1, speculative, gamma 2"
    wanted = {"drafter step, ms", "verifier step, ms", "scoring 3 tokens, ms", "round, ms",
              "drafter prefill, ms", "verifier prefill, ms", f"{parts.OVERHEAD}, ms"}
    assert wanted <= {figure for of, figure in lines if of == title}
    assert 0 < lines[title, f"{parts.OVERHEAD}, share of a round"]["value"] < 1.5
    assert all(line["jax"] == jax.__version__ and line["dtype"] == "float32" for line in lines.values())
    assert "round, ms" in capsys.readouterr().out


@pytest.mark.parametrize("arguments,said", [
    ({"vs": ("hf",)}, "--input"), ({"method": "no such"}, "known"),
    ({"preset": ("t5_1_1_small", "huge")}, "unknown preset 'huge'"),
    ({"block_sizes": (0,)}, "block_size is 0"), ({"repetitions": 0}, "--repetitions must be at least 1")])
def test_bad_input_is_told_in_a_sentence(arguments, said):
    with pytest.raises(ValueError, match=said):
        benchmark.benchmark(benchmark.Arguments(**arguments))
