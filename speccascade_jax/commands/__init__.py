"""The commands of scripts/ and `speccascade`, one module per command."""

import atexit
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
from typing import Any, NoReturn

COMMANDS = {
    "new": "Set up your own task: write the configs of its two models from a file of examples.",
    "finetune": "Train the model of a config, or the learned rule of a pair.",
    "decode": "Decode texts with a pair, coloured by the model that wrote each token.",
    "evaluate": "Score methods on a task's test split.",
    "tradeoff": "Sweep methods and leniences: plot quality against time, and write the best point's config.",
    "plan": "Find the fastest models and block sizes on this machine.",
    "benchmark": "Time decoding on this machine, or compile a pair for TPUs and report what it needs.",
    "serve": "Serve a pair over HTTP in OpenAI's format, with a page for trying it.",
    "load": "Load-test a server: throughput, latency and refusals.",
    "fewshot": "Score a pair on few-shot tasks such as GSM8K and MBPP.",
    "report": "Run the experiments behind docs/results and regenerate their tables and figures.",
    "convert": "Convert a checkpoint into another format.",
}
"""A description of each command, for its help."""
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
        with interrupted_by(end):  # the reason for importing commands only here
            command = importlib.import_module(f"speccascade_jax.commands.{name}")
        with interrupted_by(interrupt), terminated_by(terminate):
            return command.main(flags)
    except Terminated:
        print("terminated.", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130


def launch(argv: list[str] | None = None) -> NoReturn:
    """Runs main() as a process of its own, which exits with its code.

    A process that was interrupted or terminated in the middle of a computation skips Python's finalization,
    during which that computation would still use what is being freed: with libtpu installed this ends in a
    segmentation fault, and the exit code is lost. What is registered with atexit runs in any case."""
    stopped: list[int] = []
    atexit.register(lambda: stopped and exit_now(stopped[0]))  # the first to register is the last to run
    code = main(argv)
    if code in (130, 143):
        stopped.append(code)
    sys.exit(code)


def exit_now(code: int) -> NoReturn:
    """Ends the process once its output is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or nobody reads it
            stream.flush()
    os._exit(code)


def overview() -> str:
    """The output of `speccascade --help`, as wide as the terminal."""
    width, indent = shutil.get_terminal_size().columns, max(map(len, NAMES)) + 4
    lines = [USAGE, "", "Commands:"]
    for name, what in COMMANDS.items():
        lines += textwrap.wrap(
            what, width, initial_indent=f"  {name}".ljust(indent), subsequent_indent=" " * indent
        )
    lines += ["", *textwrap.wrap("Run speccascade COMMAND --help for the flags of a command.", width)]
    return "\n".join(lines)


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; the work ends as after an interrupt."""


def terminate(number: int, frame: FrameType | None) -> None:
    """Raises Terminated, or postpones it during JAX's garbage-collection callback (see interrupt)."""
    if frame is None or frame.f_code.co_name != "_xla_gc_callback":
        raise Terminated
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()


@contextlib.contextmanager
def terminated_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """In this context, SIGTERM calls `handler`, unless it already has a handler."""
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
    """In this context, an interrupt calls `handler`, if it would otherwise call Python's default handler."""
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
    """Ends the process immediately, with a one-word message. Libraries that are being imported could turn an
    exception into an ImportError."""
    os.write(2, b"interrupted.\n")
    os._exit(130)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt. During JAX's garbage-collection callback, where an exception would be printed
    and lost, it is postponed a little."""
    if frame is None or frame.f_code.co_name != "_xla_gc_callback":
        signal.default_int_handler(number, frame)
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
