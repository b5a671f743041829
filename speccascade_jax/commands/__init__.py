"""What scripts/ and `speccascade` run: one module a command."""

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

NAMES = (
    "new",
    "decode",
    "finetune",
    "evaluate",
    "tradeoff",
    "benchmark",
    "convert",
    "fewshot",
    "plan",
    "serve",
    "load",
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command argv[0] with the rest as its flags, and returns its exit code."""
    name, *flags = (sys.argv[1:] if argv is None else argv) or ["--help"]
    said = ""
    if name not in NAMES:
        said = f"speccascade COMMAND [--FLAGS], where COMMAND is one of: {', '.join(NAMES)}."
        if name in ("-h", "--help"):
            print(said)
            return 0
        said = f"unknown command {name!a}; write {said}"
    for flag in flags:
        try:
            flag.encode()
        except UnicodeEncodeError:
            said = said or f"the argument {flag!a} is not valid UTF-8."
    if said:
        print(f"error: {said}", file=sys.stderr)
        return 2
    try:
        with interrupted_by(end):  # that is why commands are imported here and no earlier
            command = importlib.import_module(f"speccascade_jax.commands.{name}")
        with interrupted_by(interrupt):
            return command.main(flags)
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130


@contextlib.contextmanager
def interrupted_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Within, an interrupt calls `handler`, where it would call Python's own."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end(*_: Any) -> None:
    """Ends the process at once, with one word. As an exception, libraries that are just being loaded would
    turn an interrupt into an ImportError of their own."""
    os.write(2, b"interrupted.\n")
    os._exit(130)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Python's own, or, in what JAX does at a collection of garbage, where an exception is printed and lost,
    a little later."""
    if frame is None or frame.f_code.co_name != "_xla_gc_callback":
        signal.default_int_handler(number, frame)
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
