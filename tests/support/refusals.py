"""What commands refuse: the error itself, of which the command line makes a sentence and exit code 2."""

import contextlib
from collections.abc import Iterator

import pytest

from speccascade_jax.commands import commandline


@contextlib.contextmanager
def refusals() -> Iterator[list[Exception]]:
    """The errors that end commands meanwhile, as they are raised."""
    errors, real = [], commandline.sentence

    def sentence(error):
        errors.append(error)
        return real(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commandline, "sentence", sentence)
        yield errors


def names(error: Exception) -> tuple:
    """What an error is about: its field and value, where it has them."""
    return getattr(error, "field", None), getattr(error, "value", None)


def check_about(error: Exception, field: str, value: object) -> None:
    """Whether an error is about this field with this value, which may be NaN."""
    assert getattr(error, "field", None) == field, repr(error)
    assert str(error.value) == str(value), repr(error)
