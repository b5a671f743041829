"""What scripts/ and `speccascade` run: one module a command."""

import contextlib
import importlib
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

COMMANDS = {
    "new": "set up your own task: from a file of pairs to the configs of its two models",
    "finetune": "train the model of a config, or the learned rule of a pair",
    "decode": "decode texts with a pair, coloured by which model wrote them",
    "evaluate": "score methods on a task's test split",
    "tradeoff": "sweep methods and leniences: quality against time, and a config for the best point",
    "plan": "measure which models and block sizes are fastest on this machine",
    "benchmark": "time decoding here, or compile a pair for TPUs and tell what it needs",
    "serve": "serve a pair over HTTP in OpenAI's format, with a page to try it",
    "load": "put load on a running server and measure its answers",
    "fewshot": "score a pair on few-shot tasks such as GSM8K and MBPP",
    "report": "run the experiments behind the tables and pictures of docs/results, and draw these",
    "convert": "convert a checkpoint into another format",
}
"""What each command does, for people."""
NAMES = tuple(COMMANDS)
USAGE = "usage: speccascade COMMAND [--FLAGS]"


def main(argv: list[str] | None = None) -> int:
    """Runs the command argv[0] with the rest as its flags, and returns its exit code."""
    name, *flags = (sys.argv[1:] if argv is None else argv) or ["--help"]
    said = ""
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name not in NAMES:
        said = f"unknown command {name!a}; choose one of: {', '.join(NAMES)}."
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
        with interrupted_by(interrupt), terminated_by(terminate):
            return command.main(flags)
    except Terminated:
        print("terminated.", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130


def overview() -> str:
    """What `speccascade --help` prints, as wide as the terminal."""
    width, indent = shutil.get_terminal_size().columns, max(map(len, NAMES)) + 4
    lines = [USAGE, "", "Commands:"]
    for name, what in COMMANDS.items():
        lines += textwrap.wrap(
            what, width, initial_indent=f"  {name}".ljust(indent), subsequent_indent=" " * indent
        )
    lines += ["", *textwrap.wrap("speccascade COMMAND --help lists the flags of a command.", width)]
    return "\n".join(lines)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: the work ends as after an interrupt."""


def terminate(number: int, frame: FrameType | None) -> None:
    """Raises Terminated; a little later within what JAX does at a collection of garbage (see interrupt)."""
    if frame is None or frame.f_code.co_name != "_xla_gc_callback":
        raise Terminated
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()


@contextlib.contextmanager
def terminated_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Within, SIGTERM calls `handler`, unless somebody else handles it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
    turn an interrupt into an ImportError."""
    os.write(2, b"interrupted.\n")
    os._exit(130)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Python's own, or, in what JAX does at a collection of garbage, where an exception is printed and lost,
    a little later."""
    if frame is None or frame.f_code.co_name != "_xla_gc_callback":
        signal.default_int_handler(number, frame)
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
