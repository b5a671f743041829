"""Invalid examples: the error names the field and contains its value."""

import json

import pytest

from speccascade_jax.config import Task
from speccascade_jax.core.errors import FieldError
from speccascade_jax.training.data import joined_examples, texts


@pytest.mark.parametrize(
    "example,field,value",
    [
        ({"source": None, "target": "x"}, "source", None),
        ({"source": "one"}, "target", None),
        ({"source": "one", "targets": "abc"}, "targets", "abc"),
    ],
)
def test_the_error_names_the_field_that_an_example_lacks(tmp_path, example, field, value):
    (tmp_path / "bad.jsonl").write_text(json.dumps(example) + "\n")
    with pytest.raises(FieldError) as refused:
        list(texts(Task("", "", ""), str(tmp_path / "bad.jsonl")))
    assert (refused.value.field, refused.value.value) == (field, value)


@pytest.mark.parametrize("join", [0, -1])
def test_at_least_one_example_is_joined(tmp_path, join):
    with pytest.raises(FieldError) as refused:
        joined_examples(Task("", "", "", join=join), str(tmp_path / "none.jsonl"))
    assert (refused.value.field, refused.value.value) == ("join", join)
