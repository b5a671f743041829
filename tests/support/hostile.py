"""Checkpoints and vocabularies read in a process that may be lost, and what may lie in a file's place."""

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from processes import REPOSITORY

SECONDS, GIGABYTES = 10, 2
DEEP = b"[" * 100_000
READING = Path(__file__).with_name("reading.py")


class Outcome(NamedTuple):
    kind: str  # loaded, hangs, dies or an error's name
    said: str
    gigabytes: float


class Reader:
    """What support/reading.py reads, in a process that may be lost."""

    def __init__(self, folders=(), seconds=SECONDS, bounded=False):
        """bounded: its address space is, too. A checkpoint's arrays are mapped, however large the file says
        they are."""
        self.folders, self.seconds, self.bounded, self.process = folders, seconds, bounded, None

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, str(READING), str(self.bounded), *map(str, self.folders)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        )
        assert self.process.stdout.readline() == "ready\n"

    def __call__(self, path, what="load") -> Outcome:
        if self.process is None:
            self.start()
        self.process.stdin.write(json.dumps([what, str(path)]) + "\n")
        self.process.stdin.flush()
        if select.select([self.process.stdout], [], [], self.seconds)[0]:
            line = self.process.stdout.readline()
            if line:
                return Outcome(*json.loads(line))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)  # its pipe may close a little earlier
        kind = "hangs" if self.process.poll() is None else "dies"
        self.stop()
        return Outcome(kind, "", 0.0)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def check_refused(outcome, words=""):
    assert outcome.kind == "ValueError", outcome
    assert words in outcome.said and "\\n" not in outcome.said and 10 < len(outcome.said) < 800, outcome
    assert outcome.gigabytes < GIGABYTES, outcome


def pipe(path):
    os.mkfifo(path)


def endless(path):
    path.symlink_to("/dev/zero")


def huge(path):
    path.touch()
    os.truncate(path, 2**40)


def content(value):
    return lambda path: path.write_bytes(value)


INSTEAD = {
    "a pipe": pipe,
    "a folder": Path.mkdir,
    "an endless device": endless,
    "a sparse terabyte": huge,
    "nothing": content(b""),
    "no text": content(b"\xff\xfe\x00\x01" * 5),
    "deep": content(DEEP),
    "a list": content(b"[]"),
    "a number": content(b"3"),
    "null": content(b"null"),
    "a string": content(b'"x"'),
    "digits": content(b'{"vocab_size": ' + b"9" * 5000 + b"}"),
    "itself": lambda path: path.symlink_to(path.name),
}
