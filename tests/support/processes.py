"""Code and scripts in processes of their own."""

import os
import socket
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


def free_address():
    """An address of this machine at which nobody listens, as --cluster takes it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_code(code, **environment):
    """Python code in a process of its own, which goes on."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(script, *commands, environment):
    """A script in as many processes as there are lists of flags, each with `environment`."""
    return [
        subprocess.Popen(
            [sys.executable, SCRIPTS / script, *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for flags in commands
    ]


def start_cluster(script, flags, environment, count=2):
    """A script in `count` processes of one cluster, each with `environment`."""
    address = free_address()
    commands = [[*flags, f"--cluster={address},{count},{n}"] for n in range(count)]
    return start(script, *commands, environment=environment)


def finish(processes, timeout=300):
    """What the processes have written to stdout; all must have ended well, and end here at the latest."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), [errors for _, errors in said]
    return [output for output, _ in said]
