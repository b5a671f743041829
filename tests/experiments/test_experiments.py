"""Every experiment from its settings to its tables and pictures, on decoders made by hand."""

import contextlib
import dataclasses
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import SENTENCES

from speccascade_jax.commands.commandline import console
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import (
    measurements,
    other_libraries,
    quality,
    reductions,
    turns,
    verifier_calls,
)
from speccascade_jax.evaluation.fewshot import Prompts
from speccascade_jax.evaluation.load import Reply
from speccascade_jax.evaluation.quality import METRICS, resamples
from speccascade_jax.evaluation.sweep import Latency, Quality
from speccascade_jax.experiments import findings, losses, prefixes, races, runs, sweeps
from speccascade_jax.experiments.findings import Bench
from speccascade_jax.experiments.table import EXPERIMENTS
from speccascade_jax.inference.text import Output

NAMES = list(EXPERIMENTS)
SWEEPS = [name for name in NAMES if isinstance(EXPERIMENTS[name].measurement, sweeps.Sweep)]
SMALL = {"inputs": 6, "timed": 8, "seeds": 2, "trials": 2, "choices": 2}
STEP = {"verifier": 1.0, "drafter": 0.1}  # seconds a token


def block_of(run):
    size = run.max_block_size if run.adaptive else run.block_size
    return size[-1] if isinstance(size, tuple) else size


def decoded(run, first, texts):
    """Every draft of a block is accepted, and a verifier call takes as long as a token."""
    outputs, seconds = [], 0.0
    for n, text in enumerate(texts, first):
        if run.name in STEP:
            tokens, counts = 24 + n % 5, {"model_passes": 24 + n % 5}
            seconds += tokens * STEP[run.name]
        else:
            rounds, block = 2 + n % 3, block_of(run)
            tokens, accepted = rounds * (block + 1), rounds * block
            histogram = [0] * block + [rounds]
            counts = {"rounds": rounds, "drafted": accepted, "accepted": accepted, "deferred": 0}
            counts |= {"emitted": tokens, "histogram": histogram}
            seconds += rounds
        outputs.append(Output(n, text, text, [5] * tokens, ["draft"] * tokens, counts))
    return seconds, outputs


def examples_of(task, path):
    split = "test" if path == task.test else "other"
    return [(f"{split} source {n}", ["a target"]) for n in range(300)]


def worth(point, sources, metric):
    """More leniently decoded texts are worse, and those of test splits; truncated ones are better."""
    share = {"verifier": 0.8, "drafter": 0.5}.get(point.name, 0.8 - 0.2 * point.alpha)
    share += 0.1 * bool(point.top_p) - 0.1 * sources[0].startswith("test")
    sums, count = METRICS[metric].sums, len(sources)
    rows = np.ones((count, sums)) * 10
    rows[:, : sums // 2] = np.round(share * 10 + np.arange(count)[:, None] % 2)
    rounds = 0 if point.name in STEP else round(100 / (2 + 3 * point.alpha))
    counts = {"rounds": rounds, "drafted": 5 * rounds, "accepted": 4 * rounds, "deferred": rounds}
    return Quality(rows, counts, 0.8, 100)


class PromptedByHand:
    """A cascade whose seconds are those of its prefix cache, and double the first time, when it compiles."""

    def __init__(self, run):
        self.seconds = 3.0 if run.prefix_cache_bytes else 12.0
        self.clock = SimpleNamespace(compilations=0)
        self.decoded = []

    def encode(self, texts):
        return [[1] * len(text) for text in texts], None

    def generate(self, texts, settings, **_):
        if not self.decoded:
            self.clock.compilations += 1
            CLOCK.now += self.seconds
        CLOCK.now += self.seconds
        self.decoded.append(len(texts))
        return [f"{settings.seed} {text}" for text in texts]


CLOCK = SimpleNamespace(now=0.0)


async def chats_by_hand(url, opening, questions, suffix, fields):
    """A turn takes 10 ms with the cache and 30 ms without it, and 1 ms more in the second chat. Of the last
    turn an answer differs."""
    assert (suffix, fields["temperature"]) == (" =", 1.0) and all(
        text.startswith("Q") for text in questions[0]
    )
    ms = {"with": 10, "without": 30}[url]
    return [
        [
            Reply(
                200,
                (turn * ms + (chat == 1)) / 1000,
                1.0,
                5,
                (event(url if (chat, turn) == (0, len(turns)) else "a"),),
            )
            for turn, _ in enumerate(turns, 1)
        ]
        for chat, turns in enumerate(questions)
    ]


def event(text):
    return json.dumps({"choices": [{"text": text}]}).encode()


@contextlib.contextmanager
def served_by_hand(config, rows, queue, *flags):
    STARTED.append(flags)
    yield SimpleNamespace(
        url="without" if "--prefix-cache-bytes=0" in flags else "with", until_ready=lambda: None
    )


STARTED = []


def prompts_by_hand(monkeypatch):
    def built(task, seed, limit=None):
        shown = "shown " * task.shots
        return Prompts([f"{shown}Q{n}" for n in range(limit or 300)], [], [], shown)

    STARTED.clear()
    monkeypatch.setattr(prefixes, "build_prompts", built)
    monkeypatch.setattr(prefixes, "Cascade", SimpleNamespace(from_config=PromptedByHand))
    monkeypatch.setattr(prefixes.time, "perf_counter", lambda: CLOCK.now)
    monkeypatch.setattr(prefixes, "served", served_by_hand)
    monkeypatch.setattr(prefixes, "conversations", chats_by_hand)


@pytest.fixture
def made_by_hand(monkeypatch):
    """No model is loaded, no data read, nothing decoded."""
    cascade = SimpleNamespace(
        encode=lambda texts, truncate: ([[1] * 75 for _ in texts], None),
        tokenizer=SimpleNamespace(decode=lambda tokens: "text"),
        checked=lambda point, changes: point,
        clock=SimpleNamespace(compilations=0, compile_seconds=0.0, decode_seconds=0.0),
    )
    for module in quality, reductions, turns:  # a few are enough here
        monkeypatch.setattr(module, "resamples", lambda count: resamples(count, samples=9))
    for module in findings, measurements:
        monkeypatch.setattr(module, "joined_examples", examples_of)
    monkeypatch.setattr(findings, "Cascade", SimpleNamespace(from_config=lambda run: cascade))
    monkeypatch.setattr(measurements.Measurements, "_padded_alike", lambda *_: cascade)
    monkeypatch.setattr(turns.Cascades, "of", lambda *_: cascade)
    monkeypatch.setattr(
        turns.Cascades, "decoder", lambda _, run: lambda first, texts: decoded(run, first, texts)
    )
    monkeypatch.setattr(
        verifier_calls,
        "ratios_along",
        lambda _, outputs, settings: verifier_calls.pad_ratios(
            [[1.0] * len(output.tokens) for output in outputs], 0, len(outputs)
        ),
    )
    monkeypatch.setattr(
        other_libraries, "decoders", lambda *_: {"another, verifier": lambda row: (50.0, [5] * 25)}
    )
    monkeypatch.setattr(losses.Losses, "train", lambda *_: None)
    prompts_by_hand(monkeypatch)
    monkeypatch.setattr(runs, "tokens_per_second", lambda flags, texts: 100.0 + 50 * ("speculative" in flags))
    monkeypatch.setattr(
        measurements,
        "measure_quality",
        lambda _, points, sources, references, metric, *__, **___: {
            point: worth(point, sources, metric) for point in points
        },
    )
    monkeypatch.setattr(
        measurements,
        "measure_latency",
        lambda _, points, sources, *__, **___: {
            point: Latency(np.ones(len(sources)) * STEP.get(point.name, 0.5), np.ones(len(sources)) * 20)
            for point in points
        },
    )


def run_experiment(name, folder, limits=SMALL):
    experiment = EXPERIMENTS[name].smaller(**limits)
    return experiment.measurement, experiment.measurement.measure(Bench(folder, console(quiet=True)))


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_finds_tables_and_pictures(name, made_by_hand, tmp_path):
    _, result = run_experiment(name, tmp_path)
    assert result.tables
    for key, table in result.tables.items():
        assert re.fullmatch(r"[\w-]+", key) and table["title"].endswith(".") and table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        assert not any("nan" in cell or "inf" in cell for row in table["rows"] for cell in row)
    for key, picture in result.pictures.items():
        picture.savefig(tmp_path / f"{key}.png")
        texts = " ".join(text.get_text() for text in picture.findobj(match=lambda a: hasattr(a, "get_text")))
        assert "block size" in texts.lower() and "gamma" not in texts.lower()


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_declared_as_a_record_keeps_them(name):
    experiment = EXPERIMENTS[name]
    assert experiment.name == name and re.fullmatch(r"[A-Z].*[a-z0-9]\.", experiment.summary)
    settings = dataclasses.asdict(experiment.measurement)
    assert json.loads(json.dumps(settings)).keys() == settings.keys()
    smaller = dataclasses.asdict(experiment.smaller(inputs=3, timed=2, choices=1).measurement)
    assert smaller["inputs"] == 3 if "inputs" in settings else smaller["timed"] == 2
    assert all(len(value) <= 1 for value in smaller.values() if isinstance(value, tuple))


@pytest.mark.parametrize("name", SWEEPS)
def test_the_points_of_a_sweep_can_be_decoded(name):
    """By the whole settings: methods, leniences and block sizes are in their ranges."""
    measurement = EXPERIMENTS[name].measurement
    points = measurement.points()
    assert {"verifier", "drafter", *measurement.methods} <= {point.name for point in points}
    assert {point.temperature for point in points} == {*measurement.temperatures}


TRADE_OFFS = [name for name in SWEEPS if isinstance(EXPERIMENTS[name].measurement, sweeps.TradeOff)]


@pytest.mark.parametrize("name", TRADE_OFFS)
def test_every_trade_off_has_its_rivals(name, made_by_hand, tmp_path):
    """The drafter alone in every panel, and the truncated verifier wherever it samples."""
    measurement, result = run_experiment(name, tmp_path)
    assert len(result.tables) == len(measurement.temperatures)
    for temperature, table in zip(measurement.temperatures, result.tables.values(), strict=True):
        rows = {(row[0], row[1].removesuffix(sweeps.WORSE)): row for row in table["rows"]}
        for top_p in {row[0] for row in table["rows"]}:
            assert {(top_p, "verifier alone"), (top_p, "drafter alone")} <= rows.keys()
        truncated = [decoder for _, decoder in rows if decoder.startswith("verifier alone, top-p")]
        assert bool(truncated) == (temperature > 0)


def test_a_rule_without_the_verifiers_quality_is_marked(made_by_hand, tmp_path):
    """Of the lenient points none is as good; lossless decoding counts with the verifier's own."""
    [table, *_] = run_experiment("trade-offs-translation", tmp_path)[1].tables.values()
    names = [row[1] for row in table["rows"]]
    assert "`lossy`" in names and "`speculative`" in names
    lenient = dataclasses.replace(EXPERIMENTS["trade-offs-translation"].measurement, alphas=(0.5,), inputs=6)
    table = next(iter(lenient.measure(Bench(tmp_path / "lenient", console(quiet=True))).tables.values()))
    assert f"`lossy`{sweeps.WORSE}" in [row[1] for row in table["rows"]]


def test_speeds_are_those_of_the_decoders(made_by_hand, tmp_path):
    """A call of block size b yields b + 1 tokens in the time of one: that many times as fast."""
    measurement, result = run_experiment("lossless-speeds", tmp_path, {**SMALL, "choices": None})
    for key, value in (("speeds", "{0:.2f} ({0:.2f} to {0:.2f})"), ("calls", "{0:.2f}")):
        table = result.tables[key]
        assert len(table["rows"]) == 2 * 2  # a row for each temperature and dtype
        for size in (size for size in measurement.block_sizes if isinstance(size, int)):
            column = table["columns"].index(f"block size {size}")
            assert {row[column] for row in table["rows"]} == {value.format(size + 1)}
    assert {row[4] for row in result.tables["speeds"]["rows"]} == {"10.0"}  # the drafter alone


@pytest.mark.parametrize("name, alone", [("lookup-quoting-long", []), ("lookup-e2e", ["drafter alone"])])
def test_a_race_is_between_its_runners_and_models(name, alone, made_by_hand, tmp_path):
    """Lookup is no model that could decode alone."""
    measurement, result = run_experiment(name, tmp_path, {**SMALL, "choices": None})
    [table] = result.tables.values()
    names = [*alone, *(runner.name for runner in measurement.runners)]
    assert [row[:2] for row in table["rows"]] == [[t, name] for t in ("0", "1") for name in names]
    drafters = [runner.run().drafter for runner in measurement.runners]
    if alone:
        assert set(drafters[1:3]) == {f"lookup+{drafters[0]}"} and set(drafters[3:]) == {"lookup"}
        both = "`e2e`, lookup beside it"
        assert names[1:5] == ["`e2e`", both, f"{both}, stored texts", "`e2e`, lookup"]
        assert names[6] == "`e2e`, lookup, stored texts"
    for row in table["rows"][len(alone) :: len(names)]:  # b + 1 times as fast, see above
        assert row[-1] == "{0:.2f} ({0:.2f} to {0:.2f})".format(int(row[2]) + 1)


def test_stored_texts_are_written_once_for_each_temperature(made_by_hand, tmp_path, monkeypatch):
    """Of other inputs than those that are timed; only the runners that search them do."""
    measurement, _ = run_experiment("lookup-e2e", tmp_path, {**SMALL, "choices": None})
    for temperature in measurement.temperatures:
        path = tmp_path / f"{measurement.key}-texts-{temperature:g}.jsonl"
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        assert len(texts) == 300 and all(text.startswith("other source") for text in texts)
        searched = [run.lookup_texts for run in measurement._decoders(temperature, str(path))]
        assert searched.count(str(path)) == sum(runner.stored for runner in measurement.runners) > 0
        assert set(searched) == {str(path), None}
    monkeypatch.setattr(races, "inputs_of", lambda *_: pytest.fail("written again"))
    measurement._stored(Bench(tmp_path, console(quiet=True)), 0.0)


def test_whole_runs_take_turns_and_are_not_repeated(made_by_hand, monkeypatch, tmp_path):
    """Every trial has one run of each decoder; the second measurement reads all of them."""
    calls = []

    def speed(flags, texts):
        calls.append([flags[flags.index(name) + 1] for name in ("--method", "--temperature")])
        return {"verifier": 100.0, "speculative": 150.0 + 10 * len(calls)}[calls[-1][0]]

    monkeypatch.setattr(runs, "tokens_per_second", speed)
    _, result = run_experiment("whole-runs", tmp_path)
    a_trial = [[method, t] for t in "01" for method in ("verifier", "speculative", "speculative")]
    assert calls == 2 * a_trial
    assert result.tables["runs"]["rows"] == [
        ["verifier", "", "", *("100 (100 to 100) tokens per second",) * 2],
        ["`speculative`", "0", "3", "2.00 (1.70 to 2.30)", "2.30 (2.00 to 2.60)"],
        ["`speculative`", "0", "5", "2.10 (1.80 to 2.40)", "2.40 (2.10 to 2.70)"],
    ]
    assert run_experiment("whole-runs", tmp_path)[1] == result and len(calls) == 12


def test_prompts_read_once_are_timed_without_compilation(made_by_hand, tmp_path):
    """And measured once: the second time, all is known."""
    measurement, result = run_experiment("prefixes-few-shot", tmp_path)
    shown = len("shown ") * measurement.shots
    [table] = result.tables.values()
    assert table["rows"] == [["3.0 (3.0 to 3.0)", "12.0 (12.0 to 12.0)", "4.00 (4.00 to 4.00)", "0"]]
    assert f"6 prompts of {shown + 2} to {shown + 2} tokens" in table["title"]
    assert f"({shown} tokens)" in table["title"]
    began = CLOCK.now
    assert run_experiment("prefixes-few-shot", tmp_path)[1] == result and CLOCK.now == began


def test_chats_take_turns_with_both_servers(made_by_hand, tmp_path):
    """The medians of eight chats, and how often an answer differs. Servers run only while they are needed."""
    measurement, result = run_experiment("prefixes-chats", tmp_path)
    [table] = result.tables.values()
    assert [row[:5] for row in table["rows"]] == [
        [str(shots), str(turn), f"{10 * turn}", f"{30 * turn}", "3.00 (3.00 to 3.00)"]
        for shots in measurement.shots
        for turn in range(1, 6)
    ]
    assert [row[5] for row in table["rows"]] == 2 * ["0", "0", "0", "0", f"{measurement.trials}"]
    assert [flags[-1] for flags in STARTED] == [f"--prefix-cache-bytes={size}" for size in prefixes.BYTES]
    assert run_experiment("prefixes-chats", tmp_path)[1] == result and len(STARTED) == 2


@pytest.mark.full
def test_the_speed_of_a_whole_run_is_that_of_its_summary(t5_pair):
    flags = [f"--{model}={t5_pair / model}" for model in ("drafter", "verifier")]
    flags += ["--tokenizer", str(t5_pair / "verifier" / "spiece.model"), "--max-new-tokens=8"]
    assert runs.tokens_per_second(flags, SENTENCES[:2]) > 0
    with pytest.raises(ValueError, match=r"decode\.py failed: .*--block-size is 0"):
        runs.tokens_per_second([*flags, "--block-size=0"], SENTENCES[:2])


def test_ways_of_verification_are_compared_at_their_best_block_size(made_by_hand, tmp_path):
    _, result = run_experiment("verification-times-demo", tmp_path, {**SMALL, "choices": None})
    rows = result.tables["times-demo"]["rows"]
    assert {cell for row in rows for cell in row[2:4]} == {"10.00 (10.00 to 10.00) at 9"}
    assert {row[4] for row in rows} == {"1.000 (1.000 to 1.000)"}


def test_expected_calls_are_those_of_the_decodings(made_by_hand, tmp_path):
    """Where every draft is accepted, and again from what has been measured."""
    for _ in range(2):
        measurement, result = run_experiment("verification-expected", tmp_path, {**SMALL, "choices": None})
        rows = result.tables["expected"]["rows"]
        assert len(rows) == 3 * 2 * len(measurement.block_sizes)
        assert {row[5] for row in rows} == {"1.000 (1.000 to 1.000)"}
        for row in rows:
            if row[2] == "8":
                assert row[3] == row[4] == "9.00"
        assert {tuple(row[2:]) for row in result.tables["counted"]["rows"]} == {("9.00", "9.00")}


def test_every_pair_of_leniences_around_the_marker_is_measured():
    measurement = EXPERIMENTS["spans"].measurement
    points = [p for p in measurement.points() if p.name == "opt" and p.temperature == 1]
    spans = {(p.alpha, p.alpha_after[measurement.marker]) for p in points}
    assert spans == {*itertools.product(measurement.alphas, measurement.alphas_after)}


def test_every_page_of_results_has_an_experiment_or_is_excused():
    """reference/report.md names the pages that no experiment makes."""
    docs = Path(__file__).parent.parent.parent / "docs"
    excused = re.findall(r"\(\.\./results/([\w-]+)\.md\)", (docs / "reference" / "report.md").read_text())
    pages = {page.stem for page in (docs / "results").glob("*.md")} - {"index"}
    records = {experiment.record for experiment in EXPERIMENTS.values()}
    assert pages <= records | {*excused} and not records & ({*excused} - {"index"})


def test_a_missing_requirement_is_reported_in_a_sentence(monkeypatch, tmp_path):
    run = DecodeConfig(drafter="runs/none", verifier="runs/none", task="demo_verifier", missing="Train it.")
    with pytest.raises(FieldError) as refused:
        findings.check_pair(run, "test")
    assert (refused.value.field, refused.value.value) == ("drafter", "runs/none")
    assert refused.value.remedy == "Train it."
    made = dataclasses.replace(run, drafter=str(tmp_path), verifier=str(tmp_path))
    task = dataclasses.replace(findings.task_of(run), test=str(tmp_path / "test.jsonl.gz"))
    monkeypatch.setattr(findings, "task_of", lambda _: task)
    with pytest.raises(FieldError) as refused:
        findings.check_pair(made, "test")
    assert (refused.value.field, refused.value.value) == ("task", task.test)
    task = dataclasses.replace(task, train=str(tmp_path / "train.jsonl.gz"))
    monkeypatch.setattr(races, "check_pair", lambda *_: None)
    monkeypatch.setattr(races, "task_of", lambda _: task)
    with pytest.raises(FieldError) as refused:  # inputs for stored texts
        EXPERIMENTS["lookup-e2e"].measurement.check()
    assert (refused.value.field, refused.value.value) == ("task", task.train)


def test_a_pick_is_checked_on_the_test_split(made_by_hand, tmp_path):
    """The most lenient point at the verifier's quality, which only alpha 0 reaches. Its figures on validation
    precede those on test."""
    measurement, result = run_experiment("picks-demo", tmp_path, {**SMALL, "choices": None})
    rows = result.tables["demo"]["rows"]
    assert [row[6] for row in rows][:2] == ["verifier alone", "drafter alone"]
    assert len(rows) == 3 * len(measurement.temperatures)
    for row in rows[2::3]:
        assert row[7] in ("", "0") and float(row[2]) > float(row[9])
    assert all(row[2:6] == [""] * 4 for n, row in enumerate(rows) if n % 3 < 2)


def test_a_rival_is_compared_at_no_more_calls(made_by_hand, tmp_path):
    measurement, result = run_experiment("learned-rule", tmp_path, {**SMALL, "choices": None, "inputs": 6})
    [table] = result.tables.values()
    assert len(table["rows"]) == (1 + 2) * len(measurement.alphas)  # one top-p at temperature 0
    for row in table["rows"]:
        assert row[5] == "-" or float(row[6]) <= 1.01 * float(row[4]) + 1e-3


def test_drafters_are_trained_once_from_one_start(monkeypatch, tmp_path):
    """From the drafter of the pair, with its verifier as teacher; those of a killed experiment again."""
    begun = []

    def trained(config, lessons, seeds, track):
        begun.append((config, lessons, list(seeds)))
        return None, dict.fromkeys(itertools.product(lessons, seeds))

    def saved(folder, model, params):
        if len(begun) == 1 and len(list(tmp_path.glob("*/"))) == 2:
            raise KeyboardInterrupt
        folder.mkdir(exist_ok=True)

    monkeypatch.setattr(losses, "train_side_by_side", trained)
    monkeypatch.setattr(losses.huggingface, "save", saved)
    measurement, bench = EXPERIMENTS["losses-e2e"].measurement, Bench(tmp_path, console(quiet=True))
    with pytest.raises(KeyboardInterrupt):
        measurement.train(bench)
    for _ in range(2):
        measurement.train(bench)
    with pytest.raises(ValueError, match="settings"):
        dataclasses.replace(measurement, steps=measurement.steps + 1).train(bench)
    first, second = begun
    assert first == second
    config, lessons, seeds = first
    run = findings.pair("e2e")
    assert (config.init, config.teacher, config.teacher_outputs) == (run.drafter, run.verifier, None)
    assert sorted(lessons) == sorted((d, *r) for d in measurement.divergences for r in measurement.rules)
    folders = {
        folder for _, decoder in measurement.decoders(bench) if (folder := decoder.drafter) != run.drafter
    }
    assert folders == {str(path) for path in tmp_path.iterdir() if path.is_dir()}
    assert len(folders) == len(lessons) * len(seeds)


def test_trainings_are_compared_by_their_sums(made_by_hand, monkeypatch, tmp_path):
    """Each drafter has its own number of tokens a call; ratios are those of the sums over trainings."""
    rates = {"kl-0": 2, "kl-1": 4, "tv-0": 3, "tv-1": 4}

    def counted(run, first, texts):
        rate = next((n for name, n in rates.items() if f"speculative-0-{name}" in run.drafter), 1)
        counts = {"rounds": 1, "drafted": 9, "accepted": rate - 1, "deferred": 0, "emitted": rate}
        counts["histogram"] = [0] * (rate - 1) + [1]
        outputs = [Output(n, text, text, [5] * rate, [], counts) for n, text in enumerate(texts, first)]
        return 0.0, outputs

    monkeypatch.setattr(
        turns.Cascades, "decoder", lambda _, run: lambda first, texts: counted(run, first, texts)
    )
    rows = run_experiment("losses-e2e", tmp_path)[1].tables["losses-e2e"]["rows"]
    assert [row[1:] for row in rows[:3]] == [
        ["before", "1.000", "0.333 (0.333 to 0.333)", "0.500, 0.250"],
        ["kl", "3.000", "", ""],
        ["tv", "3.500", "1.167 (1.167 to 1.167)", "1.500, 1.000"],
    ]
