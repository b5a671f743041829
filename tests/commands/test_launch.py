"""A command as a process: what runs when it ends, and what does not."""

import subprocess
import sys

import pytest
from processes import REPOSITORY

CODE = """
import atexit, sys
from speccascade_jax import commands

class Held:
    def __del__(self, write=sys.stderr.write):
        write("finalized ")

def main(argv):
    atexit.register(lambda: sys.stderr.write("exiting "))
    print("output", end="")  # still in the buffer
    sys.modules["held"] = Held()
    return {code}

commands.main = main
commands.launch([])
"""


@pytest.mark.parametrize(
    "code,said", [(0, "exiting finalized "), (2, "exiting finalized "), (130, "exiting "), (143, "exiting ")]
)
def test_only_a_process_that_was_stopped_skips_finalization(code, said):
    """There a computation that still runs would use what is freed. Exit functions and output are not lost."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(code=code)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "output", said)
