""".ci/run: README's commands come first, in a separate environment, and the tests that they skip run
later."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from processes import REPOSITORY
from skips import OUT_OF_TIME, Skips, was_skipped

STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$LOG"
[ "$*" != "-m venv --clear .venv" ] || { mkdir -p .venv/bin; touch .venv/bin/activate; }
[ "$(basename "$0") $*" != "$FAILS" ]
"""


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of .ci/run whose every program only writes down that it was called, and returns these calls
    and the exit code. `fails`: a call that fails."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/run", "README.md"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python", "pip", "ruff", "mypy", "mkdocs", "bwrap"):
        (tmp_path / "bin" / name).write_text(STUB)
        (tmp_path / "bin" / name).chmod(0o755)

    def run(fails=""):
        log = tmp_path / "log"
        log.write_text("")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            [tmp_path / ".ci" / "run"],
            capture_output=True,
            env={**os.environ, "PATH": path, "LOG": str(log), "FAILS": fails},
        )
        return log.read_text().splitlines(), done.returncode

    return run


def readme_calls():
    """README's two commands as the calls that they are made of."""
    lines = re.findall(r"^pip install -e .*$", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 2 and "decode.py" in lines[0] and "pytest" in lines[1]
    return [call.strip().replace("'", "") for line in lines for call in line.split("&&")]


def test_readmes_commands_run_before_anything_else_is_installed(ci):
    calls, code = ci()
    first, *rest = calls
    expected = [call if " " in call else f"{call} " for call in readme_calls()]
    assert code == 0 and first == "python3 -m venv --clear .venv"
    assert rest[: len(expected)] == expected
    assert any("torch" in call for call in rest[len(expected) :])
    assert rest[-1].startswith("python -m pytest --full --rest")


@pytest.mark.parametrize("fails", ["python scripts/decode.py", "ruff check .", "python -m pytest"])
def test_a_command_that_fails_ends_the_run(ci, fails):
    calls, code = ci(fails)
    assert code != 0 and calls[-1] == fails


def test_a_readme_without_its_commands_is_detected(ci, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("pip install -e '.[test]' && ", ""))
    calls, code = ci()
    assert code != 0 and calls == []


class Cache(dict):
    def set(self, key, value):
        self[key] = value


def session(cache, outcomes, files=()):
    """A run with these outcomes by test; `files` were skipped as a whole."""
    skips = Skips(cache)
    for test, outcome in outcomes.items():
        report = SimpleNamespace(nodeid=test, skipped=outcome != "passed", longrepr=outcome)
        skips.pytest_runtest_logreport(report)
    for name in files:
        skips.pytest_collectreport(SimpleNamespace(nodeid=name, skipped=True))
    skips.pytest_sessionfinish()
    lines = []
    skips.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    return lines


def test_what_was_skipped_is_remembered_until_it_runs():
    cache = Cache()

    def remembered():
        tests = ("a.py::one", "a.py::two", "b.py::one", "b.py::two")
        return [test for test in tests if was_skipped(test, cache)]

    session(cache, {"a.py::one": "passed", "a.py::two": "skipped"}, files=["b.py"])
    assert remembered() == ["a.py::two", "b.py::one", "b.py::two"]
    session(cache, {"a.py::one": "passed"})  # others are as they were
    assert remembered() == ["a.py::two", "b.py::one", "b.py::two"]
    session(cache, {"a.py::two": "passed", "b.py::one": "skipped", "b.py::two": "passed"})
    assert remembered() == ["b.py::one"]


def test_tests_skipped_for_lack_of_time_are_reported():
    assert session(Cache(), {"a.py::one": "passed", "b.py::one": "skipped"}) == []
    late = dict.fromkeys(("c.py::one", "b.py::one", "c.py::two"), OUT_OF_TIME)
    assert session(Cache(), late) == ["tests that did not begin in time: 3 (b.py, c.py)"]


@pytest.mark.full(quick=["1-1 skipped"])
@pytest.mark.parametrize("until,outcome", [(1, "1 skipped"), (2**40, "1 passed")])
def test_no_test_begins_when_the_time_is_over(until, outcome, tmp_path):
    test = f"{__file__}::test_what_was_skipped_is_remembered_until_it_runs"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", f"--until={until}", f"-ocache_dir={tmp_path}", test],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0 and outcome in done.stdout
    assert ("did not begin in time: 1 (tests/test_ci.py)" in done.stdout) == (outcome == "1 skipped")
