"""Command lines of hostile or careless users: one sentence, exit code 2, and nothing lost."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from processes import SCRIPTS
from refusals import check_about, refusals

from speccascade_jax import commands
from speccascade_jax.inference.outputs import OutputFile

TASK = """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config
task = Task(train="{0}/empty.jsonl", validation="{0}/empty.jsonl", test="{0}/data.jsonl")
config = TrainConfig(name="tiny", output_dir="", model=T5Config(), task=task)
"""


def call(command, *flags):
    """A command's exit code, run in this process: whatever it raises is this test's failure."""
    try:
        return commands.main([command, *map(str, flags)])
    except SystemExit as stopped:  # of the flags' parser
        return stopped.code


@pytest.fixture(scope="module")
def flags(t5_pair):
    return [
        f"--drafter={t5_pair / 'drafter'}",
        f"--verifier={t5_pair / 'verifier'}",
        "--max-source-length=32",
        "--max-new-tokens=24",
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: inputs, a task, an earlier summary."""
    monkeypatch.chdir(tmp_path)
    lines = [{"source": f"the cat {n}", "target": "a dog"} for n in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "in.txt").write_text("the cat\na dog\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "task.py").write_text(TASK.format(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, about, command, *flags):
    """One sentence on stderr, and exit code 2; about: the field and the value that the error is about, or
    words of one that has no field."""
    capsys.readouterr()
    with refusals() as errors:
        code = call(command, *flags)
    said = capsys.readouterr().err
    assert code == 2 and "Traceback" not in said, said
    if isinstance(about, tuple):
        check_about(errors[0], *about)
    else:
        assert about in said, said
    return said


SAME_FILE = {
    "the input": ["--summary=in.txt"],
    "the input, by a link": ["--summary=link"],
    "the input, by another way": ["--summary=../{}/in.txt"],
    "the output": ["--output=o", "--summary=o"],
    "the settings": ["--output=o", "--summary=o.settings.json"],
    "output and input": ["--output=in.txt"],
    "settings and input": ["--output=n", "--input=n.settings.json"],
    "notes": ["--summary=notes.txt"],
    "the notes are an output": ["--output=notes.txt"],
    "a task": ["--config=pair.py", "--summary=pair.py"],
    "a vocabulary": ["--tokenizer=v", "--summary=v"],
}


@pytest.mark.parametrize("case", SAME_FILE)
def test_no_file_of_the_user_is_overwritten(case, flags, folder, capsys):
    (folder / "link").symlink_to("in.txt")
    (folder / "n.settings.json").write_text("the cat\n")
    (folder / "v").write_text("pieces")
    (folder / "pair.py").write_text("from speccascade_jax.config import load\nconfig = load('demo')\n")
    before = contents(folder)
    refused(
        capsys,
        "",
        "decode",
        "--input=in.txt",
        *flags,
        *(flag.format(folder.name) for flag in SAME_FILE[case]),
    )
    assert contents(folder) == before


def test_evaluate_overwrites_nothing(flags, folder, capsys):
    task_flags = [*flags, "--task=task.py", "--output=texts", "--methods", "verifier"]
    (folder / "texts").mkdir()
    before = contents(folder)
    for summary in ("data.jsonl", "texts/verifier.jsonl", "texts/verifier.jsonl.settings.json", "notes.txt"):
        refused(capsys, ("summary", summary), "evaluate", *task_flags, f"--summary={summary}")
    assert contents(folder) == before


@pytest.mark.parametrize("command", ["evaluate", "fewshot"])
def test_method_names_are_no_paths(command, flags, folder, capsys):
    (folder / "inside").mkdir()
    inside = contents(folder)
    command_flags = {
        "evaluate": ["--task=task.py", "--output=inside/texts"],
        "fewshot": ["--task=wmt", "--inputs=data.jsonl", "--shot-pool=data.jsonl", "--output=inside/out"],
    }
    refused(capsys, ("method", "../../x"), command, *flags, *command_flags[command], "--methods", "../../x")
    assert contents(folder) == inside


def test_only_files_are_outputs(flags, folder, capsys):
    os.mkfifo("fifo")
    for path in ("/dev/full", "/dev/null", "fifo", "/tmp"):
        for field in ("output", "summary"):
            refused(capsys, (field, path), "decode", "--input=in.txt", *flags, f"--{field}={path}")
    refused(capsys, ("output", "nowhere/out"), "decode", "--input=in.txt", *flags, "--output=nowhere/out")
    refused(capsys, "--output is a folder", "evaluate", *flags, "--task=task.py", "--output=notes.txt")
    assert not (folder / "nowhere").exists()


def test_one_output_has_one_writer(flags, folder, capsys):
    out = folder / "out.jsonl"
    with OutputFile(out):
        refused(capsys, ("output", str(out)), "decode", "--input=in.txt", *flags, f"--output={out}")
    assert call("decode", "--input=in.txt", *flags, f"--output={out}") == 0
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.full
def test_only_one_of_two_processes_writes_an_output(flags, folder):
    (folder / "many.txt").write_text("the cat sat on the mat\n" * 300)
    command = [sys.executable, SCRIPTS / "decode.py", *flags, "--input=many.txt", "--output=out.jsonl"]
    both = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert sum("is being written by another process" in words for words in said) == 1
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(300))


FULL = """
import resource, signal, sys
from speccascade_jax import commands
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
sys.exit(commands.main(["decode", *sys.argv[1:]]))
"""


@pytest.mark.full
def test_a_full_disk_is_named(flags, folder):
    """A limit on the size of files stops the second line in its middle."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, *flags, "--input=data.jsonl", "--output=out.jsonl"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "out.jsonl: File too large; files that were already saved are intact" in " ".join(
        done.stderr.split()
    )
    assert call("decode", *flags, "--input=data.jsonl", "--output=out.jsonl") == 0
    assert len((folder / "out.jsonl").read_text().splitlines()) == 6


BAD = {  # flags of decode, and what is said
    "limit 0": (["--limit=0"], ("limit", 0)),
    "limit -1": (["--limit=-1"], ("limit", -1)),
    "seed": (["--seed", 2**63], ("seed", 2**63)),
    "batch": (["--batch-size=0"], ("batch_size", 0)),
    "negative batch": (["--batch-size=-1"], ("batch_size", -1)),
    "endless batch": (["--batch-size", 10**30], ("batch_size", 10**30)),
    "devices": (["--tensor-parallel=0"], ("tensor_parallel", 0)),
    "nan": (["--alpha=nan", "--method=verifier"], ("alpha", float("nan"))),
    "temperature": (["--temperature=inf"], ("temperature", float("inf"))),
    "block size": (["--block-size", 10**30], ("block_size", 10**30)),
    "new tokens": (["--max-new-tokens", 10**30], ("max_new_tokens", 10**30)),
    "source tokens": (["--max-source-length", 2**31 - 1], ("max_source_length", 2**31 - 1)),
    "dtype": (["--dtype=float8"], ("dtype", "float8")),
    "too long a text": (["--max-source-length=1"], "input 0 has"),
    "no router": (["--method=router", "--router=fifo"], ("router", "fifo")),
    "an endless router": (["--method=router", "--router=/dev/zero"], ("router", "/dev/zero")),
    "somebody else's settings": (["--output=foreign.jsonl"], ("output", "foreign.jsonl")),
    "not UTF-8": (["--text=\udcff"], r"the argument '--text=\udcff' is not valid UTF-8"),
    "a path not UTF-8": (["--input=\udcff.txt"], "is not valid UTF-8"),
    "a flag not UTF-8": (["--\udcff=1"], "is not valid UTF-8"),
    "no text": (["--input=null.jsonl"], "null.jsonl, line 3: `source` is None"),
    "half a character": (["--input=half.jsonl"], "half.jsonl, line 1: `source` holds '\\ud800'"),
    "an endless input": (["--input=/dev/zero"], "it is a device"),
    "a folder": (["--input=."], "cannot read ."),
    "no config": (["--config=[/red]"], "no config '[/red]'"),
    "long config": (["--config", "x" * 100_000], "no config 'xxx"),
    "another kind": (["--config=demo_verifier"], "demo_verifier is a training run"),
    "an unknown flag": (["--[/red]=1"], "--[/red]"),
}


@pytest.mark.parametrize("case", BAD)
def test_it_is_one_sentence_before_anything_is_decoded(case, flags, folder, capsys):
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "null.jsonl").write_text("".join([*lines[:2], '{"source": null}\n', *lines]))
    (folder / "half.jsonl").write_text('{"source": "\\ud800"}\n')
    (folder / "foreign.jsonl.settings.json").write_text('{"theme": "dark"}')
    os.mkfifo("fifo")
    more, words = BAD[case]
    before = contents(folder)
    given = [] if any(str(flag).startswith(("--input", "--text")) for flag in more) else ["--input=in.txt"]
    begin = time.time()
    refused(capsys, words, "decode", *flags, "--output=out.jsonl", *given, *more)
    assert contents(folder) == before and time.time() - begin < 10


BAD_TASKS = {
    "empty": ("evaluate", ["--split=validation"], "empty.jsonl holds no examples"),
    "limit": ("evaluate", ["--limit=0"], ("limit", 0)),
    "negative limit": ("evaluate", ["--limit=-1"], ("limit", -1)),
    "join": ("evaluate", ["--join=0"], ("join", 0)),
    "negative join": ("evaluate", ["--join=-3"], ("join", -3)),
    "no methods": ("evaluate", ["--methods"], "--methods"),
    "split": ("evaluate", ["--split=dev"], ("split", "dev")),
    "no task": ("evaluate", ["--task=demo"], "demo is a pair to decode with, not a training run"),
    "alpha of one method": ("evaluate", ["--alpha=3", "--methods", "verifier", "token_v3"], ("alpha", 3.0)),
    "shots": ("fewshot", ["--shots=-1"], ("shots", -1)),
    "many shots": ("fewshot", ["--shots=7"], "has 6 examples, 7 are to be shown"),
    "nothing to ask": ("fewshot", ["--inputs=empty.jsonl"], "has no examples to ask"),
    "few-shot limit": ("fewshot", ["--limit=0"], ("limit", 0)),
    "no field": ("fewshot", ["--task=triviaqa"], "data.jsonl, line 1: `question` is None; it must be a text"),
    "a text for texts": (
        "fewshot",
        ["--task=triviaqa", "--shot-pool=text.jsonl"],
        "text.jsonl, line 1: `answers` is 'abc'; it must be a list of texts",
    ),
    "no answers": ("fewshot", ["--task=triviaqa", "--shot-pool=none.jsonl"], "`answers` is []; it must be"),
    "numbers": ("fewshot", ["--task=triviaqa", "--shot-pool=number.jsonl"], "`answers`, entry 2 is 3"),
    "no objects": ("fewshot", ["--shot-pool=list.jsonl"], "list.jsonl, line 1 is [1]"),
    "more than the authors": ("fewshot", ["--task=mbpp", "--execute-code", "--shots=4"], ""),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_tasks_are_checked_before_models_are_loaded(case, flags, folder, capsys, monkeypatch):
    for name, answers in (("text", "abc"), ("none", []), ("number", ["a", 3])):
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": "who", "answers": answers}) + "\n")
    (folder / "list.jsonl").write_text("[1]\n")
    command, more, words = BAD_TASKS[case]
    command_flags = {
        "evaluate": ["--task=task.py", "--output=texts"],
        "fewshot": ["--task=wmt", "--inputs=data.jsonl", "--shot-pool=data.jsonl", "--output=out"],
    }
    missing = ["--drafter=/nowhere", "--verifier=/nowhere"]  # a check that comes too late speaks of these
    assert "nowhere" not in refused(capsys, words, command, *flags, *missing, *command_flags[command], *more)
    assert not (folder / "out").exists() or not (folder / "out").read_bytes()


def test_a_broken_config_is_listed_as_broken(folder, capsys):
    (folder / "configs").mkdir()
    (folder / "configs" / "mine[red].py").write_text("raise SystemExit(3)")
    (folder / "configs" / "[bold]right.py").write_text(
        "'''Mine: [/] :smile:'''\nfrom speccascade_jax.config import load\nconfig = load('demo')\n"
    )
    (folder / "configs" / "bare.py").write_text(
        "from speccascade_jax.config import load\nconfig = load('demo')\n"
    )
    (folder / "configs" / "folder.py").mkdir()
    (folder / "configs" / os.fsdecode(b"caf\xe9.py")).write_text("config = 1")
    assert call("decode", "--list") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "│ mine[red] │ broken: configs/mine[red].py, line 1:",
        "│ [bold]right │ Mine: [/] :smile: │",
        "│ bare │",
        "│ demo │",
        "│ token_v3 │",
    ):
        assert words in shown
    refused(capsys, "configs/mine[red].py, line 1: SystemExit: 3.", "decode", "--config=mine[red]")


def test_texts_are_shown_as_they_are(flags, folder, capsys):
    text = "the [red]cat[/] :smile: [/nothing]"
    assert call("decode", *flags, "--text", text, "--max-source-length=80") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(text + "\n")


@pytest.mark.parametrize("command", commands.NAMES)
def test_help_needs_no_config(command, capsys):
    for flag in ("--help", "-h"):
        assert call(command, flag) == 0
        assert f"usage: speccascade {command}" in capsys.readouterr().out


def test_a_large_alpha_warns_of_nothing(flags, folder, recwarn):
    """In float32 it would be infinite."""
    assert call("decode", *flags, "--text=the cat", "--method=opt", "--alpha=1e300") == 0
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


@pytest.mark.full
def test_a_batch_may_be_larger_than_the_input(flags, folder):
    for size in (1, 100_000):
        assert call("decode", *flags, "--input=in.txt", f"--output={size}", f"--batch-size={size}") == 0
    assert (folder / "1").read_bytes() == (folder / "100000").read_bytes()


@pytest.mark.full
def test_an_interrupt_while_modules_load_is_quiet(folder):
    """From the start of the script on; before that, Python handles interrupts."""
    codes = []
    for delay in (0.05, 0.2, 0.3, 0.4, 0.6, 1.0, 1.6):
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
        )
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert not said or (said.startswith("interrupted") and said.count("\n") == 1), said
        # Once all is printed, Python itself is on its way out and takes the signal as it is.
        assert process.returncode in ((130,) if said else (0, -signal.SIGINT))
    assert 130 in codes


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
from speccascade_jax import commands
print("begun", flush=True)
sys.exit(commands.main(["decode", "--list"]))
"""


def test_an_interrupt_at_a_collection_of_garbage_is_not_lost():
    process = subprocess.run(
        [sys.executable, "-c", COLLECTING],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert (process.returncode, process.stderr) == (130, "interrupted.\n")


COLLECTING = """
import gc, signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)
from speccascade_jax import commands
def _xla_gc_callback(phase, _):
    if phase == "start":
        signal.raise_signal(signal.SIGINT)
def main(_):
    gc.callbacks.append(_xla_gc_callback)
    gc.collect()
    gc.callbacks.clear()
    time.sleep(30)
sys.modules["speccascade_jax.commands.plan"] = types.SimpleNamespace(main=main)
sys.exit(commands.main(["plan"]))
"""


@pytest.fixture
def few(flags, folder):
    lines = [{"question": f"who {n}", "answers": ["the cat"]} for n in range(6)]
    (folder / "few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [
        *flags,
        "--config=demo",
        "--task=triviaqa",
        "--inputs=few.jsonl",
        "--shot-pool=few.jsonl",
        "--shots=1",
        "--output=out.jsonl",
        "--temperature=1",
        "--max-source-length=80",
    ]


@pytest.mark.full
def test_fewshot_resumes_where_its_output_ends(few, folder, capsys):
    both = ["--methods", "token_v3", "drafter"]
    assert call("fewshot", *few, *both) == 0
    out, whole = folder / "out.jsonl", (folder / "out.jsonl").read_bytes()
    shown = capsys.readouterr().out
    assert len(whole.splitlines()) == 2 * (5 + 1)
    assert not list(folder.glob("*.part*"))
    for cut in (len(whole), len(whole) // 2 + 300, 0):
        out.write_bytes(whole[:cut])
        assert call("fewshot", *few, *both) == 0
        assert out.read_bytes() == whole
    figures = json.loads(whole.splitlines()[-1])
    assert f"{figures['acceptance_rate']:.3f}" in shown if figures["acceptance_rate"] else "exact" in shown
    refused(capsys, "has results of other settings", "fewshot", *few, *both, "--seed=3")
    assert out.read_bytes() == whole
    assert call("fewshot", *few, "--methods", "drafter", "verifier") == 0  # one more method
    assert out.read_bytes().startswith(whole) and len(out.read_bytes().splitlines()) == 3 * 6


def test_fewshot_refuses_damaged_lines(few, folder, capsys):
    assert call("fewshot", *few, "--methods", "drafter") == 0
    out, lines = folder / "out.jsonl", (folder / "out.jsonl").read_text().splitlines(keepends=True)
    for damaged in (
        [lines[1], *lines[1:]],
        [*lines, lines[0]],
        ["[]\n", *lines],
        lines[:-2] + lines[-1:],
        [*lines[:3], "{}\n"],
        [lines[0].replace('"answer"', '"answers"'), *lines[1:]],
    ):
        out.write_text("".join(damaged))
        refused(capsys, "out.jsonl, line ", "fewshot", *few, "--methods", "drafter")
        assert out.read_text() == "".join(damaged)


def test_fewshot_keeps_the_outputs_of_a_killed_method(few, folder, monkeypatch):
    """After an interrupt at two outputs, the next run decodes only the others."""
    from speccascade_jax.commands import fewshot
    from speccascade_jax.inference.text import Cascade

    real, asked = Cascade.generate, []

    def killed(self, texts, *arguments, **options):
        asked.append(len(texts))
        for n, output in enumerate(real(self, texts, *arguments, **options)):
            if len(asked) == 1 and n == 2:
                raise KeyboardInterrupt
            yield output

    monkeypatch.setattr(fewshot.Cascade, "generate", killed)
    assert call("fewshot", *few, "--methods", "verifier") == 130
    assert call("fewshot", *few, "--methods", "verifier") == 0 and asked == [5, 3]
    interrupted = (folder / "out.jsonl").read_bytes()
    (folder / "out.jsonl").unlink()
    assert call("fewshot", *few, "--methods", "verifier") == 0
    assert (folder / "out.jsonl").read_bytes() == interrupted


def test_a_summary_is_written_whole(flags, folder):
    for _ in range(2):  # one of before is replaced
        assert call("decode", *flags, "--input=in.txt", "--summary=summary.json") == 0
        assert json.loads((folder / "summary.json").read_text())["inputs"] == 2
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder / "texts")


@pytest.mark.parametrize(
    "command,flag,value",
    [("decode", "--block-size", "0"), ("decode", "--top-p", "2"), ("evaluate", "--seed", 2**70)],
)
def test_refusals_name_the_flag(command, flag, value, capsys):
    """On the command line; an HTTP error and a FieldError name the field."""
    assert call(command, f"{flag}={value}") == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} is ")
