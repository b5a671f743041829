"""What a model's program must not do is stopped, said, and the run goes on; as root and as nobody."""

import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from speccascade_jax.evaluation import sandbox
from speccascade_jax.evaluation.sandbox import run_program

FINE = "import math, re, collections\nassert math.gcd(12, 18) == 6\nassert sorted([2, 1]) == [1, 2]"
PROGRAMS = {
    "fine": (FINE, "passed", ""),
    "wrong": ("assert 1 + 1 == 3", "failed", "AssertionError"),
    "syntax": ("def f(:", "failed", "SyntaxError"),
    "early end": ("import sys\nsys.exit(0)\nassert False", "failed", "SystemExit"),
    "silent end": ("import os\nos._exit(0)", "died", "status 0"),
    "endless loop": ("while True: pass", "time", "1 seconds"),
    "deaf endless loop": ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "time",
                          ""),
    "sleep": ("import time\ntime.sleep(60)", "time", ""),
    "10 GB": ("x = bytearray(10 * 2**30)", "memory", "512 MiB"),
    "a growing list": ("x = [0]\nwhile True: x += x", "memory", ""),
    "deep recursion": ("f = lambda n: f(n + 1)\nf(0)", "failed", "RecursionError"),
    "200 forks": ("import os\nfor _ in range(200):\n  if os.fork() == 0: break", "process", "os.fork"),
    "200 forks, caught": ("import os\ntry:\n  os.fork()\nexcept BaseException: pass", "process", "os.fork"),
    "200 processes": ("import subprocess\nfor _ in range(200): subprocess.Popen(['sleep', '9'])", "process",
                      "subprocess.Popen"),
    "a shell": ("import os\nos.system('sleep 9')", "process", "os.system"),
    "kill": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "process", "os.kill"),
    "file": ("open({file!r}, 'w').write('x')", "file", "tried to write"),
    "file by os": ("import os\nos.open({file!r}, os.O_CREAT | os.O_WRONLY)", "file", "tried to write"),
    "delete": ("import os\nos.remove({kept!r})", "file", "os.remove"),
    "directory": ("import os\nos.mkdir({file!r})", "file", "os.mkdir"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', {port}))", "network", "socket."),
    "machine code": ("import ctypes\nctypes.CDLL(None).fork()", "machine code", "ctypes."),
    "fine again": (FINE, "passed", ""),
}


@pytest.fixture
def world(tmp_path):
    """What programs try to reach: a file that is not there, one that is, a listening port."""
    (tmp_path / "kept").write_text("kept")
    tmp_path.chmod(0o777)
    connected = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: connected.append(server.accept()), daemon=True).start()
        yield {"file": str(tmp_path / "file"), "kept": str(tmp_path / "kept"),
               "port": server.getsockname()[1]}
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and not connected


def test_every_program_ends_with_a_clear_record(world):
    for name, (program, outcome, words) in PROGRAMS.items():
        seconds = 1 if outcome == "time" else 30
        verdict = run_program(program.replace("{file!r}", repr(world["file"])).replace(
            "{kept!r}", repr(world["kept"])).replace("{port}", str(world["port"])), seconds)
        assert verdict.outcome == outcome and words in verdict.detail, (name, verdict)


KERNEL = {
    "process": ("import _posixsubprocess, os\nr, w = os.pipe()\n_posixsubprocess.fork_exec("
                "[b'/bin/true'], [b'/bin/true'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, True, "
                "False, -1, None, None, None, -1, None, True)"),
    "thread": "import _thread\n_thread.start_new_thread(print, ())",
    "big file": "import os\nos.write(os.open({file!r}, os.O_CREAT | os.O_WRONLY), b'x' * 9)",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)",
}


@pytest.mark.parametrize("name", KERNEL)
def test_the_kernel_holds_where_the_hooks_do_not_see(name, world, monkeypatch, tmp_path):
    """The child without its audit hook: what is left are the limits, the user and the namespace."""
    unhooked = tmp_path.parent / f"unhooked_{name.replace(' ', '_')}.py"
    source = Path(sandbox.__file__).read_text()
    assert source.count("    sys.addaudithook(fence)\n") == 1
    unhooked.write_text(source.replace("    sys.addaudithook(fence)\n", ""))
    monkeypatch.setattr(sandbox, "__file__", str(unhooked))
    program = KERNEL[name].replace("{file!r}", repr(world["file"])).replace("{port}", str(world["port"]))
    verdict = run_program(program)
    Path(world["file"]).unlink(missing_ok=True)
    if name == "network" and os.getuid() and verdict.outcome == "passed":
        pytest.skip("this system allows no user namespaces")
    assert verdict.outcome == "failed", verdict


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_it_holds_for_other_users_too(world, tmp_path):
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("needs a Python that every user may run")
    copy = tmp_path.parent / "sandbox_for_all.py"
    copy.write_text(Path(sandbox.__file__).read_text())
    script = ("import json, runpy, sys\nmodule = runpy.run_path(sys.argv[1])\n"
              "module['run_program'].__globals__['__file__'] = sys.argv[1]\n"
              "print(json.dumps([module['run_program'](program, 2) for program in json.loads(sys.argv[2])]))")
    names = ["fine", "endless loop", "10 GB", "200 forks", "file", "network", "fine again"]
    programs = [PROGRAMS[name][0].replace("{file!r}", repr(world["file"])).replace(
        "{port}", str(world["port"])) for name in names]
    for folder in copy.parents:
        if str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    done = subprocess.run([python, "-c", script, str(copy), json.dumps(programs)], capture_output=True,
                          text=True, user=65534, group=65534, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    assert [outcome for outcome, _ in json.loads(done.stdout)] == [PROGRAMS[name][1] for name in names]
