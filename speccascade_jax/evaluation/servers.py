"""Servers to measure: scripts/serve.py in a separate process."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

COMMAND = "from speccascade_jax.commands import launch; launch()"
"""A Python program that runs a command of this package, named by its first argument."""


class Server:
    """A running server, started with a config, a batch size, a queue and further flags."""

    def __init__(self, config: str, rows: int, queue: int, *flags: str):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                COMMAND,
                "serve",
                f"--config={config}",
                "--port=0",
                f"--rows={rows}",
                f"--max-queue={queue}",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.url, self.queue = "", queue

    def until_ready(self) -> None:
        """Waits until everything is compiled. Raises ValueError if the server ends before."""
        if not self.url and self.process.stdout is not None:
            self.url = self.process.stdout.readline().strip()
        while True:
            if self.process.poll() is not None:
                raise ValueError("the server did not start; run scripts/serve.py to see why.")
            with contextlib.suppress(URLError):
                if urlopen(self.url + "/ready").status == 200:
                    return
            time.sleep(0.5)

    def megabytes(self) -> float:
        """The resident memory of the server."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


@contextlib.contextmanager
def served(config: str, rows: int, queue: int, *flags: str) -> Iterator[Server]:
    """Runs a server until the end of the block."""
    server = Server(config, rows, queue, *flags)
    try:
        yield server
    finally:
        server.end()
