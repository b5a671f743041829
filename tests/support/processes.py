"""Code and scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPTS = REPOSITORY / "scripts"


def devices(count):
    """XLA_FLAGS with so many devices on the CPU."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"


def run(code, **environment):
    """Python code in a process of its own: its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
