"""A thousand random command lines: each ends with exit code 0 or 2 and one sentence, quickly and in little
memory."""

import contextlib
import io
import json
import os
import resource
import shutil
import time

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from speccascade_jax import commands

pytestmark = pytest.mark.full
CALLS, SECONDS, GIGABYTES = 1000, 10, 2
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1000000",
    "100000000",
    str(2**63),
    str(-(2**63) - 1),
    "",
    "x",
    "None",
    "0x10",
    "\u0663",
    "[red]",
    "\udcff",
)
WRONG = ("0", "-1", "x", "")  # where a right number would run for minutes
WORDS = (
    "",
    "x",
    "../../x",
    "/",
    ".",
    "demo",
    "demo_verifier",
    "token_v3",
    "opt",
    "verifier",
    "sequence",
    "[/]",
    "[red]",
    "\udcff",
    "a\nb",
    "-",
    "--",
    "{",
    "\u202e",
    "None",
    "bleu",
    "float16",
    "test",
    "hf",
    "auto",
    "0",
    "gsm8k",
    "a,b,c",
    "1,2",
    "config.py",
)
PATHS = (
    "missing",
    "folder",
    "empty",
    "in.txt",
    "in.jsonl",
    "in.txt.gz",
    "/dev/full",
    "/dev/zero",
    "fifo",
    "",
    "-",
    "folder/new",
    "missing/new",
    "\udcff",
    "[red].txt",
    "pair/drafter",
    "pair/drafter/config.json",
)


def flags(values, names):
    return dict.fromkeys(names.split(), values)


DECODING = (
    flags(
        NUMBERS,
        "alpha block-size max-block-size stop-below temperature top-k top-p min-p top-n-sigma seed "
        "max-new-tokens batch-size max-source-length tensor-parallel limit acceptance round-cost "
        "relaxed-top-k prefix-cache-bytes",
    )
    | flags(WORDS, "method stop prefix suffix dtype config vocabulary hand-over verification alpha-after")
    | flags(PATHS, "drafter verifier tokenizer models router")
)
SCORING = DECODING | flags(WORDS, "task split methods") | flags(PATHS, "output") | flags(NUMBERS, "join")
FLAGS = {
    "decode": DECODING | flags(WORDS, "text cluster ray") | flags(PATHS, "input output summary"),
    "evaluate": SCORING | flags(WORDS, "cluster ray") | flags(PATHS, "summary"),
    "tradeoff": SCORING
    | flags(PATHS, "pick")
    | flags(WORDS, "truncations")
    | flags(NUMBERS, "alphas block-sizes temperatures top-ps timed trials at-quality at-latency"),
    "fewshot": DECODING
    | flags(WORDS, "task methods cluster")
    | flags(PATHS, "inputs shot-pool output")
    | flags(NUMBERS, "shots shot-seed"),
    "finetune": flags(WORDS, "config cluster dtype optimizer")
    | flags(WRONG, "steps batch-tokens")
    | flags(PATHS, "output-dir init teacher task.train")
    | flags(NUMBERS, "learning-rate task.join label-smoothing"),
    "benchmark": flags(WORDS, "config preset method tpu cluster")
    | flags(PATHS, "input output")
    | flags(WRONG, "tokens repetitions join limit min-tokens block-sizes batch-sizes dtype"),
    "convert": flags(WORDS, "to dtype"),
    "plan": DECODING
    | flags(PATHS, "input output")
    | flags(WORDS, "check cluster")
    | flags(WRONG, "limit")
    | flags(NUMBERS, "max-block most-models"),
    "serve": DECODING
    | flags(PATHS, "api-key-file also")
    | flags(WORDS, "host methods cors page cluster ray")
    | flags(NUMBERS, "rows max-queue rounds timeout max-body drain-seconds"),
    "load": flags(WORDS, "config") | flags(PATHS, "input output") | flags(NUMBERS, "rows clients minutes"),
}
CHEAP = {  # what would otherwise take minutes; a flag that is drawn comes later and wins
    "decode": ["--text=the cat"],
    "evaluate": ["--limit=2", "--task=task.py"],
    "tradeoff": [
        "--limit=2",
        "--task=task.py",
        "--timed=0",
        "--trials=1",
        "--methods=opt",
        "--alphas=0.1",
        "--output=swept",
        "--temperatures=0",
    ],
    "fewshot": ["--task=gsm8k", "--limit=2", "--inputs=in.jsonl", "--shot-pool=in.jsonl"],
    "finetune": ["--config=task.py", "--steps=0"],
    "benchmark": ["--repetitions=0"],
    "convert": [],
    "plan": ["--repetitions=0"],
    "serve": ["--port=-1"],
    "load": ["--requests=0"],
}
VALUES = (
    "None",
    "0",
    "-1",
    "1.5",
    "'x'",
    "[]",
    "()",
    "{}",
    "True",
    "float('nan')",
    "10**9",
    "2**63",
    "b'x'",
    "('a', 1)",
    "lambda: 0",
    "1/0",
    "open('missing')",
    "exit(3)",
    "object()",
    "'\\ud800'",
    "config",
)
FIELDS = (
    "drafter",
    "verifier",
    "method",
    "alpha",
    "block_size",
    "temperature",
    "top_k",
    "stop",
    "batch_size",
    "prefix",
    "task",
    "examples",
    "missing",
    "seed",
    "vocabulary",
    "models",
    "hand_over",
    "no_such_field",
)
LINES = (
    '{"source": "the cat"}',
    '{"source": null}',
    '{"source": 3}',
    '{"target": "x"}',
    "[]",
    "3",
    "{",
    "null",
    '{"source": "\\ud800"}',
    "[" * 100_000,
    "\ufeff{}",
    "the cat",
    "",
    "\x00",
    "a\tb",
    "\udcff",
    "x" * 10_000,
)
TASK = """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config
task = Task(train="tiny.jsonl", validation="tiny.jsonl", test="tiny.jsonl")
config = TrainConfig(name="tiny", output_dir="run", model=T5Config(), task=task)
"""


@st.composite
def calls(draw):
    """A command, its flags, and what is wrong with the files around it."""
    command = draw(st.sampled_from(sorted(FLAGS)))
    names = draw(st.lists(st.sampled_from(sorted(FLAGS[command])), min_size=0, max_size=4))
    flags = [f"--{name}={draw(st.sampled_from(FLAGS[command][name]))}" for name in names]
    if command == "convert":
        flags = [draw(st.sampled_from(PATHS)), draw(st.sampled_from(PATHS)), "--to=huggingface", *flags]
    wrong = st.tuples(st.sampled_from(FIELDS), st.sampled_from(VALUES))
    field = draw(st.one_of(st.just(("seed", "0")), wrong))
    lines = draw(st.one_of(st.just(LINES[:1]), st.lists(st.sampled_from(LINES), max_size=4)))
    kinds = st.sampled_from((*["none"] * 6, "json", "cut", "flip", "gone"))
    damage = draw(kinds), draw(st.integers(0, 10**6))
    return command, flags, field, lines, damage


def prepare(folder, pair, field, lines, damage):
    """The working directory of one call."""
    shutil.copytree(pair, folder / "pair")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    os.mkfifo(folder / "fifo")
    data = "\n".join(lines).encode("utf-8", "surrogateescape")
    for name in ("in.txt", "in.jsonl", "in.txt.gz", "[red].txt"):
        (folder / name).write_bytes(data)
    (folder / "tiny.jsonl").write_text('{"source": "the cat", "target": "a dog"}\n' * 4)
    (folder / "task.py").write_text(TASK)
    (folder / "config.py").write_text(
        "from speccascade_jax.config import DecodeConfig\n"
        "config = DecodeConfig(**{'drafter': 'pair/drafter', "
        f"'verifier': 'pair/verifier', **{{{field[0]!r}: {field[1]}}}}})\n"
    )
    kind, place = damage
    files = sorted(path for path in (folder / "pair").rglob("*") if path.is_file())
    path = files[place % len(files)]
    raw = bytearray(path.read_bytes())
    if kind == "json":
        path = folder / "pair" / "drafter" / "config.json"
        config = json.loads(path.read_text())
        name = sorted(config)[place % len(config)]
        config[name] = [None, 0, -1, "x", [], {}, 1e308, 10**9, True][place % 9]
        path.write_text(json.dumps(config))
    elif kind == "cut":
        path.write_bytes(raw[: place % (len(raw) + 1)])
    elif kind == "flip" and raw:
        raw[place % len(raw)] ^= 255
        path.write_bytes(raw)
    elif kind == "gone":
        path.unlink()


def called(command, flags):
    """Exit code, standard output and error of a command, and the seconds of processor time it took."""
    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = commands.main([command, *flags])
        except SystemExit as stopped:  # of the flags' parser
            code = stopped.code
    return code, out.getvalue(), err.getvalue(), time.process_time() - began


@pytest.fixture(scope="module")
def pair(t5_pair, tmp_path_factory):
    """The tiny pair's folders, and a first decoding: libraries are loaded, programs compiled."""
    assert (
        commands.main(
            [
                "decode",
                f"--drafter={t5_pair / 'drafter'}",
                f"--verifier={t5_pair / 'verifier'}",
                "--text=the cat",
            ]
        )
        == 0
    )
    return t5_pair


@pytest.mark.parametrize("part", range(4))  # so that several processes share them
def test_no_call_ends_in_a_traceback(part, pair, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    count, codes = 0, set()

    @seed(part)
    @settings(
        max_examples=CALLS // 4,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls())
    def run_call(call):
        nonlocal count
        count += 1
        command, flags, field, lines, damage = call
        folder = tmp_path / str(count)
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        prepare(folder, pair, field, lines, damage)
        config_flags = [] if command in ("convert", "finetune", "load") else ["--config=config.py"]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        code, out, err, seconds = called(command, [*CHEAP[command], *config_flags, *flags])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
        said = f"{command} {flags} {field} {damage}: {code}, {seconds:.1f} s\n{out[-500:]}\n{err}"
        assert code in (0, 2), said
        codes.add((command, code))
        assert "Traceback" not in out + err, said
        if code == 2 and "error: " in err:
            assert len(err.strip().splitlines()) == 1, said
        assert code == 0 or err.strip(), said
        assert seconds < SECONDS and grown < GIGABYTES, said
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)

    run_call()
    assert count >= CALLS // 4
    assert {code for _, code in codes} == {0, 2}  # what is right is done, what is wrong refused
