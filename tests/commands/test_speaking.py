"""Messages of commands: help, interruptions, and results that are not worth using."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from made_by_hand import result
from processes import SCRIPTS
from refusals import check_about
from rich.console import Console

from speccascade_jax import commands
from speccascade_jax import config as configs
from speccascade_jax.commands import evaluate, finetune, tradeoff
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.reductions import Time
from speccascade_jax.inference.text import Output
from speccascade_jax.tokenizers.tokenizer import train_tokenizer
from speccascade_jax.training.learned_rules import improves
from speccascade_jax.training.loop import save_every


def test_help_says_what_each_command_does_within_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    assert commands.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = " ".join(" ".join(lines).split())
    assert all(f"{name} {what}" in shown for name, what in commands.COMMANDS.items())
    assert max(map(len, lines)) <= 50


def helps(shown):
    """The help texts of the flags in what --help prints, without their defaults."""
    texts, name = {}, None
    for line in shown.splitlines():
        if not line.startswith("│ "):
            name = None
            continue
        text = line.strip("│ ")
        if line[2] != " ":  # a flag, or a sentence about the flags below
            flag, _, text = text.partition("  ")
            name = flag if re.match("-|[A-Z]+$|\\[\\[", flag) else None
        if name is not None:
            texts[name] = f"{texts.get(name, '')} {text.strip()}".strip()
    return {name: re.sub(r" ?\((default: .*|required)\)$", "", text) for name, text in texts.items()}


@pytest.mark.parametrize("command", commands.NAMES)
def test_help_is_made_of_whole_sentences_within_the_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        commands.main([command, "--help"])
    shown = capsys.readouterr().out
    texts = helps(shown)
    del texts["-h, --help"]
    assert texts and not [
        (name, text) for name, text in texts.items() if not re.match(r"[A-Z`0-9].*\.$", text, re.DOTALL)
    ]
    assert "scripts/" not in shown.partition("╭")[0] and f"speccascade {command} " in shown
    wide = [line for line in shown.splitlines() if len(line) > 80]
    assert not [line for line in wide if not line.startswith("usage: ")]


def test_training_configs_are_listed(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for flags, names in (
        (["finetune", "--list"], {"demo_verifier", "demo_router"}),
        (["decode", "--list"], {"demo", "demo_verifier", "demo_router"}),
    ):
        assert commands.main(flags) == 0
        cells = {line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if "│" in line}
        assert names <= cells and ("demo" in cells) == ("demo" in names)


STOPPED = """
import sys, time, types
from speccascade_jax import commands
from speccascade_jax.commands.commandline import exit_code
def work():
    print("begun", flush=True)
    time.sleep(60)
sys.modules["speccascade_jax.commands.decode"] = types.SimpleNamespace(
    main=lambda _: exit_code(work, "; the same command resumes"))
sys.exit(commands.main(["decode"]))
"""


def test_a_stopped_command_says_that_it_resumes():
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (143, "terminated; the same command resumes.\n")


def test_short_runs_are_saved_more_than_once():
    run = configs.load("e2e_verifier")
    saved = [save_every(dataclasses.replace(run, steps=n, save_every=200)) for n in (2, 100, 200, 201, 1000)]
    assert saved == [1, 25, 50, 200, 200]


def test_a_vocabulary_that_is_too_small_names_our_flag(tmp_path):
    with pytest.raises(FieldError) as refused:
        train_tokenizer(["".join(map(chr, range(200, 600)))] * 9, tmp_path / "spiece.model", 280)
    check_about(refused.value, "tokenizer_size", 280)
    assert "character_coverage" not in str(refused.value)


def test_evaluate_prints_a_difference_next_to_its_interval():
    def outputs(*texts):
        return [Output(0, "x", text, [], [], {}) for text in texts]

    references = [["a"], ["b"], ["c"], ["d"]]
    first, sums = evaluate.figures_of("exact_match", outputs("a", "x", "x", "x"), references, None)
    assert first["exact_match"] == 25 and "over the first" not in first
    second, _ = evaluate.figures_of("exact_match", outputs("a", "b", "x", "d"), references, sums)
    low, high = second["over the first, 95%"]
    assert low <= second["over the first"] == 50 <= high


@pytest.mark.parametrize("worse", [True, False])
def test_a_router_that_is_no_better_is_not_offered(worse, tmp_path, monkeypatch, capsys):
    run = configs.load("demo_router")
    output = str(tmp_path / "router.json")
    figures = {
        "gain from deferring half, network": 0.1,
        "gain from deferring half, opt": 0.2 if worse else 0.0,
    }

    def trained(run, _):
        return figures

    monkeypatch.setattr(finetune, "train_rule", trained)
    flags = [f"--output={output}", "--config=demo_router"]
    assert finetune.main(flags) == 0
    assert (f"--router {output}" in capsys.readouterr().out) is not worse
    if worse:
        assert finetune.main([*flags, "--ship"]) == 2
    assert run.pair == "demo" and improves(figures) is not worse
    assert improves({"loss, network": 0.2, "loss, mixture": 0.1}) is False


@pytest.mark.parametrize("high", [0.9, 1.1])
def test_tradeoff_says_when_nothing_is_faster_at_the_verifiers_quality(high):
    verifier, method = result("verifier", 0.0, 30.0, 1.0, 1), result("opt", 0.3, 31.0, 0.8)
    method = dataclasses.replace(method, time=Time(0.8, (0.7, high), 0.8))
    screen = Console(file=io.StringIO(), width=200)
    tradeoff.show_table_two([verifier, method], "bleu", screen)
    assert ("no method is significantly faster" in screen.file.getvalue()) == (high > 1)
