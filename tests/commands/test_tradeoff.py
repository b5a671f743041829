"""scripts/tradeoff.py on a tiny pair: a sweep, its pick, and arguments refused before a model is loaded."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from made_by_hand import FOUND, result
from refusals import check_about, refusals

from speccascade_jax import config as configs
from speccascade_jax.commands import decode, tradeoff
from speccascade_jax.commands.commandline import console
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.dtypes import automatic_dtype

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "birds", "sing", "in", "old", "tree", "why", "not"]
TASK = """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

data = {data!r}
task = Task(train=data, validation=data, test={test!r}, metric={metric!r}, max_source_length=32,
            max_target_length=24)
config = TrainConfig(name="tiny", output_dir="", model=T5Config(), task=task)
"""


@pytest.fixture(scope="module")
def tiny(t5_pair, tmp_path_factory):
    """Flags of a tiny pair and a task of 12 examples, one or two references each."""
    folder, rng = tmp_path_factory.mktemp("task"), np.random.default_rng(0)

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(1, 7)))

    lines = [
        {"source": f"{text()} {n}", "target": text(), "targets": [text() for _ in range(1 + n % 2)]}
        for n in range(12)
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "bad.jsonl").write_text(json.dumps({"source": "a", "target": ""}) + "\n")
    (folder / "empty.jsonl").write_text("")
    for name, test, metric in (
        ("task", "data", "bleu"),
        ("blue", "data", "blue"),
        ("no_test", "none", "bleu"),
        ("bad_test", "bad", "bleu"),
        ("empty_test", "empty", "bleu"),
    ):
        (folder / f"{name}.py").write_text(
            TASK.format(data=str(data), test=str(folder / f"{test}.jsonl"), metric=metric)
        )
    return folder, [
        f"--drafter={t5_pair / 'drafter'}",
        f"--verifier={t5_pair / 'verifier'}",
        "--max-source-length=32",
        "--max-new-tokens=24",
        "--temperatures",
        "1",
        "--block-sizes",
        "2",
    ]


@pytest.fixture(scope="module")
def sweep(tiny, tmp_path_factory):
    """Flags of a finished sweep, with a pick, and where they lie."""
    folder, shared = tiny
    at = tmp_path_factory.mktemp("sweep")
    flags = [
        *shared,
        f"--task={folder / 'task'}.py",
        f"--output={at / 'sweep'}",
        "--methods",
        "token_v3",
        "token_cascade",
        "--alphas",
        "0.3",
        "0.8",
        "--timed",
        "2",
        "--trials",
        "1",
        "--batch-size",
        "6",
        "--truncations",
        f"--pick={at / 'picked.py'}",
    ]
    assert tradeoff.main([*flags, "--at-latency=1000"]) == 0
    return at, flags


@pytest.mark.full
def test_a_sweep_picks_a_config_that_decodes(sweep, capsys):
    at, _ = sweep
    for name in ("latency", "rejected", "deferred", "calls"):
        assert (at / "sweep" / f"quality_{name}.png").is_file()
    picked = configs.load(str(at / "picked.py"))
    assert picked.method in ("token_v3", "token_cascade") and picked.alpha in (0.3, 0.8)
    assert picked.temperature == 1 and picked.max_new_tokens == 24 and picked.batch_size == 1
    assert list(at.glob("sweep/test-*/latency.jsonl"))  # the promise was checked on the test split
    assert decode.main([f"--config={at / 'picked.py'}", "--text", "the cat"]) == 0


@pytest.mark.full
def test_a_sweep_resumes_where_it_ends(sweep, tmp_path, capsys, monkeypatch):
    at, flags = sweep
    shutil.copytree(at, tmp_path / "again")
    flags = [flag.replace(str(at), str(tmp_path / "again")) for flag in flags]
    assert tradeoff.main([*flags, "--at-quality=-1", "--no-check"]) == 0
    shown = capsys.readouterr().out
    for said in (
        "quality: 6 points of 4 methods and block sizes; 0 programs compiled",
        "all points:",
        "temperature 1: fastest at the verifier's bleu",
        "temperature 1: best within",
        "picked for",
        "The drafter alone:",
    ):
        assert said in shown
    with refusals() as errors:
        assert tradeoff.main([*flags, "--at-quality=101"]) == 2
    check_about(errors[0], "at_quality", "101")
    # Another pick may take the place of one that this command wrote, nothing else's.
    (tmp_path / "again" / "picked.py").write_text("config = 3\n")
    assert tradeoff.main([*flags, "--at-quality=-1"]) == 2
    assert (tmp_path / "again" / "picked.py").read_text() == "config = 3\n"
    with monkeypatch.context() as elsewhere:  # a machine where auto means another dtype
        elsewhere.setenv("SPECCASCADE_DTYPE", "bfloat16" if automatic_dtype() == "float32" else "float32")
        assert tradeoff.main(flags) == 2
    assert "(see dtype in " in capsys.readouterr().err
    line = (tmp_path / "again" / "sweep" / "latency.jsonl").open("a")
    line.write("{}\n")
    line.close()
    assert tradeoff.main(flags) == 2
    assert "latency.jsonl, line 3: no measurement of this sweep" in capsys.readouterr().err


def test_a_lossless_pick_promises_the_verifiers_distribution(tmp_path, capsys):
    """Not the quality of one sample."""
    asked = tradeoff.parse(
        ["--config=demo", f"--output={tmp_path}", "--at-quality=verifier", f"--pick={tmp_path / 'picked.py'}"]
    )
    lossless = dataclasses.replace(result("speculative", 0.0, 28.0, 0.5), verifier_quality=30.0)
    tradeoff.pick(asked, "bleu", [*FOUND, lossless], None, console())
    said = " ".join(capsys.readouterr().out.split())
    assert "block size 5, temperature 1: the verifier's own distribution (bleu 30.00)" in said
    assert "The drafter alone: 20.00 (the pick differs from it by +6.00 to +10.00), in 0.10" in said
    assert configs.load(str(tmp_path / "picked.py")).method == "speculative"


def test_a_pick_has_the_marker_and_the_way_to_verify(tmp_path, capsys):
    """Of its point, whatever the config says."""
    asked = tradeoff.parse(
        ["--config=demo", f"--output={tmp_path}", "--at-quality=1", f"--pick={tmp_path / 'picked.py'}"]
    )
    chosen = result("opt", 0.3, 28.0, 0.5)
    point = dataclasses.replace(chosen.point, alpha_after={"?": 0.0}, verification="block")
    results = [*FOUND[:2], dataclasses.replace(chosen, point=point)]
    tradeoff.pick(asked, "bleu", results, None, console())
    picked = configs.load(str(tmp_path / "picked.py"))
    assert (picked.method, picked.alpha_after, picked.verification) == ("opt", {"?": 0.0}, "block")
    assert picked.settings == dataclasses.replace(
        picked.settings, **{n: getattr(point, n) for n in tradeoff.POINT}
    )


def before_work(monkeypatch):
    def fail(*_, **__):
        pytest.fail("models were loaded")

    monkeypatch.setattr(Cascade, "load", fail)


BAD = [
    (["--at-quality=good"], "at_quality", "good"),
    (["--at-quality=nan"], "at_quality", "nan"),
    (["--at-quality=inf"], "at_quality", "inf"),
    (["--at-quality="], "at_quality", ""),
    (["--at-quality=1", "--at-latency=1"], "at_latency", 1.0),
    (["--at-latency=nan"], "at_latency", float("nan")),
    (["--at-latency=0"], "at_latency", 0.0),
    (["--at-latency=1", "--timed=0"], "timed", 0),
    (["--methods", "tokenv3"], "methods", "tokenv3"),
    (["--methods", "../../x"], "methods", "../../x"),
    (["--methods", "opt", "opt"], "methods", "opt"),
    (["--methods"], "methods", ()),
    (["--alphas"], "alphas", ()),
    (["--alphas", "nan"], "alphas", float("nan")),
    (["--alphas", "0.5", "2"], "alphas", 2.0),
    (["--alphas=-1"], "alphas", -1.0),
    (["--alphas-after", "0.5"], "alphas_after", (0.5,)),
    (["--alpha-after", "the", "0", "--alphas-after", "-1"], "alphas_after", -1.0),
    (["--verifications"], "verifications", ()),
    (["--block-sizes", "0"], "block_sizes", 0),
    (["--block-sizes=-1"], "block_sizes", -1),
    (["--block-sizes"], "block_sizes", ()),
    (["--temperatures=-1"], "temperature", -1.0),
    (["--temperatures", "nan"], "temperature", float("nan")),
    (["--top-ps", "0"], "top_p", 0.0),
    (["--trials=0"], "trials", 0),
    (["--trials=-2"], "trials", -2),
    (["--timed=-1"], "timed", -1),
    (["--limit=0"], "limit", 0),
    (["--limit=-1"], "limit", -1),
    (["--join=0"], "join", 0),
    (["--join=-3"], "join", -3),
    (["--batch-size=0"], "batch_size", 0),
    (["--split=dev"], "split", "dev"),
    (["--top-k=0"], "top_k", 0),
    (["--trials=1000000000"], "trials", 10**9),
    (["--block-sizes", "1000000"], "block_sizes", 1000000),
]


@pytest.mark.parametrize("more,field,value", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_flags_are_one_sentence(tiny, tmp_path, capsys, monkeypatch, more, field, value):
    folder, shared = tiny
    before_work(monkeypatch)
    with refusals() as errors:
        assert (
            tradeoff.main(
                [
                    *shared,
                    f"--task={folder / 'task'}.py",
                    f"--output={tmp_path / 'sweep'}",
                    "--methods",
                    "token_v3",
                    *more,
                ]
            )
            == 2
        )
    check_about(errors[0], field, value)
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "task,about",
    [
        ("blue", ("metric", "blue")),
        ("no_test", "none.jsonl"),
        ("bad_test", ("references", [""])),
        ("empty_test", "empty.jsonl"),
    ],
)
def test_a_task_that_cannot_be_scored_is_refused_first(tiny, tmp_path, monkeypatch, task, about):
    """Also the test split, if a pick is checked on it. about: the field and the value, or words of an error
    that has no field."""
    folder, shared = tiny
    before_work(monkeypatch)
    flags = [f"--task={folder / task}.py", f"--output={tmp_path / 'sweep'}", "--methods", "token_v3"]
    with refusals() as errors:
        assert tradeoff.main([*shared, *flags, "--at-latency=1", f"--pick={tmp_path / 'p.py'}"]) == 2
    if isinstance(about, tuple):
        check_about(errors[0], *about)
    else:
        assert about in str(errors[0])


def test_an_invalid_pick_is_refused_before_the_sweep(tiny, tmp_path, capsys, monkeypatch):
    folder, shared = tiny
    before_work(monkeypatch)
    (tmp_path / "mine.py").write_text("config = 3\n")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "demo.py").write_text("from speccascade_jax.config import load\n\nconfig = load('demo')\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "demo.py")
    for pick in ("mine.py", "folder.py", "demo.py", "link.py", "picked.txt", "sweep.py", "nowhere/p.py"):
        with refusals() as errors:
            code = tradeoff.main(
                [
                    f"--config={tmp_path / 'demo.py'}",
                    *shared,
                    f"--task={folder / 'task'}.py",
                    f"--output={tmp_path / 'sweep.py'}",
                    "--methods",
                    "token_v3",
                    "--at-latency=1",
                    f"--pick={tmp_path / pick}",
                ]
            )
        assert code == 2
        check_about(errors[0], "pick", tmp_path / pick)
    assert (tmp_path / "mine.py").read_text() == "config = 3\n"


@pytest.mark.parametrize("output", ["file", "file/sweep", "/dev/null", "/proc/sweep"])
def test_an_output_that_is_not_a_folder_is_refused(tiny, tmp_path, monkeypatch, output):
    folder, shared = tiny
    before_work(monkeypatch)
    (tmp_path / "file").write_text("mine")
    flags = [f"--task={folder / 'task'}.py", f"--output={tmp_path / output}", "--methods", "token_v3"]
    with refusals() as errors:
        assert tradeoff.main([*shared, *flags]) == 2
    check_about(errors[0], "output", tmp_path / output)
    assert (tmp_path / "file").read_text() == "mine"
