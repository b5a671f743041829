"""Every figure in the prose of guide, reference and results stands in the page's record or in one that the
page links to, or is excused with a reason.

Definitions have numbers, too: names of models, sizes, defaults. NAMES removes numbers in names, and EXCUSED
lists by page the numbers that no experiment gave. All others must be in the record of a results page to which
this page links. Tables of results are drawn from their records: test_results.py.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from speccascade_jax.evaluation.records import PLACE

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(page for folder in ("guide", "reference", "results") for page in (DOCS / folder).glob("*.md"))
NUMBER = re.compile(r"(?<![\w.,])[+-]?\d+(?:,\d{3})*(?:\.\d+)?%?(?![\w]|[.,]\d)")

NO_PROSE = re.compile(
    r"```.*?```"  # code, and what a command prints
    r"|\$\$.*?\$\$|\$[^$\n]+(?:\n[^$\n]+)?\$"  # formulas
    r"|`[^`]+`"  # code in a line
    r"|<img[^>]*>|!\[[^\]]*\]\([^)]*\)(?:\{[^}]*\})?"  # pictures
    r"|\]\([^)]*\)"  # where a link leads
    r"|^ *\d+\. ",  # an item's number
    re.DOTALL | re.MULTILINE,
)
NAMES = re.compile(
    r"arXiv \d{4}\.\d{5}|\b(?:ICML|ICLR|EMNLP|NeurIPS) \d{4}|\(?\b[A-Z][\w-]+(?: et al\.)?,? (?:19|20)\d\d\b"
    r"|(?:Algorithm|Table|Lemmas?|Remark|Figure|equation|appendix|App\.|Section|version|Python|eq\.)"
    r" [A-Z]?[\d.]+(?: and \d+)?"
    r"|(?:Llama|Qwen|Gemma|T5|Mistral|EAGLE|transformers|HTTP)"
    r"[ -]v?\d[\d.]*[bBM]?(?:(?:,| and| or|:|/) \d[\d.]*[bBM]?)*"
    r"|\d+(?:\.\d+)?[bB] \+ \d+(?:\.\d+)?[bB]|UTF-8|Latin-1|Apache License \d\.\d|CC BY(?:-SA)? \d\.\d|0x\w+"
    r"|top-p 0\.\d+|top-k \d+|alpha \d(?:\.\d+)?|temperatures? \d(?:\.\d+)?|block sizes? \d+"
    r"|batch(?: size)? \d+"
)
"""What a number belongs to: the name of a thing, or the setting that a sentence is about."""

EVERYWHERE = {
    "a count, an id or an end of a range": "0 1 2",
    "the level of every interval": "95%",
    "HTTP's answers": "200 413 429 500 503 504",
}
"""What no experiment gives, whatever the page: a reason and the numbers."""
EXCUSED = {
    "guide/choose-a-rule.md": {"leniences to begin with": "0.1 0.5"},
    "guide/extend.md": {"about how long the first text takes, which compiles": "15"},
    "guide/first-texts.md": {"about how long the first run takes, which compiles": "20"},
    "guide/install.md": {"about how long the first run takes, which compiles": "20"},
    "guide/large-models.md": {
        "parameters times two bytes": "17.6 30.7 18.5 17.2 16.9 24.1 56.0 9.4 62.3 259.7 51.9 14.9 "
        "17.3 16.7 13.5",
        "devices that these fit, and their memory": "4 8 16 80 95",
        "cores of a slice, bits of a checksum": "32",
        "an exit code; a bound that a test holds; seconds, of cluster.py": "75 1.2 50",
    },
    "guide/published-models.md": {"parameters times four bytes, or two": "3.4 0.8"},
    "guide/serve.md": {"the load that load.py offers": "120%"},
    "guide/tpus.md": {"what the example supposes": "30"},
    "guide/your-own-task.md": {
        "the data that the page makes": "20000 19000",
        "what `new` chooses, of training/new_task.py": "5% 500 512 2048 128 64 192 4 5 30000 80000",
        "and for how many steps": "2400 4500 6000 10000 60",
        "a port": "8000",
        "its seconds, in minutes": "6 3.5 15",
        "what the shipped pairs learned from, of speccascade_jax/demo/README.md": "42000 126600",
        "and for how many minutes": "10 25 84 70",
    },
    "reference/checkpoints.md": {
        "bits of a checksum, and a version": "32 4.57 5",
        "the tolerance of a test": "4",
        "Mistral's window": "4096",
    },
    "reference/decoding.md": {
        "rows of the law tests": "200000",
        "useful leniences of BiLD, and its cap": "10",
        "the algorithm, a step of it, and the most markers": "4",
        "a corollary": "6",
        "sizes and defaults": "12 16 24 32 0.25",
        "IEEE bfloat16": "1.0025 0.8%",
    },
    "reference/design.md": {
        "rows and the bound of the law tests": "200000 4",
        "the year from which seconds are counted": "1970",
    },
    "reference/evaluation.md": {
        "the scale of metrics": "100",
        "the values of a sweep, of TRUNCATIONS": "16 4 0.9 0.7 0.5 0.3 0.05 0.15 0.4 26",
    },
    "reference/few-shot.md": {"questions scored in a comparison with the official script": "6078"},
    "reference/hierarchies.md": {
        "centroids of published assistants": "32 2048",
        "what a simulation has, and promises": "128 4000 99 100",
    },
    "reference/serving.md": {
        "limits and defaults of flags": "5 1024 8000 8 64 128 120 60",
        "what the choice of block sizes goes by, of scheduling/blocks.py": "3% 2000",
        "the load that load.py offers": "120%",
    },
    "reference/tpus.md": {"the tolerance of a test": "5", "sizes of tiles and chunks": "16 25 128"},
    "reference/training.md": {
        "defaults and usual rates": "3 4 16 0.8",
        "bits of a checksum": "32",
    },
    "reference/vocabularies.md": {"bounds of slem and slrs": "0.3 8192"},
}
"""By page: what no experiment of docs/results gave, and the numbers."""


def prose(text: str) -> str:
    return NAMES.sub(" ", " ".join(NO_PROSE.sub(" ", text).split()))  # a name may be split over two lines


def numbers(text: str) -> Iterator[str]:
    """The numbers in a text, without signs and commas."""
    for number in NUMBER.findall(text):
        yield number.lstrip("+-").replace(",", "")


def texts(value: object) -> Iterator[str]:
    """Whatever was measured and stands in a record, as text: how its pictures are drawn does not count."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if key == "pictures":
                continue
            yield str(key)
            yield from texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from texts(entry)
    else:
        yield str(value)


def recorded(page: Path) -> set[str]:
    """The numbers of a page's record, and of the records to whose pages, or to which, it links."""
    links = [page.name, *re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))]
    records = [(page.parent / link).with_suffix(".json") for link in links if "://" not in link]
    return {
        number
        for path in records
        if path.exists()
        for text in texts(json.loads(path.read_text(encoding="utf-8")))
        for number in numbers(text)
    }


def without_source(text: str, known: set[str]) -> list[str]:
    return [number for number in numbers(prose(PLACE.sub(" ", text))) if number not in known]


def excused(page: Path) -> set[str]:
    reasons = [*EVERYWHERE.values(), *EXCUSED.get(f"{page.parent.name}/{page.name}", {}).values()]
    return {number for listed in reasons for number in listed.split()}


@pytest.mark.parametrize("page", PAGES, ids=[f"{page.parent.name}/{page.stem}" for page in PAGES])
def test_every_number_has_a_record_or_a_reason(page):
    assert without_source(page.read_text(encoding="utf-8"), recorded(page) | excused(page)) == []


@pytest.mark.parametrize("name", EXCUSED)
def test_no_excuse_is_unused(name):
    page = DOCS / name
    there = set(numbers(prose(page.read_text(encoding="utf-8"))))
    listed = {number for numbers_ in EXCUSED[name].values() for number in numbers_.split()}
    assert listed <= there


def test_a_planted_number_is_detected():
    page = DOCS / "reference" / "decoding.md"
    known = recorded(page) | excused(page)
    planted = (
        "Lossless decoding is 7.31 times as fast ($2.99$, `3.99`, T5 1.1, arXiv 2405.19261, block size 6)."
    )
    assert without_source(planted, known) == ["7.31"]
    page = DOCS / "results" / "picks.md"
    planted = page.read_text(encoding="utf-8").replace("1.17 (1.08 to 1.28)", "1.71 (1.08 to 1.28)")
    assert without_source(planted, recorded(page) | excused(page)) == ["1.71"]
    seen = without_source("12,345 of 54,321 texts, +8.1 (-0.7 to 93%)", set())
    assert seen == ["12345", "54321", "8.1", "0.7", "93%"]
