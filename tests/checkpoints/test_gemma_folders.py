"""Folders of a decoder-only model with its tokenizer: every format round-trips, and damage is named."""

import dataclasses

import jax
import numpy as np
import pytest

from speccascade_jax import checkpoints
from speccascade_jax.core.errors import FieldError


@pytest.mark.parametrize("to", ["native", "huggingface"])
def test_every_format_round_trips(to, gemma_pair, tmp_path):
    original = checkpoints.load(gemma_pair / "verifier")
    checkpoints.save(tmp_path / "out", original, to)
    again = checkpoints.load(tmp_path / "out", config=original.model.config)
    jax.tree.map(np.testing.assert_array_equal, original.params, again.params)
    assert again.tokenizer.name == "tokenizer.model"
    with pytest.raises(ValueError, match=r"window is 7, not 9"):
        checkpoints.load(tmp_path / "out", config=dataclasses.replace(original.model.config, window=9))
    with pytest.raises(FieldError) as refused:
        checkpoints.save(tmp_path / "t5x", original, "t5x")
    assert (refused.value.field, refused.value.value) == ("to", "t5x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "change,words",
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
        ({"layer_types": ["full"] * 3}, "layer_types is"),
        ({"hidden_activation": "relu"}, "relu"),
        ({"model_type": "gemma3"}, "only t5, .* nearest is gemma3_text"),
        ({"num_hidden_layers": 2, "layer_types": None}, "model.layers.2.* has no place"),
        ({"sliding_window": None}, "sliding_window is None, but"),
    ],
)
def test_another_config_is_refused(change, words, gemma_pair, tmp_path):
    import json
    import shutil

    shutil.copytree(gemma_pair / "drafter", tmp_path / "changed")
    described = json.loads((gemma_pair / "drafter" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps({**described, **change}))
    with pytest.raises(ValueError, match=words):
        checkpoints.load(tmp_path / "changed")
