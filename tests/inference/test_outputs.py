"""Output files: resumed after a kill, with one writer at a time, and nothing lost or mixed."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time

import pytest
from processes import REPOSITORY

from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.outputs import (
    OutputFile,
    check_targets,
    open_output,
    resume,
    settings_file,
    write_whole,
)
from speccascade_jax.inference.text import Output

SETTINGS = {"alpha": 0.5, "stop": ("a", "b"), "top_k": None}
TEXTS = ["ein Satz", "", "noch \u2028 einer"]
OUTPUTS = [
    Output(0, TEXTS[0], "a", [5, 6], ["draft", "bonus"], {"rounds": 1, "histogram": [0, 1]}, level=[0, 1]),
    Output(1, TEXTS[1], "", [], [], {}),
    Output(2, TEXTS[2], "b\u2028\r", [7], ["model"], {"model_passes": 1}, True, [0]),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl"


def write(path, outputs=OUTPUTS, settings=SETTINGS):
    file, done = open_output(path, settings, TEXTS)
    with file:
        for output in outputs[len(done) :]:
            file.add(dataclasses.asdict(output))
    return done


def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(path):
    assert write(path) == []
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert write(path) == OUTPUTS[: sum(end <= cut for end in ends)]
        assert path.read_bytes() == whole


FOREIGN = {
    "of another program": b'{"theme": "dark", "alpha": 1}',
    "no object": b"[1]",
    "no JSON": b"mine",
    "a sparse file": None,
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("empty", [False, True], ids=["no output", "an empty output"])
def test_other_files_in_the_settings_place_are_kept(case, empty, path):
    """A foreign file in place of the settings is not overwritten."""
    if empty:
        path.write_bytes(b"")
    settings_file(path).write_bytes(FOREIGN[case] or b"{")
    if FOREIGN[case] is None:
        os.truncate(settings_file(path), 2**40)
    before = settings_file(path).stat()
    with pytest.raises(FieldError) as error:
        open_output(path, SETTINGS, TEXTS)
    assert (error.value.field, error.value.value) == ("output", str(path))
    after = settings_file(path).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert path.exists() == empty


def test_an_error_before_the_first_line_leaves_no_file(path):
    """But an earlier file, even an empty one, is kept, and so is one with a line."""

    def fails(lines):
        with pytest.raises(RuntimeError):
            file, _ = open_output(path, SETTINGS, TEXTS)
            with file:
                for output in OUTPUTS[:lines]:
                    file.add(dataclasses.asdict(output))
                raise RuntimeError
        return sorted(p.name for p in path.parent.iterdir())

    assert fails(0) == []
    both = ["out.jsonl", "out.jsonl.settings.json"]
    assert fails(1) == both and fails(0) == both
    path.write_bytes(b"")
    assert fails(0) == both and path.read_bytes() == b""


def refused(path, words, settings=SETTINGS, texts=TEXTS, first=0):
    """open_output refuses the file, and leaves it and its settings as they were."""
    before = [f.read_bytes() if f.is_file() else None for f in (path, settings_file(path))]
    with pytest.raises(FieldError) as error:
        open_output(path, settings, texts, first)
    assert re.search(words, str(error.value))
    assert "\n" not in str(error.value)
    assert (error.value.field, error.value.value) == ("output", str(path))
    assert [f.read_bytes() if f.is_file() else None for f in (path, settings_file(path))] == before


DAMAGE = {
    "source": lambda line: line | {"source": "another"},
    "index": lambda line: line | {"index": 1},
    "index type": lambda line: line | {"index": False},
    "text": lambda line: line | {"text": None},
    "half a character": lambda line: line | {"text": "\ud800"},
    "tokens": lambda line: line | {"tokens": [5, 6.0]},
    "tokens type": lambda line: line | {"tokens": "56"},
    "negative token": lambda line: line | {"tokens": [5, -6]},
    "origin": lambda line: line | {"origin": ["draft", "drafter"]},
    "origin type": lambda line: line | {"origin": [["draft"], 3]},
    "origin short": lambda line: line | {"origin": ["draft"]},
    "level": lambda line: line | {"level": ["draft", 1]},
    "level short": lambda line: line | {"level": [0]},
    "truncated": lambda line: line | {"truncated": 0},
    "counts": lambda line: line | {"counts": None},
    "count": lambda line: line | {"counts": {"rounds": "1"}},
    "no counts": lambda line: line | {"counts": {}},
    "histogram": lambda line: line | {"counts": {"rounds": 1, "histogram": [0, None]}},
    "nested": lambda line: line | {"counts": {"rounds": [[1]]}},
    "one more": lambda line: line | {"more": 1},
    "one less": lambda line: {k: v for k, v in line.items() if k != "truncated"},
    "no object": list,
    "deep": lambda line: json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_whole_line_that_is_damaged_is_refused(case, path):
    """Also with a partial line after it: nothing is cut off before everything has been checked."""
    write(path)
    first, *rest = path.read_text().split("\n")
    path.write_text("\n".join([json.dumps(DAMAGE[case](json.loads(first))), *rest]) + '{"half')
    refused(path, "out.jsonl, line 1: .*choose another --output")


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"\xff{}", b"[" * 100_000, b"1" * 5000],
    ids=["empty", "json", "utf-8", "deep", "long"],
)
def test_a_complete_line_that_is_not_json_is_refused(line, path):
    write(path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    refused(path, "out.jsonl, line 4: .*choose another --output")


def test_lines_in_another_order_twice_or_too_many_are_refused(path):
    write(path)
    first, second, third = (line + "\n" for line in path.read_text().split("\n")[:-1])
    for lines in ([second, first], [first, first], [first, second, third, first], [first, third]):
        path.write_text("".join(lines))
        refused(path, "line [24]: another source|line 1: another source")
    path.write_text(first)
    refused(path, "line 1: index 0, not 5", first=5)
    refused(path, "line 1: another source", texts=["ein anderer"])


def test_results_of_other_settings_are_never_mixed_in(path):
    write(path)
    refused(path, "other settings .see alpha, top_p in", {**SETTINGS, "alpha": 1, "top_p": 1})
    kept = settings_file(path).read_bytes()
    for damage in (b"", b"{", b"[]", b"[" * 100_000, b"\xff"):
        settings_file(path).write_bytes(damage)
        refused(path, "out.jsonl")
    settings_file(path).unlink()
    refused(path, "without out.jsonl.settings.json")
    settings_file(path).write_bytes(kept)
    assert write(path) == OUTPUTS
    path.write_text("")  # nothing is in it that could be mixed
    assert write(path, settings={"alpha": 2}) == []


def test_unrelated_files_are_left_alone(path):
    path.write_bytes(b"my notes\nno line end")
    refused(path, "exists without out.jsonl.settings.json")


def refuses(work, path):
    with pytest.raises(FieldError) as error:
        work()
    assert (error.value.field, error.value.value) == ("output", str(path))


def test_only_files_are_written(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "fifo", tmp_path / "link", "/dev/full", "/dev/null", tmp_path / "folder"):
        refuses(lambda path=path: resume(path, SETTINGS), path)
        refuses(lambda path=path: write_whole(path, "text"), os.path.realpath(path))
        refuses(lambda path=path: check_targets({"--output": path}, {}), path)
    os.mkfifo(tmp_path / "out.jsonl.settings.json")
    refuses(lambda: resume(tmp_path / "out.jsonl", SETTINGS), tmp_path / "out.jsonl.settings.json")
    refuses(lambda: resume(tmp_path / ("x" * 300), SETTINGS), tmp_path / ("x" * 300))


HOLD = """
import sys, time
from pathlib import Path
from speccascade_jax.inference.outputs import OutputFile
file = OutputFile(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.full
def test_a_second_process_is_refused_until_the_first_is_dead(path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert first.stdout.readline() == "locked\n"
        refuses(lambda: resume(path, SETTINGS), path)
        link = path.with_name("link")
        link.symlink_to(path)
        refuses(lambda: resume(link, SETTINGS), link)
    finally:
        first.kill()
        first.wait()
    assert write(path) == []  # the dead hold no locks


def test_the_lock_is_on_the_file_with_that_name(path, monkeypatch):
    """Another process may move the file between opening and locking."""
    first = OutputFile(path)
    real, moved = os.open, path.with_name("moved")

    def opened(*arguments):
        handle = real(*arguments)
        if not moved.exists():
            path.rename(moved)
            first.close()
        return handle

    monkeypatch.setattr(os, "open", opened)
    with OutputFile(path) as second:
        monkeypatch.undo()
        second.add({"a": 1})
    assert path.read_text() == '{"a": 1}\n' and moved.read_text() == ""


LIMITED = """
import resource, signal, sys
from pathlib import Path
from speccascade_jax.inference.outputs import *
path, whole, most = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
lines, file = resume(path, {})
for work in (lambda: [file.add({"n": n}) for n in range(len(lines), 100)],
             lambda: write_whole(whole, "x" * 999), lambda: append_line(path.with_name("more"), "x" * 999)):
    try:
        work()
    except OSError as error:
        print(error.filename)
"""


@pytest.mark.full
def test_a_full_disk_is_named_and_loses_no_line(path, tmp_path):
    """A limit on file sizes stops a write in the middle, like a full disk."""
    whole = tmp_path / "summary.json"
    whole.write_text("before")

    def limited(limit):
        return subprocess.run(
            [sys.executable, "-c", LIMITED, path, whole, str(limit)],
            check=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
        ).stdout

    assert limited(205) == f"{path}\n{whole}\n{tmp_path / 'more'}\n"
    assert len(path.read_bytes()) == 205 and not path.read_bytes().endswith(b"\n")
    assert whole.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["out.jsonl", "out.jsonl.settings.json", "summary.json", "more"]
    )
    assert str(path) not in limited(1_000_000)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"n": n} for n in range(100)]


ADD = """
import sys
from speccascade_jax.inference.outputs import append_line
for n in range(200):
    append_line(sys.argv[1], {"who": sys.argv[2], "n": n, "fill": "x" * 500})
"""


@pytest.mark.full
def test_lines_of_several_processes_are_all_written(path):
    path.write_text('{"half')
    begin = time.time()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ADD, path, who], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
        )
        for who in "ab"
    ]
    assert [process.wait() for process in processes] == [0, 0] and time.time() - begin < 60
    half, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert half == '{"half' and all(
        [line["n"] for line in records if line["who"] == who] == list(range(200)) for who in "ab"
    )


def test_no_file_is_both_read_and_written_under_any_name(tmp_path):
    data, other = tmp_path / "data.jsonl", tmp_path / "other"
    data.write_text("x")
    (tmp_path / "link").symlink_to(data)
    os.link(data, tmp_path / "hard")
    (tmp_path / "there").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(other)
    for same in (
        data,
        tmp_path / "link",
        tmp_path / "hard",
        tmp_path / "there" / "data.jsonl",
        os.path.relpath(data),
    ):
        for written, read in (
            ({"--summary": same}, {"--input": data}),
            ({"--output": data, "--summary": same}, {}),
        ):
            with pytest.raises(FieldError) as error:
                check_targets(written, read)
            assert (error.value.field, error.value.value) == ("summary", str(same))
    for same in (other, tmp_path / "there" / "other", tmp_path / "dangling"):  # not there yet
        with pytest.raises(FieldError) as error:
            check_targets({"--output": other, "--summary": same}, {})
        assert (error.value.field, error.value.value) == ("summary", str(same))
    check_targets({"--output": other, "--summary": None}, {"--input": data, "--tokenizer": None})
    assert not other.exists() and data.read_text() == "x"  # a check writes nothing
    with pytest.raises(FieldError) as error:
        check_targets({"--output": tmp_path / "nowhere" / "out"}, {})
    assert (error.value.field, error.value.value) == ("output", str(tmp_path / "nowhere" / "out"))


def test_a_link_to_a_summary_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/real")
    for text in ("one", "two"):
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "folder" / "real").read_text() == text and (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "folder") == ["real"]
