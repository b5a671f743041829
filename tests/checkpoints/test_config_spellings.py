"""The config.json files of transformers 4 and 5 for the same shapes are read as the same config.

config_spellings.json has the exact output of save_pretrained in 4.57.6 and 5.23.0 for the shapes in
tests/support/shapes.py. The versions differ in names and in omitted fields.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from shapes import DECODERS, TINY_T5GEMMA

from speccascade_jax import checkpoints

SPELLINGS = json.loads(Path(__file__).with_name("config_spellings.json").read_text())
PLAIN = {"rope_type": "default", "rope_factor": 1.0, "rope_length": None}
SHAPES = DECODERS | {
    "llama, plain": dataclasses.replace(
        DECODERS["llama"],
        **PLAIN,
        query_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied_embeddings=True,
        more_eos=(),
    ),
    "mistral, no window": dataclasses.replace(DECODERS["mistral"], window=None, local=()),
    "qwen2, plain": dataclasses.replace(
        DECODERS["qwen2"],
        **PLAIN,
        window=None,
        local=(),
        tied_embeddings=False,
        rope_low=1.0,
        rope_high=4.0,
        rope_attention=1.0,
        rope_truncate=True,
    ),
    "gemma3_text, untied": dataclasses.replace(
        DECODERS["gemma3_text"], **PLAIN, logit_softcap=3.0, tied_embeddings=False
    ),
    "t5gemma": TINY_T5GEMMA,
    "t5gemma, untied": dataclasses.replace(
        TINY_T5GEMMA, decoder=dataclasses.replace(TINY_T5GEMMA.decoder, tied_embeddings=False)
    ),
}


def test_every_shape_has_a_spelling_in_both_versions():
    assert SPELLINGS.keys() == SHAPES.keys()
    for both in SPELLINGS.values():
        assert [both[v]["transformers_version"] for v in ("4", "5")] == ["4.57.6", "5.23.0"]
    rope = SPELLINGS["qwen2"]
    assert "rope_scaling" in rope["4"] and "rope_parameters" in rope["5"]  # they do differ


@pytest.mark.parametrize("version", ["4", "5"])
@pytest.mark.parametrize("name", SHAPES)
def test_both_versions_are_read_as_the_written_shape(name, version, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SPELLINGS[name][version]))
    assert checkpoints.config_of(str(tmp_path)) == SHAPES[name]
