"""Errors that name the field that caused them."""

import math
import reprlib
from typing import Any


class FieldError(ValueError):
    """Raised for an invalid value of a field.

    The message is "FIELD is VALUE; REMEDY", or "PROBLEM; REMEDY" if the value alone does not explain the
    problem. The command line prints it and exits with 2; the server answers 400 with `param` = field.
    """

    def __init__(self, field: str, value: Any, remedy: str, problem: str = ""):
        self.field, self.value, self.remedy, self.problem = field, value, remedy, problem
        super().__init__(self.sentence(field))

    def sentence(self, name: str) -> str:
        """The message. If it has no problem, it calls the field `name`."""
        return f"{self.problem or f'{name} is {reprlib.repr(self.value)}'}; {self.remedy}"


def check_range(name: str, value: Any, low: float, high: float, above: bool = False) -> None:
    """Raises FieldError for a number outside [low, high], or (low, high] with `above`. None and texts are not
    checked."""
    if value is None or isinstance(value, str):
        return
    if (low < value if above else low <= value) and value <= high and abs(value) < math.inf:
        return
    if high == math.inf:
        raise FieldError(
            name, value, f"it must be {'above' if above else 'at least'} {low:g}, and a finite number."
        )
    first, last = (f"{end:g}" if abs(end) < 10**6 else str(end) for end in (low, high))
    raise FieldError(name, value, f"it must be in {'(' if above else '['}{first}, {last}].")
