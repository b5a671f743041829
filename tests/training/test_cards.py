"""Model cards, next to shipped and exported weights."""

import re

import pytest

from speccascade_jax.config import DEMO
from speccascade_jax.training import cards
from speccascade_jax.training.reporting import read_events

LICENCES = {"e2e": "cc-by-sa-4.0", "word_problems": "apache-2.0"}  # by what a folder's name begins with
FOLDERS = sorted(path.parent for path in DEMO.glob("*/metrics.jsonl"))
LOG = [
    {
        "event": "start",
        "step": 0,
        "parameters": 1234,
        "config": {
            "name": "mine",
            "steps": 20,
            "init": "hf://google/t5-small",
            "teacher": None,
            "task": {"train": "a.jsonl", "test": "b.jsonl", "prefix": "say: "},
        },
    },
    {"event": "evaluation", "step": 10, "loss": 1.25, "quality": 33.0, "metric": "bleu"},
    {"event": "evaluation", "step": 20, "loss": 1.5, "quality": None, "metric": "bleu"},
]


def header(text):
    """The hub's metadata, of which it reads what stands between the first two lines of dashes."""
    assert text.startswith("---\n")
    lines = text.split("---\n")[1].splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def test_a_card_has_the_facts_of_the_log():
    text = cards.card("mine", "t5", LOG)
    assert header(text) == {
        "library_name": "speccascade_jax",
        "license": "other",
        "base_model": "google/t5-small",
    }
    for known in (
        "1,234",
        "20 steps",
        "a.jsonl",
        "b.jsonl",
        "say: ",
        "| 10 | 1.2500 | 33.00 |",
        "| 20 | 1.5000 | - |",
    ):
        assert known in text
    assert "None" not in text


@pytest.mark.parametrize("events", [[], LOG[:1], [{"event": "start", "step": 0, "config": {}}]])
def test_a_sparse_log_makes_a_card(events):
    assert header(cards.card("mine", "t5", events))["library_name"] == "speccascade_jax"


def test_an_edited_card_is_kept(tmp_path):
    path = tmp_path / "README.md"
    assert cards.is_ours(path)
    path.write_text(cards.card("mine", "t5", LOG))
    assert cards.is_ours(path)
    path.write_text(path.read_text().replace(cards.WRITTEN, ""))
    assert not cards.is_ours(path)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_shipped_weights_have_a_card(folder):
    """With a licence, the data, and the metrics of the log next to it."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    licence = header(text)["license"]
    assert licence == next((LICENCES[name] for name in LICENCES if folder.name.startswith(name)), "cc-by-2.0")
    rows = re.findall(r"^\| [\d,]+ \|.*", text, re.MULTILINE)
    assert rows == [row for row in cards._table(read_events(folder / "metrics.jsonl")) if row[2:3].isdigit()]
    assert cards.kind_of(folder) in header(text)["library_name"] + text
