"""Runs a program that a model wrote, in a process of its own that can compute and nothing else.

It may use some memory and some seconds; it may not write files, start processes or threads, open
sockets or send signals. Two fences: Python's audit hooks (PEP 578), which say what was tried and end
the process there, and the kernel's: limits on memory, time, file size and processes, an empty network
namespace where one may be made, and for root another user, since root has no limits. A fence for the
mistakes of models, not for a determined attacker: for those run it in a virtual machine.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple, NoReturn

NOBODY = 65534
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # unshare(2)
# Imported before root becomes nobody, who may not be allowed to read them.
MODULES = ("array", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime",
           "decimal", "encodings.idna", "enum", "fractions", "functools", "heapq", "itertools", "json",
           "math", "numbers", "operator", "pathlib", "queue", "random", "re", "shutil", "socket",
           "statistics", "string", "subprocess", "tempfile", "textwrap", "threading", "time", "typing",
           "unicodedata")
FORBIDDEN = {  # beginning of an audit event's name -> what it is
    "socket.": "network", "urllib.": "network", "http.": "network", "ftplib.": "network",
    "smtplib.": "network",
    "os.fork": "process", "os.system": "process", "os.exec": "process", "os.posix_spawn": "process",
    "os.spawn": "process", "subprocess.": "process", "pty.": "process", "_thread.": "process",
    "os.kill": "process", "signal.": "process",
    "os.remove": "file", "os.rename": "file", "os.rmdir": "file", "os.mkdir": "file", "os.link": "file",
    "os.symlink": "file", "os.truncate": "file", "os.chmod": "file", "os.chown": "file", "os.utime": "file",
    "os.setxattr": "file", "os.removexattr": "file", "shutil.": "file", "tempfile.": "file",
    "sqlite3.": "file", "ctypes.": "machine code", "mmap.": "machine code",
    "sys.addaudithook": "machine code",
}


class Verdict(NamedTuple):
    """How a program ended."""

    outcome: str  # passed, failed, time, memory, file, process, network, machine code, or died
    detail: str = ""


def run_program(program: str, seconds: float = 10.0, memory: int = 2**29) -> Verdict:
    """Runs Python source to its end: `passed` if that is reached without an exception.

    seconds: of wall-clock time; memory: bytes of address space beside the interpreter's own. Whatever the
    program does, this returns. Raises ValueError where the system has no such fences.
    """
    if sys.platform != "linux":
        raise ValueError("programs that models wrote are run on Linux alone, which can fence them in.")
    reading, writing = os.pipe()
    with open(reading, "rb") as report:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(writing)], stdin=subprocess.PIPE, pass_fds=(writing,),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env={}, start_new_session=True)
        os.close(writing)
        try:
            child.communicate(json.dumps([program, seconds, memory]).encode(), timeout=seconds + 2.0)
        except subprocess.TimeoutExpired:
            return Verdict("time", f"no end within {seconds:g} seconds")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said = report.read(10_000)
    try:
        return Verdict(*json.loads(said))
    except (json.JSONDecodeError, TypeError):
        pass
    if child.returncode == -signal.SIGXCPU:
        return Verdict("time", f"no end within {seconds:g} seconds")
    return Verdict("died", f"ended without a word, status {child.returncode}")


def main(report: int) -> None:
    """The child: reads [program, seconds, memory], fences itself in, runs the program, says how it ended."""
    import resource

    program, seconds, memory = json.loads(sys.stdin.buffer.read())
    for name in MODULES:
        __import__(name)

    def say(outcome: str, detail: str = "") -> NoReturn:
        os.write(report, json.dumps([outcome, detail[:500]]).encode())
        os._exit(0)

    leave_network()
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    for limit, value in ((resource.RLIMIT_AS, used + memory), (resource.RLIMIT_CPU, int(seconds) + 1),
                         (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value + (limit == resource.RLIMIT_CPU)))  # a signal, then death

    def fence(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                say("file", f"tried to write {path}")
            return
        for beginning, what in FORBIDDEN.items():
            if event.startswith(beginning):
                say(what, f"tried {event}")

    sys.addaudithook(fence)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except MemoryError:
        say("memory", f"needs more than {memory / 2**20:.0f} MiB")
    except BaseException as error:  # SystemExit too: an end before the tests is no success
        say("failed", f"{type(error).__name__}: {error}")
    say("passed")


def leave_network() -> None:
    """Moves this process into an empty network namespace, where the system allows that."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.unshare(NEW_NETWORK):
            libc.unshare(NEW_USER | NEW_NETWORK)


if __name__ == "__main__":
    main(int(sys.argv[1]))
