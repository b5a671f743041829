"""Errors that say which field they are about."""

import reprlib
from typing import Any


class FieldError(ValueError):
    """A value that a field cannot take.

    The message is "FIELD is VALUE; REMEDY", or "PROBLEM; REMEDY" where the value alone does not say what is
    wrong. The command line prints it and exits with 2; the server answers 400 with `param` = field.
    """

    def __init__(self, field: str, value: Any, remedy: str, problem: str = ""):
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{problem or f'{field} is {reprlib.repr(value)}'}; {remedy}")
