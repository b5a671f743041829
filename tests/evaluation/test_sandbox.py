"""A program can neither forge its verdict nor reach anything outside; each outcome is recorded clearly."""

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from speccascade_jax.evaluation import sandbox as module
from speccascade_jax.evaluation.sandbox import packed, parse_tests, run_program, unpacked

FINE = "import math, re, collections\ndef f(x=6): return math.gcd(x, 18)"
ENDS = {  # program -> outcome under `assert f() == 6`, words of its detail
    "fine": (FINE, "passed", ""),
    "prints": (f"print('x' * 10**7)\n{FINE}", "passed", ""),
    "wrong": ("def f(): return 5", "failed", "f() is 5, not 6"),
    "no such function": ("x = 1", "failed", "NameError"),
    "syntax": ("def f(:", "failed", "SyntaxError"),
    "endless loop": ("while True: pass", "time", "1 seconds"),
    "deaf endless loop": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n"
        "  try:\n    while True: pass\n  except BaseException: pass",
        "time",
        "",
    ),
    "sleep": ("import time\ntime.sleep(60)", "time", ""),
    "10 GB": ("x = bytearray(10 * 2**30)", "memory", ""),
    "a growing list": ("x = [0]\nwhile True: x += x", "memory", ""),
    "deep recursion": ("f = lambda n=0: f(n + 1)", "failed", "RecursionError"),
    "too long an answer": ("def f(): return 'x' * 10**7", "failed", "too much"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", "died", "status 137"),
    "fine again": (FINE, "passed", ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_every_program_ends_with_a_clear_record(name, sandbox):
    program, outcome, words = ENDS[name]
    verdict = run_program(program, ["assert f() == 6"], 1 if outcome == "time" else 30)
    assert verdict.outcome == outcome and words in verdict.detail, verdict


def test_every_test_counts(sandbox):
    assert run_program(FINE, ["assert f(6) == 6", "assert f(9) == 9"]).outcome == "passed"
    assert run_program(FINE, ["assert f(6) == 6", "assert f(9) == 8", "assert f(6) == 6"]).outcome == "failed"


# Verdicts that are not earned

EXPECTED = "secret-word"
FRAMES = """
import gc, sys
frame, found = sys._getframe(), []
while frame:
    found += [frame.f_globals, frame.f_locals]
    frame = frame.f_back
"""
FORGED = {
    "silent end": "import os\nos._exit(0)",
    "end": "import sys\nsys.exit(0)",
    "SystemExit in the call": "def f(): raise SystemExit(0)",
    "every file descriptor": 'import os\nfor n in range(3, 64):\n  try: os.write(n, b\'["passed", ""]\')\n'
    "  except OSError: pass\nos._exit(0)",
    "answers of its own": "import os\nfor n in range(3, 64):\n"
    '  try: os.write(n, b\'{"values": [], "end": ["passed", ""]}\')\n'
    "  except OSError: pass\nos._exit(0)",
    "the frame's way to say it": FRAMES + "for names in found:\n  for word in ('say', 'Verdict'):\n"
    "    if word in names: names[word]('passed')",
    "the frame's report": FRAMES + "import os\nfor names in found:\n  if 'report' in names:\n"
    "    os.write(names['report'], b'[\"passed\", \"\"]')\n    os._exit(0)",
    "the tests, found in memory": FRAMES
    + """
def f():
    strings = [x for o in [*found, *gc.get_objects()] for x in (o.values() if type(o) is dict else o
               if type(o) in (list, tuple) else ()) if type(x) is str] + sys.argv
    for s in strings:
        at = s.find('assert f() == ' + chr(39) + 'sec')
        if at >= 0: return s[at + 15:].split(chr(39))[0]
    return [s for s in strings if s.startswith('secret-')]
""",
    "equal to all": "class E:\n  __eq__ = lambda *a: True\n  __ne__ = lambda *a: False\ndef f(): return E()",
    "a str equal to all": "class E(str):\n  __eq__ = lambda *a: True\n  __ne__ = lambda *a: False\n"
    "  __hash__ = str.__hash__\ndef f(): return E()",
    "patched builtins": "import builtins, json\nclass E:\n  __eq__ = lambda *a: True\n"
    "builtins.eval = lambda *a: E()\nbuiltins.compile = lambda *a: 'None'\n"
    'json.dumps = lambda *a: \'["passed", ""]\'\ndef f(): return 5',
    "no assertions": "import builtins, sys\nsys.flags = None\nAssertionError = SystemExit\n"
    "builtins.AssertionError = SystemExit\ndef f(): return 5",
}


@pytest.mark.parametrize("name", FORGED)
def test_a_verdict_cannot_be_forged(name, sandbox):
    verdict = run_program(FORGED[name], [f"assert f() == {EXPECTED!r}"])
    assert verdict.outcome in ("failed", "died"), verdict


def test_answers_of_programs_are_only_data(sandbox):
    """Whatever a program sends, the judge gives a verdict, and it is not `passed`."""
    for said in (
        "",
        "[",
        "[]",
        "7",
        '"end"',
        '["passed", ""]',
        "{}",
        '{"end": ["passed", ""]}',
        '{"end": 1}',
        '{"values": []}',
        '{"values": [6, 6]}',
        '{"values": 6}',
        '{"values": [{"eval": [6]}]}',
        '{"values": [{"dict": [6]}]}',
        '{"values": [NaN]}',
        "[" * 10**5,
        '{"values": ' + "[" * 900000,
        '{"values": [' + "9" * 900000 + "]}",
        '{"values": [{"set": [{"list": []}]}]}',
    ):
        status, verdict = module.in_sandbox("judge", [said, ["f()"], ["6"]], 20, 2**30)
        assert '"passed"' not in verdict and status in (0, 139), (said[:50], status, verdict)


def test_only_plain_data_leaves_the_sandbox():
    value = [
        1,
        True,
        None,
        0.1,
        float("inf"),
        "\ud800",
        (1, [2, (3,)]),
        {1, 2},
        frozenset((1,)),
        b"\xff",
        2 + 3j,
        {(1, 2): {"a": []}},
        {},
    ]
    same = unpacked(packed(value))
    assert same == value and [type(x) for x in same] == [type(x) for x in value]
    for odd in (object(), iter([]), print, range(3), {1: object()}):
        with pytest.raises(TypeError, match="not plain data"):
            packed(odd)


# What lies outside

STOPPED = """
    except (OSError, RuntimeError): return 'stopped'
    return 'done'
"""
PATCHED = "import os\nos.O_WRONLY = os.O_RDWR = os.O_CREAT = os.O_TRUNC = os.O_APPEND = 0\n"
CLEARED = (
    FRAMES
    + """
for names in [*found, sys.modules['__main__'].__dict__]:
    for table in ('FORBIDDEN', 'REFUSED', 'KINDS'):
        if hasattr(names.get(table), 'clear'): names[table].clear()
import os, shutil, signal, socket
"""
)
REACHES = {
    "a file": "def f():\n    try: open({file!r}, 'w').write('x')",
    "a file, flags patched": PATCHED + "def f():\n    try: os.close(os.open({file!r}, 0o101))",
    "a file, table cleared": CLEARED + "def f():\n    try: os.open({file!r}, os.O_CREAT | os.O_WRONLY)",
    "delete, table cleared": CLEARED + "def f():\n    try: os.remove({kept!r})",
    "delete all, table cleared": CLEARED + "def f():\n    try: shutil.rmtree(os.path.dirname({kept!r}))",
    "read": "def f():\n    try: open({kept!r}).read()",
    "mkfifo": "import os\ndef f():\n    try: os.mkfifo({file!r})",
    "mknod": "import os\ndef f():\n    try: os.mknod({file!r})",
    "its own root": "import os\ndef f():\n    try: os.mkdir('/x')",
    "its own code": "def f():\n    try: open('/sandbox.py', 'a').write('x')",
    "kill, table cleared": CLEARED + "def f():\n    try: os.kill({victim}, signal.SIGTERM)",
    "AF_UNIX": CLEARED + "def f():\n    try: socket.socket(socket.AF_UNIX).connect({unix!r})",
    "AF_UNIX, no path": CLEARED + "def f():\n    try: socket.socket(socket.AF_UNIX).connect({bare!r})",
    "network": "import socket\ndef f():\n    try: socket.create_connection(('127.0.0.1', {port}), 5)",
    "a process": "import os\ndef f():\n    try: os._exit(0) if os.fork() == 0 else os.wait()",
    "another program": "import subprocess\ndef f():\n    try: subprocess.run(['/bin/true'])",
    "a shell": "import subprocess\ndef f():\n    try: subprocess.run('echo', shell=True)",
    "a thread": "import threading\ndef f():\n    try: threading.Thread(target=print).start()",
    "/etc/passwd": "def f():\n    try: open('/etc/passwd').read()",
    "other processes": "import os\ndef f():\n    try: os.listdir('/proc')",
    "the home directory": "import os\ndef f():\n"
    "    try: os.listdir({home!r} + '/.ssh'), os.listdir({home!r} + '/.cache')",
}
MACHINE_CODE = {  # by the kernel's calls, under Python and whatever it may refuse
    "fork": "c.fork()",
    "a namespace": "c.unshare(0x10000000)",
    "a socket": "c.socket(1, 1, 0)",
    "memory no limit counts": "c.shmget(0, 2**20, 0o1600)",
    "a mount": "c.mount(b'x', b'/dev', b'tmpfs', 0, 0)",
    "unlink": "c.unlink(os.fsencode({kept!r}))",
    "root": "c.setuid(0)",
    "more memory": "c.setrlimit(9, p)",
}


@pytest.fixture
def world(sandbox, tmp_path):
    """What programs try to reach; nothing of it may have changed at the end."""
    (tmp_path / "kept").write_text("kept")
    tmp_path.chmod(0o777)
    connected = []

    def listen(server):
        with contextlib.suppress(OSError):
            connected.append(server.accept())

    bare, near = f"\0{tmp_path}", os.open(tmp_path, os.O_RDONLY)
    with (
        contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server,
        contextlib.closing(socket.socket(socket.AF_UNIX)) as unix,
        contextlib.closing(socket.socket(socket.AF_UNIX)) as nameless,
        subprocess.Popen(["sleep", "600"]) as victim,
    ):
        unix.bind(f"/proc/self/fd/{near}/socket")  # the path itself may be too long
        nameless.bind(bare)
        for listener in (server, unix, nameless):
            listener.listen()
            threading.Thread(target=listen, args=(listener,), daemon=True).start()
        yield {
            "file": str(tmp_path / "file"),
            "kept": str(tmp_path / "kept"),
            "victim": victim.pid,
            "unix": str(tmp_path / "socket"),
            "bare": bare,
            "port": server.getsockname()[1],
            "home": str(Path.home()),
        }
        assert victim.poll() is None, "the program killed a process outside"
        victim.kill()
    os.close(near)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "socket"] and not connected
    assert (tmp_path / "kept").read_text() == "kept"


def fill(program, world):
    for name, value in world.items():
        program = program.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
    return program


@pytest.mark.parametrize("name", REACHES)
def test_nothing_outside_is_reached(name, world):
    program = fill(REACHES[name], world) + STOPPED
    assert run_program(program, ["assert f() == 'stopped'"]) == ("passed", "")


def test_the_kernel_refuses_what_machine_code_asks(world):
    program = "import ctypes, os\nc = ctypes.CDLL(None)\np = (ctypes.c_ulong * 2)(2**62, 2**62)\n"
    tests = []
    for number, call in enumerate(MACHINE_CODE.values()):
        program += f"def f{number}(): return {fill(call, world)}\n"
        tests.append(f"assert f{number}() == -1")
    assert run_program(program, tests) == ("passed", "")


def test_a_program_sees_no_secrets(sandbox, monkeypatch):
    """No environment, and only the files of Python and the libraries."""
    monkeypatch.setenv("TOKEN", "secret-token")
    program = (
        "import os, sys\n"
        "def f(): return [key for key, value in os.environ.items() if 'secret' in value]\n"
        "def g(): return [path for path in ('/home', '/tmp', '/proc', '/var', '/run', '/srv', "
        "'/dev/shm', '/etc/shadow') if os.path.exists(path) and not sys.prefix.startswith(path)]"
    )
    assert run_program(program, ["assert f() == []", "assert g() == []"]) == ("passed", "")


def bearing(mark):
    """The processes that were started with this mark in their environment."""
    pids = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark in (folder / "environ").read_text(errors="replace"):
                pids.add(int(folder.name))
    return pids


def has_started(mark):
    """Whether a program runs below these processes: in it, the environment is cleared."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit():
                words = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"/sandbox.py" in words and words[0] != b"bwrap" and parent in bearing(mark):
                    return True
    return False


def wait_until(happened, seconds):
    end = time.monotonic() + seconds
    while not (so := happened()) and time.monotonic() < end:
        time.sleep(0.1)
    return so


@pytest.mark.parametrize("killed", [False, True], ids=["out of time", "evaluator killed"])
def test_a_program_leaves_nothing_behind(killed, sandbox):
    """The whole sandbox dies at the time limit or with the evaluator, even if it ignores signals."""
    mark = f"mark-{os.getpid()}-{time.time_ns()}"  # in bwrap's own environment
    deaf = (
        "import signal, time\nfor n in range(1, 30):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except OSError: pass\nwhile True: time.sleep(1)"
    )
    code = (
        "import sys, time\nfrom speccascade_jax.evaluation.sandbox import check_sandbox, run_program\n"
        "check_sandbox()\nprint('checked', flush=True)\n"
        "verdict = run_program(sys.argv[1], ['assert f() == 1'], float(sys.argv[2]))\n"
        "print(verdict, flush=True)\ntime.sleep(60)"
    )
    seconds = "600" if killed else "1"
    with subprocess.Popen(
        [sys.executable, "-c", code, deaf, seconds],
        stdout=subprocess.PIPE,
        env={**os.environ, "SANDBOX_MARK": mark},
    ) as evaluator:
        try:
            assert evaluator.stdout.readline() == b"checked\n"
            if killed:
                assert wait_until(lambda: has_started(mark), 60), "the sandbox has not started"
                evaluator.kill()
            else:
                assert b"'time'" in evaluator.stdout.readline() and evaluator.pid in bearing(mark)
            assert wait_until(lambda: bearing(mark) <= {evaluator.pid}, 10)
        finally:
            evaluator.kill()


# Before anything is decoded


@pytest.mark.parametrize(
    "test",
    [
        "assert not f()",
        "assert f()",
        "assert f() == g()",
        "assert 6 == f()",
        "x = f()",
        "assert f() is None",
        "assert f() == 6; x = 1",
        "assert f(",
        "(" * 10**4,
        "",
    ],
)
def test_a_test_that_cannot_be_judged_is_refused(test):
    with pytest.raises(ValueError, match="assert CALL == VALUE"):
        parse_tests(["assert f() == 6", test])


def test_a_program_needs_a_test():
    with pytest.raises(ValueError, match="no tests"):
        run_program(FINE, [])


@pytest.mark.parametrize(
    "bwrap",
    [None, "#!/bin/sh\necho 'No permissions to create a namespace'; exit 1"],
    ids=["not there", "not allowed"],
)
def test_without_a_sandbox_programs_are_refused_before_loading(bwrap, tmp_path, monkeypatch, capsys):
    from speccascade_jax.commands import fewshot

    monkeypatch.setenv("PATH", str(tmp_path))
    if bwrap:
        (tmp_path / "bwrap").write_text(bwrap)
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(module, "check_sandbox", functools.cache(module.check_sandbox.__wrapped__))
    monkeypatch.setattr(fewshot, "check_sandbox", module.check_sandbox)
    with pytest.raises(ValueError, match="bubblewrap"):
        run_program(FINE, ["assert f() == 6"])
    assert fewshot.main(["--task=mbpp", "--execute-code", "--drafter=/nowhere", "--verifier=/nowhere"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert ("No permissions to create a namespace" if bwrap else "apt install bubblewrap") in said
    assert "nowhere" not in said and "Traceback" not in said
