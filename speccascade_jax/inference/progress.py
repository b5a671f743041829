"""Progress of long work: a bar with the remaining time on a terminal, otherwise an occasional line."""

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from rich import progress
from rich.console import Console

T = TypeVar("T")
EVERY = 20.0
"""Seconds between two lines if the output is not a terminal."""


def track(
    items: Iterable[T],
    name: str,
    total: int | None = None,
    *,
    completed: int = 0,
    console: Console | None = None,
    disable: bool = False,
) -> Iterator[T]:
    """Yields the items, while stderr (or `console`) shows how many of `total` are done and an estimate of the
    remaining time.

    completed: the number of `total` that were done before.
    """
    screen = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
    if disable:
        yield from items
        return
    if total is None and isinstance(items, Sized):
        total = completed + len(items)
    if screen.is_terminal:
        yield from progress.track(
            items, name, total=total, completed=completed, console=screen, transient=True
        )
        return
    first = said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if done == 1:
            first = now  # what is compiled for the first item is not compiled again
        if now - said >= EVERY:
            said = now
            seconds = (now - first) / (done - 1) if done > 1 else None
            screen.print(line(name, completed + done, total, seconds), soft_wrap=True)


def line(name: str, done: int, total: int | None, seconds: float | None) -> str:
    """ "decoding: 20 of 100, about 2 min left", at this number of seconds per item."""
    if total is None:
        return f"{name}: {done} done"
    if seconds is None:
        return f"{name}: {done} of {total}"
    return f"{name}: {done} of {total}, about {duration(seconds * (total - done))} left"


def duration(seconds: float) -> str:
    """A readable time: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
