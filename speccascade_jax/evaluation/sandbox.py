"""Runs and judges a program written by a model in two bubblewrap sandboxes.

The program runs first. Its sandbox has its own user, process, network, IPC and host-name namespaces. It sees
Python's files and the system's libraries, read-only, and nothing else: no home, no /tmp, no /etc, no /proc,
no environment. The kernel limits its memory, time, file size and processes, and refuses the system calls in
REFUSED. It gets the left sides of the tests (`assert CALL == VALUE`) and writes what they return, as plain
data. After it has ended, a second sandbox, in which the program has never run, compares these with the right
sides.

Guarantees: the program has access neither to the expected values nor to the process that reports `passed`.
Whatever it does to its interpreter, it passes only by sending the expected values; an object that claims to
equal everything cannot be sent. Limits: a program that knows the values, for example from a prompt that shows
the tests, can return them without computing them. All sandboxes share the kernel, so against an attacker who
knows a kernel vulnerability, run everything in a virtual machine.
"""

import ast
import builtins
import ctypes
import errno
import functools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SAID = 2**20  # most bytes of a program's answer
OUT_OF_TIME = 128 + signal.SIGXCPU  # exit status
REMEDY = "install it (apt install bubblewrap libseccomp2), or decode a task that runs no programs."
# System calls that need no privilege and are not restricted by the namespaces and limits: processes and
# threads, further namespaces, sockets, memory that no limit counts, and parts of the kernel that have had
# many vulnerabilities.
REFUSED = (
    "fork",
    "vfork",
    "clone",
    "clone3",
    "unshare",
    "setns",
    "socket",
    "socketpair",
    "shmget",
    "msgget",
    "semget",
    "mq_open",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "add_key",
    "request_key",
    "keyctl",
)
MODULES = {"math": math, "sys": sys}  # names that a test's right side may use besides builtins
# Data is sent as JSON; types that JSON lacks are {kind: parts}.
KINDS: dict[str, Callable[[list], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": bytes,
    "complex": lambda parts: complex(*parts),
}


class Verdict(NamedTuple):
    """The outcome of a program."""

    outcome: str  # passed, failed, time, memory or died
    detail: str = ""


# Outside


def run_program(program: str, tests: Sequence[str], seconds: float = 10.0, memory: int = 2**29) -> Verdict:
    """Runs Python source, then the tests. The outcome is `passed` if every call returns the expected value.

    tests: each is `assert CALL == VALUE`. seconds: wall-clock time. memory: bytes of address space, including
    the interpreter's. Raises ValueError if there is no sandbox or a test has another form.
    """
    calls, expected = parse_tests(tests)
    check_sandbox()
    status, said = in_sandbox("answer", [program, calls], seconds, memory)
    if status == OUT_OF_TIME:
        return Verdict("time", f"no end within {seconds:g} seconds")
    if status or not said:
        return Verdict("died", f"ended without an answer, status {status}")
    _, verdict = in_sandbox("judge", [said, calls, expected], 30.0, 2**30)
    return Verdict(*json.loads(verdict)) if verdict else Verdict("died", "its answers cannot be compared")


def parse_tests(tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """The left and the right sides of `assert CALL == VALUE`. Raises ValueError for anything else."""
    calls, expected = [], []
    for test in tests:
        try:
            statements = ast.parse(test.strip()).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            statements = []
        match statements:
            case [ast.Assert(test=ast.Compare(ast.Call() as call, [ast.Eq()], [value]))] if all(
                hasattr(builtins, node.id) or node.id in MODULES
                for node in ast.walk(value)
                if isinstance(node, ast.Name)
            ):
                calls.append(ast.unparse(call))
                expected.append(ast.unparse(value))
            case _:
                raise ValueError(
                    f"the test {test[:200]!r} cannot be judged from outside the program: write "
                    "`assert CALL == VALUE`, the value without names of the program."
                )
    if not calls:
        raise ValueError("a program has no tests: give it at least one.")
    return calls, expected


@functools.cache
def check_sandbox() -> None:
    """Raises ValueError, with the remedy, if programs cannot be run in a sandbox."""
    if shutil.which("bwrap") is None:
        raise ValueError(f"running programs needs bubblewrap (bwrap), which is not installed: {REMEDY}")
    status, said = in_sandbox("answer", ["", ["max(1, 2)"]], 30.0, 2**29)
    if (status, said) != (0, '{"values": [2]}'):
        why = said.strip().splitlines()[-1:] or [f"status {status}"]
        raise ValueError(
            f"bubblewrap cannot make a sandbox here ({why[0]}): allow it user namespaces "
            "(containers often do not), or decode a task that runs no programs."
        )


def in_sandbox(role: str, work: Any, seconds: float, memory: int) -> tuple[int, str]:
    """Runs main(role) in a new sandbox and returns its exit status and output."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    readable = [
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        sys.base_prefix,
        sys.base_exec_prefix,
    ]
    with tempfile.TemporaryFile() as calls, tempfile.TemporaryFile() as said:
        calls.write(refused_calls())
        calls.seek(0)
        command = [
            "bwrap",
            "--unshare-all",
            "--unshare-user",
            "--uid",
            "65534",
            "--gid",
            "65534",
            "--cap-drop",
            "ALL",
            "--die-with-parent",
            "--new-session",
            "--clearenv",
            "--seccomp",
            str(calls.fileno()),
            *(word for path in readable for word in ("--ro-bind-try", path, path)),
            "--ro-bind",
            os.path.abspath(__file__),
            "/sandbox.py",
            "--dev-bind",
            "/dev/null",
            "/dev/null",
            "--remount-ro",
            "/",
            "--chdir",
            "/",
            python,
            "-I",
            "-S",
            "/sandbox.py",
            role,
        ]
        try:
            status = subprocess.run(
                command,
                input=json.dumps([work, seconds, memory]).encode(),
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=(calls.fileno(),),
                timeout=seconds + 2.0,
            ).returncode
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME, ""
        said.seek(0)
        return status, said.read(SAID).decode(errors="replace")


@functools.cache
def refused_calls() -> bytes:
    """The BPF filter, made by libseccomp, that makes the calls in REFUSED fail with EPERM."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise ValueError(f"running programs needs libseccomp, which is not installed: {REMEDY}") from None
    library.seccomp_init.restype = ctypes.c_void_p
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    context = ctypes.c_void_p(library.seccomp_init(allow))
    with tempfile.TemporaryFile() as file:
        bad = 0
        for name in REFUSED:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:  # below zero: this machine lacks the call
                bad |= library.seccomp_rule_add_array(context, refuse, number, 0, None)
        bad |= library.seccomp_export_bpf(context, file.fileno())
        library.seccomp_release(context)
        file.seek(0)
        if bad:
            raise ValueError(f"libseccomp cannot make the sandbox's filter: {REMEDY}")
        return file.read()


# Inside


def main(role: str) -> None:
    work, seconds, memory = json.loads(sys.stdin.buffer.read())
    report, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_FSIZE, SAID),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value + (limit == resource.RLIMIT_CPU)))  # a signal, then a kill
    result = answer(*work) if role == "answer" else judge(*work)
    os.write(report, json.dumps(result).encode())
    os._exit(0)


def answer(program: str, calls: list[str]) -> dict[str, Any]:
    """The results of the calls after the program has run. The program runs in the same process, so nothing in
    this answer is trusted."""
    try:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program, "program", "exec"), names)
        values = [packed(eval(call, names)) for call in calls]
        if len(json.dumps(values)) > SAID // 2:
            raise ValueError("the calls return too much")
        return {"values": values}
    except MemoryError:
        return {"end": ["memory", "needs more memory than it may have"]}
    except BaseException as error:  # including SystemExit: ending before the tests is a failure
        return {"end": ["failed", f"{type(error).__name__}: {error}"[:500]]}


def judge(said: str, calls: list[str], expected: list[str]) -> Verdict:
    """Compares the results that a program reported with those that the tests expect."""
    try:
        report = json.loads(said)
        if "end" in report:
            outcome, detail = report["end"]
            return Verdict("memory" if outcome == "memory" else "failed", str(detail)[:500])
        for call, value, right in zip(calls, report["values"], expected, strict=True):
            got, wanted = unpacked(value), eval(right, dict(MODULES))
            if got != wanted:
                return Verdict("failed", f"{call} is {got!r}, not {wanted!r}"[:500])
    except Exception as error:
        return Verdict("failed", f"its answers cannot be read: {type(error).__name__}: {error}"[:500])
    return Verdict("passed")


def packed(value: Any) -> Any:
    """Converts plain data to JSON types. Raises TypeError for other objects, whose `==` the program
    controls."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind in (list, tuple, set, frozenset, bytes, dict):
        if isinstance(value, kind):
            parts = value.items() if isinstance(value, dict) else value
            return {kind.__name__: [packed(part) for part in parts]}
    raise TypeError(f"returns a {type(value).__name__}, which is not plain data")


def unpacked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    return KINDS[kind]([unpacked(part) for part in parts])


if __name__ == "__main__":
    main(sys.argv[1])
