"""scripts/memory.py: what it refuses, and what it tells of a tiny pair."""

import dataclasses
import json

import jax
import pytest
from shapes import TINY_GEMMA, TINY_T5

from speccascade_jax.commands import memory
from speccascade_jax.models import model_of

BAD = [(["--devices=0"], "--devices is 0; it must be at least 1"), (["--devices=-1"], "--devices is -1"),
       (["--rows=0"], "--rows is 0"), (["--block-size=0"], "--block-size is 0"),
       (["--new-tokens=0"], "--new-tokens is 0"), (["--source-length=0"], "--source-length is 0"),
       (["--devices=1000000"], "--devices is 1000000; it must be at most"),
       (["--block-size=1000000"], "--block-size is 1000000; it must be at most"),
       (["--rows=1000000000"], "--rows is 1000000000"), (["--new-tokens=1000000000"], "--new-tokens is"),
       (["--drafter=gemma3"], "unknown preset 'gemma3'; known: t5_1_1_small"),
       (["--drafter=t5_1_1_small"], "t5_1_1_small has 32128 tokens, gemma2_27b 256000")]


@pytest.mark.parametrize("arguments,said", BAD, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_bad_flags_are_one_sentence(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(memory, "compiled_pair", lambda *_: pytest.fail("compiled"))
    assert memory.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("config", [TINY_T5, TINY_GEMMA], ids=["t5", "gemma"])
def test_arguments_are_the_weights(config, monkeypatch, capsys):
    """In bfloat16, with the inputs: a model of either family, as the compiled program holds them."""
    wide = dataclasses.replace(config, d_ff=200_000)
    monkeypatch.setattr(memory, "PRESETS", {"tiny": config, "wide": wide})
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the devices are those of the tests
    assert memory.main(["--drafter=tiny", "--verifier=wide", "--devices=1", "--source-length=8",
                        "--new-tokens=4"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["gigabytes_a_device"]["argument"]
    sizes = (2 * sum(x.size for x in jax.tree.leaves(model_of(memory.PRESETS[name]).abstract_params()))
             for name in ("tiny", "wide"))
    assert told == pytest.approx(sum(sizes) / 1e9, abs=0.006) and told > 0.03
