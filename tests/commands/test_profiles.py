"""--profile writes a trace to a new folder, with operations named after rounds and models."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest
from toys import TableLM

import speccascade_jax as sc
from speccascade_jax.commands import decode
from speccascade_jax.commands.profiles import check_profile, profiled
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError


def test_a_nonempty_folder_is_left_alone(tmp_path):
    check_profile(None)
    (tmp_path / "empty").mkdir()
    check_profile(str(tmp_path / "empty"))
    check_profile(str(tmp_path / "new" / "folder"))
    file = tmp_path / "full" / "file"
    file.parent.mkdir()
    file.write_text("mine")
    for path in (file, file.parent, file / "below"):
        with pytest.raises(FieldError) as refused:
            check_profile(str(path))
        assert (refused.value.field, refused.value.value) == ("profile", str(path))
    assert file.read_text() == "mine"


def test_decoding_leaves_a_trace(t5_pair, tmp_path):
    config = DecodeConfig(
        drafter=str(t5_pair / "drafter"),
        verifier=str(t5_pair / "verifier"),
        dtype="float32",
        max_new_tokens=8,
        examples=("a dog",),
    )
    decode.decode(decode.Arguments(config, profile=str(tmp_path / "trace")))
    [trace] = (tmp_path / "trace").rglob("*.trace.json.gz")
    assert len(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]) > 100


def test_a_run_that_this_process_does_not_decode_is_not_traced(tmp_path):
    config = DecodeConfig(drafter="a", verifier="b")
    for change in ({"ray": "local"}, {"precompile": True}):
        with pytest.raises(FieldError) as refused:
            decode.decode(decode.Arguments(config, profile=str(tmp_path / "trace"), **change))
        assert refused.value.field == "profile"
    assert not (tmp_path / "trace").exists()


def test_no_trace_is_left_running(tmp_path):
    for number in range(2):  # a second one could not begin while the first runs
        with pytest.raises(KeyboardInterrupt), profiled(tmp_path / str(number)):
            raise KeyboardInterrupt


def test_operations_are_named_after_rounds_and_models():
    """The program is the same, because names are not part of its text."""
    model = TableLM(5)
    sampler = sc.hierarchy([model, model], [sc.METHODS["speculative"]], [2])
    weights = jnp.zeros((5, 5, 5))
    lowered = sc.generate.lower(
        sampler,
        (weights, weights),
        jax.random.split(jax.random.key(0), 1),
        jnp.ones((1, 1), jnp.int32),
        jnp.ones(1, jnp.int32),
        sc.SamplingOptions(1.0),
        jnp.zeros(1),
        max_new_tokens=4,
        eos_id=-1,
    )
    named = lowered.as_text(debug_info=True)
    assert f"level_1/{type(model).__name__}" in named and f"level_0/{type(model).__name__}" in named
    assert "round/" in named and "level_1" not in lowered.as_text()
