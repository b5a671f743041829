"""Progress messages if the output is not a terminal."""

import io

from rich.console import Console

from speccascade_jax.inference import progress
from speccascade_jax.inference.progress import duration, line, track


def test_an_occasional_line_without_a_terminal(monkeypatch):
    clock = iter(range(0, 1000, 9))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    screen = Console(file=io.StringIO(), width=20)
    assert list(track(range(10), "decoding", 15, completed=5, console=screen)) == list(range(10))
    said = screen.file.getvalue().splitlines()
    assert said[0] == "decoding: 8 of 15, about 63 s left"  # after 27 s, more than EVERY
    assert [text.split(",")[0] for text in said] == [f"decoding: {n} of 15" for n in (8, 11, 14)]


def test_the_first_item_tells_nothing_of_the_others(monkeypatch):
    clock = iter([0, 60, 61, 90])  # it includes compilation
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    screen = Console(file=io.StringIO())
    list(track(range(3), "decoding", 103, console=screen))
    assert screen.file.getvalue().splitlines() == [
        "decoding: 1 of 103",
        "decoding: 3 of 103, about 25 min left",
    ]


def test_short_or_quiet_work_shows_no_progress():
    screen = Console(file=io.StringIO())
    assert list(track([1, 2], "x", console=screen)) == [1, 2]
    assert list(track(iter([1, 2]), "x", console=screen, disable=True)) == [1, 2]
    assert screen.file.getvalue() == ""


def test_times_are_readable():
    assert [duration(s) for s in (5, 89, 600, 12_000)] == ["5 s", "89 s", "10 min", "3 h 20 min"]
    assert line("x", 3, None, 1.0) == "x: 3 done"
