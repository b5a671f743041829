"""Every command takes three models: --models, one value per level, and figures for each level."""

import dataclasses
import gzip
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from corpora import SENTENCES
from refusals import check_about, refusals
from rich.console import Console

from speccascade_jax import config as configs
from speccascade_jax.cluster import Job
from speccascade_jax.commands import benchmark, decode, evaluate, plan, tradeoff
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.inference.text import Cascade
from speccascade_jax.planning import costs, timing
from speccascade_jax.planning.prediction import Candidates, PlannedHierarchy
from speccascade_jax.planning.timing import FixedLogits, Timing
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def run(t5_pair, tmp_path_factory):
    """A config of three models with a task, as a file."""
    folder = tmp_path_factory.mktemp("hierarchy")
    texts = SENTENCES[:6]
    with gzip.open(folder / "split.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"source": text, "target": text}) + "\n" for text in texts)
    split = str(folder / "split.jsonl.gz")
    (folder / "task.py").write_text(
        "from speccascade_jax.config import Task, TrainConfig\n"
        "from speccascade_jax.models.t5 import T5Config\n"
        f"config = TrainConfig(name='x', output_dir='x', model=T5Config(), "
        f"task=Task(train={split!r}, validation={split!r}, test={split!r}))\n"
    )
    models = tuple(str(t5_pair / name) for name in ("drafter", "middle", "verifier"))
    (folder / "three.py").write_text(
        "from speccascade_jax.config import DecodeConfig\n"
        f"config = DecodeConfig(models={models!r}, block_size=(2, 3), max_source_length=48, "
        f"max_new_tokens=24, task={str(folder / 'task.py')!r}, examples=({SENTENCES[0]!r},))\n"
    )
    return folder / "three.py"


def test_decode(run, tmp_path, capsys):
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    assert (
        decode.main(
            [
                f"--config={run}",
                f"--output={out}",
                f"--summary={summary}",
                "--temperature",
                "1",
                "--method",
                "opt",
                "speculative",
                "--alpha",
                "0.1",
                "0.0",
                "--block-size",
                "3",
                "4",
            ]
        )
        == 0
    )
    [line] = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(line["level"]) == len(line["tokens"]) and set(line["level"]) <= {0, 1, 2}
    levels = json.loads(summary.read_text())["levels"]
    assert [sorted(level) for level in levels] == [["passes"], *[["accepted", "drafted", "passes"]] * 2]
    assert levels[2]["passes"] == line["counts"]["rounds"]
    assert "model 1" in capsys.readouterr().out
    before = out.read_bytes()
    assert decode.main([f"--config={run}", f"--output={out}"]) == 2  # those were other settings
    assert out.read_bytes() == before


@pytest.mark.full
def test_models_by_flag(run, t5_pair, capsys):
    pair = [str(t5_pair / name) for name in ("middle", "verifier")]
    assert decode.main([f"--config={run}", "--models", *pair, "--block-size", "2"]) == 0
    assert decode.main([f"--config={run}", "--models", pair[1], "--block-size", "2"]) == 0
    capsys.readouterr()
    assert decode.main([f"--config={run}", "--models", *pair]) == 2  # whose config has two block sizes
    assert "block_size has 2 values; 2 models have 1 verifiers" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_evaluate(run, tmp_path):
    summary = tmp_path / "summary.jsonl"
    assert (
        evaluate.main(
            [
                f"--config={run}",
                "--methods",
                "verifier",
                "speculative",
                "speculative+opt",
                f"--summary={summary}",
            ]
        )
        == 0
    )
    alone, lossless, mixed = [json.loads(line) for line in summary.read_text().splitlines()]
    assert alone["bleu"] == lossless["bleu"] and "levels" not in alone
    assert len(lossless["levels"]) == len(mixed["levels"]) == 3


@pytest.mark.full
def test_tradeoff(run, tmp_path):
    flags = [
        f"--config={run}",
        "--methods",
        "speculative",
        "opt",
        "--alphas",
        "0.1",
        "--temperatures",
        "0",
        "--timed",
        "2",
        "--trials",
        "1",
        f"--output={tmp_path}",
    ]
    assert tradeoff.main(flags) == 0
    again = (tmp_path / "table.txt").read_text()
    assert "(2, 3)" in again
    assert tradeoff.main(flags) == 0
    assert (tmp_path / "table.txt").read_text() == again


@pytest.mark.full
def test_benchmark(run, tmp_path, capsys):
    out = tmp_path / "figures.jsonl"
    assert (
        benchmark.main(
            [
                f"--config={run}",
                "--input",
                str(run.with_name("split.jsonl.gz")),
                "--min-tokens",
                "1",
                "--block-sizes",
                "2",
                f"--output={out}",
            ]
        )
        == 0
    )
    figures = [json.loads(line) for line in out.read_text().splitlines()]
    assert {f["of"].split(",")[1].strip() for f in figures if f["figure"] == "levels"} >= {"block size 2"}
    with refusals() as errors:
        assert benchmark.main([f"--config={run}"]) == 2
    check_about(errors[0], "config", run)


def test_the_fixed_time_of_a_text(monkeypatch):
    """Texts of 5 ms and of 2 ms more with the drafter, besides calls as counted and 3 ms a round, on
    a machine that has become twice as slow."""
    seconds = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 10, 11, 12, 13, 14, 15]]) / 1000
    counts = [{"drafter_passes": 9, "rounds": 2}, {"drafter_passes": 4, "rounds": 1}]
    outputs = [SimpleNamespace(counts=row_counts, tokens=[0] * 7) for row_counts in counts]
    alone = [SimpleNamespace(counts={"model_passes": 7}, tokens=[0] * 7) for _ in counts]
    calls = np.array([9 * 1 + 2 * 17, 4 * 1 + 1 * 17]) / 1000  # a scoring call reads 4 drafts and one more
    monkeypatch.setattr(plan, "of_models", lambda cascade, names, models: models)
    monkeypatch.setattr(
        plan,
        "in_turn_here",
        lambda contestants, *rest: {
            "small": (2 * calls + 0.007, outputs),
            "large": (np.full(2, 2 * 0.070 + 0.005), alone),
            plan.STEP: (np.full(2, contestants[plan.STEP](0, "a")[0]), []),
        },
    )
    rounds = np.array([[0, 0.003], [0, 0]])
    pace, fixed_seconds = plan.text_seconds(
        SimpleNamespace(drafter=None),
        ("small", "large"),
        seconds,
        rounds,
        Settings(),
        ["a", "b"],
        lambda index, text: (0.020, None),
        None,
    )
    assert pace == pytest.approx(2)
    np.testing.assert_allclose(fixed_seconds, [0.002, 0.005])


def test_the_fixed_time_of_a_round(t5_pair, monkeypatch):
    """Rounds of 4 drafts: 9 ms of models 0 and 1, 2 and 7 of those with the last; a negative one is none."""
    seconds = iter(
        [
            {"1": 0.005, "5": 0.006},
            {"1": 0.020, "5": 0.028, "with 0": 4 * 0.005 + 0.028 + 0.009},
            {
                "1": 0.030,
                "5": 0.030,
                "with 0": 4 * 0.005 + 0.030 + 0.002,
                "with 1": 4 * 0.020 + 0.030 + 0.007,
            },
            {"1": 0.040, "5": 0.040, "with 0": 0.061, "with 1": 0.0, "with 2": 4 * 0.030 + 0.045},
        ]
    )
    monkeypatch.setattr(costs, "_part", lambda *arguments: None)
    monkeypatch.setattr(
        costs,
        "time_parts",
        lambda parts, repetitions, job: {
            name: Timing(duration, duration, duration)
            for name, duration in next(seconds).items()
            if name in parts
        },
    )
    cascade = Cascade((FixedLogits(9),) * 4, (None,) * 4, Tokenizer(t5_pair / "verifier" / "spiece.model"))
    calls, besides = costs.call_seconds(cascade, (1, 5), Settings(method="opt"), source_length=8)
    np.testing.assert_allclose(1e3 * calls[:2], [[0, 5, 5.25, 5.5, 5.75, 6], [0, 20, 22, 24, 26, 28]])
    np.testing.assert_allclose(
        1e3 * besides,
        [  # 0 with 2 was not timed: as its neighbour
            [0, 9, 7, 1],
            [0, 0, 7, 0],
            [0, 0, 0, 5],
            [0, 0, 0, 0],
        ],
        atol=1e-9,
    )


def test_adaptive_blocks_are_planned_only_where_they_were_surely_faster(run, t5_pair, tmp_path):
    pair = PlannedHierarchy(("drafter", "verifier"), (4,), "need", 0.001, (1.0, 0.3))
    runs = plan.runs_of({plan.CHOSEN: pair, plan.PAIR: pair, plan.ALONE: pair}, Settings())
    assert plan.fastest(runs, {}) == plan.CHOSEN
    runs |= plan.adaptive_runs(pair, Settings(), 9)
    texts = np.random.default_rng(0).random(40) + 1

    def measured(seconds):
        return plan.Measured(seconds, seconds.sum(), (1.0, 1.0))

    slower = dict.fromkeys(runs, measured(2 * texts)) | dict.fromkeys(
        (plan.CHOSEN, plan.PAIR), measured(texts)
    )
    assert plan.fastest(runs, slower) == plan.CHOSEN
    noisy = texts * np.where(np.arange(40) % 2, 1.2, 0.75)  # on the whole faster, but not surely
    assert (
        noisy.sum() < texts.sum()
        and plan.fastest(runs, slower | {"adaptive, 0.06": measured(noisy)}) == plan.CHOSEN
    )
    faster = slower | {"adaptive, 0.12": measured(0.95 * texts), "adaptive, 0.06": measured(0.9 * texts)}
    name = plan.fastest(runs, faster)
    assert name == "adaptive, 0.06"
    assert plan.fastest(runs, faster | {plan.PAIR: measured(0.9 * texts)}) == plan.CHOSEN
    out, chosen = tmp_path / "planned.py", runs[name][1]
    plan.write_config(
        str(out),
        plan.Arguments(configs.load(run), str(run)),
        pair,
        {model: str(t5_pair / model) for model in pair.models},
        name,
        {field: getattr(chosen, field) for field in plan.BLOCKS},
    )
    written = configs.load(out)
    assert (written.block_size, written.max_block_size, written.stop_below) == ("adaptive", 9, 0.06)
    assert written.models == tuple(str(t5_pair / model) for model in pair.models)


def test_a_configs_sampler_is_timed_and_not_predicted(run, capsys):
    """It is timed next to the plans but never chosen, because its law is unknown."""
    names = ("drafter", "verifier")
    target = PlannedHierarchy(names[-1:], (), "need", 0.001, (1.0,))
    pair = PlannedHierarchy(names, (4,), "need", 0.0005, (1.0, 0.3))
    config = dataclasses.replace(
        configs.load(run), samplers={"last": lambda models: Autoregressive(models[-1])}
    )
    plans = {plan.CHOSEN: pair, plan.PAIR: pair, plan.ALONE: target}
    runs = plan.runs_of(plans, Settings())
    runs |= plan.sampler_runs(config, target, names)
    assert runs["last"][0].models == names and runs["last"][1].name == "last"
    times = {name: plan.Measured(np.ones(4), 0.1 if name == "last" else 1.0, (1.0, 1.0)) for name in runs}
    assert plan.fastest(runs, times) == plan.CHOSEN
    plan.show_runs(runs, plans, 1.0, times, Console(width=120))
    printed = capsys.readouterr().out.splitlines()
    first = {name: n for n, line in enumerate(printed) for name in runs if line.startswith(f"{name}  ")}
    last, alone = (
        [re.split(" {2,}", line.strip()) for line in printed[first[name] :][:2]]
        for name in ("last", plan.ALONE)
    )
    assert last[0][:3] == ["last", "drafter", "-"] and float(last[0][3]) == 100
    assert last[1][0] == "verifier" and last[0][5:] == ["-"]  # predicted
    assert alone[0][5:] == ["1.000"] and alone[1][-1] == "1.00"


def test_a_config_whose_method_is_a_lossless_rule_of_its_own_is_planned(run, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "import dataclasses\n\nfrom speccascade_jax.config import load\n"
        "from speccascade_jax.core.rules import METHODS\n\n"
        "mine, lenient = (dataclasses.replace(METHODS[name], name=own) "
        "for name, own in (('speculative', 'mine'), ('opt', 'lenient')))\n"
        f"config = dataclasses.replace(load({str(run)!r}), method=mine, samplers={{'lenient': lenient}})\n"
    )
    for flags in [], ["--method=mine"]:
        plan.check(plan.parse([f"--config={path}", *flags]))
    with pytest.raises(FieldError) as refused:
        plan.check(plan.parse([f"--config={path}", "--method=lenient"]))
    assert (refused.value.field, refused.value.value) == ("method", "lenient")


@pytest.mark.parametrize("width", [40, 80])
def test_tables_of_a_plan_are_whole_where_the_terminal_is_narrow(width, capsys):
    """No word or figure is truncated, and at 80 columns no name is broken."""
    names = ("dates_drafter", "middle", "dates_verifier")
    calls = np.outer([0.1, 11.5, 123.4], np.linspace(1, 1.4, 17)) / 1000
    squares = np.full((3, 3), 0.375)
    candidates = Candidates(names, calls, squares, (27,), np.full(3, 0.0123), squares / 1000)
    alone = PlannedHierarchy(names[-1:], (), "need", 0.1234, (1.0,))
    pair = PlannedHierarchy((names[0], names[-1]), (5,), "need", 0.0615, (1.0, 0.3))
    three = PlannedHierarchy(names, (2, 5), "need", 0.0567, (1.0, 0.3, 0.2))
    plans = {plan.CHOSEN: three, plan.PAIR: pair, plan.ALONE: alone}
    runs = plan.runs_of(plans, Settings())
    runs |= plan.adaptive_runs(pair, Settings(), 15)
    times = dict.fromkeys(runs, plan.Measured(np.ones(4), 0.0618, (1.52, 11.98)))
    screen = Console(width=width)
    plan.show_candidates(candidates, screen)
    plan.show_runs(runs, plans, 1.0, times, screen)
    printed = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    if width == 80:
        figures = (
            "172.76",
            "12.30",
            "0.375",
            "56.700",
            "61.500",
            "61.800",
            "1.52 to 11.98",
            "2.18",
            "up to 15",
        )
        assert [figure for figure in (*names, *figures) if figure not in printed] == []


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/dates_drafter/export", "runs/dates_verifier/export"], ["dates_drafter", "dates_verifier"]),
        (["runs/deep@2", "runs/deep@4", "runs/deep"], ["deep@2", "deep@4", "deep"]),
        (["hf://a/small", "b/small", "b/large"], ["hf://a/small", "b/small", "b/large"]),
        (["a/export"], ["export"]),
    ],
)
def test_names_of_models_are_short_and_distinct(paths, names):
    assert plan.short_names(paths) == dict(zip(names, paths, strict=True))


def test_a_plan_in_words():
    """A verifier alone is no hierarchy."""
    settings = Settings(method="speculative")
    alone, pair, three = (
        PlannedHierarchy(("a", "b", "c")[:count], (2, 5)[: count - 1], "need", 1.0, (1.0,))
        for count in (1, 2, 3)
    )
    assert plan.told(alone, settings) == "a alone"
    assert plan.told(pair, settings) == "a, b; block size 2"
    assert plan.told(three, settings) == "a, b, c; block sizes 2, 5"
    adaptive = plan.adaptive_runs(pair, settings, 9)["adaptive, 0.25"]
    assert plan.told(*adaptive) == "a, b; adaptive blocks of up to 9"


class First(Job):
    """The first of several processes."""

    def __init__(self):
        self.said = None

    def share(self, make):
        self.said = json.dumps(make())
        return json.loads(self.said)


class Other(Job):
    """Another process, which hears what the first one says."""

    number = 1

    def __init__(self, first):
        self.first_process = first

    def share(self, make):
        return json.loads(self.first_process.said)


def test_all_processes_follow_the_first_ones_plans(run):
    """Although another one has measured times by which it would plan otherwise."""

    def measured(seconds):
        calls = np.repeat(np.array(seconds)[:, None], 6, axis=1)
        return Candidates(("a", "b", "c"), calls, np.full((3, 3), 0.8))

    arguments = plan.Arguments(configs.load(run), max_block=3)
    here, there = measured([0.1, 3, 9]), measured([8, 1, 9])
    first = First()
    plans = plan.agreed_plans(first, here, arguments)
    assert plans == plan.chosen_plans(here, arguments)
    others = plan.agreed_plans(Other(first), there, arguments)

    def chains(plans):
        return {name: (each.models, each.block_sizes) for name, each in plans.items()}

    assert chains(others) == chains(plans) != chains(plan.chosen_plans(there, arguments))


def test_all_processes_repeat_a_part_as_often_as_the_first_one(monkeypatch):
    """Although another one has measured a much longer time. One repetition more or less, and a process would
    wait for another forever."""

    def repetitions(job, seconds):
        rounds = []
        monkeypatch.setattr(timing, "timed", lambda work: (work(), seconds)[1])

        def part(times, x):
            jax.debug.callback(lambda n: rounds.append(int(n)), times)
            return x

        timing.stopwatch((part, (np.zeros(1),)), job=job)()
        jax.effects_barrier()
        return rounds

    first = First()
    often = repetitions(first, timing.LONG_ENOUGH / 40)
    assert sorted(often) == [1, 1, 41]
    assert repetitions(Other(first), timing.LONG_ENOUGH / 8) == often


@pytest.mark.full
def test_plan(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # no cell of a table wraps
    out = tmp_path / "planned.py"
    flags = [f"--config={run}", "--limit", "3", "--max-block", "2", "--repetitions", "1"]
    assert plan.main([*flags, f"--output={out}", "--check"]) == 0
    printed = capsys.readouterr().out
    assert all(
        re.search(rf"(?m)(^|\s){re.escape(name)} ", printed)
        for name in (plan.CHOSEN, plan.PAIR, plan.ALONE, "middle", "adaptive, 0.25", "up to 2")
    )
    assert "fixed cost of a text" in " ".join(printed.split())
    planned = configs.load(out)
    assert planned.models[-1].endswith("verifier")
    cascade = Cascade.from_config(planned)
    [output] = cascade.generate(planned.examples, planned.settings)
    models = configs.load(run).models
    capsys.readouterr()
    for others in (models[:1], models[:2], models[::-1]):
        if others != planned.models:
            with refusals() as errors:
                assert decode.main([f"--config={out}", "--models", *others]) == 2
            check_about(errors[0], "models", others)
    three = Cascade.from_config(configs.load(run))
    assert output.tokens == next(iter(three.generate(planned.examples, method="verifier"))).tokens
    other = tmp_path / "other.py"
    other.write_text("config = 1\n")
    for field, value in (("output", other), ("max_block", 99), ("output", "plan.txt"), ("method", "opt")):
        with refusals() as errors:
            assert plan.main([*flags, f"--{field.replace('_', '-')}", str(value)]) == 2
        check_about(errors[0], field, value)
