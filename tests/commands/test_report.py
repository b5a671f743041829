"""scripts/report.py on experiments that measure a file of numbers: which ones run, and their results."""

import dataclasses
import json

import pytest

from speccascade_jax.commands import report
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation import plots, records
from speccascade_jax.experiments.findings import Experiment, Findings, table

PAGE = "# Speeds\n\nFast.\n\n<!-- table: {} -->\n<!-- end of table -->\n\nCaveats.\n"


@dataclasses.dataclass(frozen=True)
class Counting:
    """Adds a line to a file for every input that is not there yet."""

    key: str
    inputs: int = 9
    sizes: tuple[int, ...] = (3, 5, 7)
    lacks: str = ""

    def check(self):
        if self.lacks:
            raise FieldError("models", self.lacks, "train it.", f"it needs the checkpoint {self.lacks}")

    def measure(self, bench):
        path = bench.folder / "numbers"
        done = len(path.read_text().split()) if path.exists() else 0
        with path.open("a") as file:
            for n in bench.track(range(done, self.inputs), "numbers"):
                file.write(f"{n}\n")
        rows = [[size, self.inputs] for size in self.sizes]
        picture = plots.lines({"Panel": {"a": [(1, (2.0, 1.0, 3.0))]}}, "Block size", "Speed")
        return Findings({self.key: table("Speeds.", ("block size", "inputs"), rows)}, {self.key: picture})


EXPERIMENTS = (
    Experiment("one", "How fast one is.", "speeds", Counting("one")),
    Experiment("two", "How fast two is.", "speeds", Counting("two")),
    Experiment("three", "How fast three is.", "other", Counting("three", lacks="runs/three")),
)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A checkout with docs, and EXPERIMENTS."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    monkeypatch.setattr(report, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(report, "EXPERIMENTS", {experiment.name: experiment for experiment in EXPERIMENTS})
    return tmp_path


def place_of(page):
    return page.parent.parent.parent


def record_of(path):
    record = records.read_record(path)
    page = path.with_suffix(".md").read_text()
    assert records.redrawn(page, record) == page
    return record


def test_an_experiment_writes_its_record_page_and_picture(place):
    assert report.main(["one"]) == 0
    record = record_of(place / "docs/results/speeds.json")
    assert record["tables"]["one"]["rows"] == [["3", "9"], ["5", "9"], ["7", "9"]]
    assert record["command"] == ["python scripts/report.py one"] and record["machine"] == records.machine()
    assert record["experiments"]["one"]["settings"]["sizes"] == [3, 5, 7]
    assert (place / "docs/pictures/one.png").stat().st_size > 1000
    text = (place / "docs/results/speeds.md").read_text()
    assert "(../pictures/one.png)" in text and "| 3 | 9 |" in text


def test_a_page_and_other_experiments_results_are_kept(place, capsys):
    """Another experiment's tables, an older table, and hand-written sentences."""
    page, path = place / "docs/results/speeds.md", place / "docs/results/speeds.json"
    page.write_text(PAGE.format("old") + "<!-- table: one -->\n<!-- end of table -->\n")
    old = {"experiment": "Speeds", "command": ["by hand"], "commit": "abc", "machine": None, "date": "2026"}
    path.write_text(json.dumps(old | {"tables": {"old": table("Old.", ("a",), [["1"]])}}))
    page.write_text(records.redrawn(PAGE.format("old"), json.loads(path.read_text())))
    assert report.main(["speeds"]) == 0  # the page's name stands for its experiments
    record = record_of(path)
    assert list(record["tables"]) == ["old", "one", "two"] and record["command"] == ["by hand"]
    assert "Caveats." in page.read_text()
    told = capsys.readouterr().out
    for place in "<!-- table: one -->", "<!-- table: two -->", "../pictures/one.png", "../pictures/two.png":
        assert f"{page.relative_to(place_of(page))} lacks {place}" in told
    assert "<!-- table: old -->" not in told
    assert {key: made.get("from") for key, made in record["tables"].items()} == {
        "old": None,
        "one": "one",
        "two": "two",
    }


def test_a_draft_page_shows_the_whole_record(place, capsys):
    assert report.main(["one", "two", "--quick"]) == 0
    text = (place / "runs/report/quick/speeds.md").read_text()
    assert all(f"<!-- table: {name} -->" in text and f"({name}.png)" in text for name in ("one", "two"))
    assert " lacks " not in capsys.readouterr().out


def test_trials_leave_the_documentation_alone(place):
    for flags, folder, inputs, sizes in ((["--quick"], "quick", 4, 2), (["--limit", "3"], "limit-3", 3, 3)):
        assert report.main(["one", *flags]) == 0
        record = record_of(place / "runs/report" / folder / "speeds.json")
        assert record["tables"]["one"]["rows"] == [[str(n), str(inputs)] for n in (3, 5, 7)[:sizes]]
        assert record["command"] == [f"python scripts/report.py one {' '.join(flags)}"]
        assert list((place / "runs/report" / folder).glob("*.png"))
    assert not list((place / "docs/results").iterdir()) and not (place / "docs/pictures").exists()


def test_measurements_are_kept_with_their_date(place, monkeypatch):
    for today in "2026-01-01", "2026-01-02":
        monkeypatch.setattr(report, "today", lambda today=today: today)
        assert report.main(["one"]) == 0
        assert record_of(place / "docs/results/speeds.json")["date"] == "2026-01-01"
    more = dataclasses.replace(EXPERIMENTS[0], measurement=Counting("one", inputs=12))
    monkeypatch.setitem(report.EXPERIMENTS, "one", more)
    assert report.main(["one"]) == 0
    assert record_of(place / "docs/results/speeds.json")["date"] == "2026-01-01, 2026-01-02"
    assert len((place / "runs/report/one/numbers").read_text().split()) == 12


def test_experiments_that_cannot_run_are_skipped_unless_named(place, monkeypatch, capsys):
    assert report.main([]) == 0
    assert "skipped: three: it needs the checkpoint runs/three; train it." in capsys.readouterr().out
    assert not (place / "docs/results/other.json").exists()
    assert report.main(["one", "three"]) == 2
    assert "three cannot run here: it needs the checkpoint" in capsys.readouterr().err
    assert report.main(["other"]) == 2  # the page of that one alone
    assert "three cannot run here" in capsys.readouterr().err
    mixed = dataclasses.replace(EXPERIMENTS[1], measurement=Counting("two", lacks="runs/two"))
    monkeypatch.setitem(report.EXPERIMENTS, "two", mixed)
    assert report.main(["speeds"]) == 0  # one of the page can
    assert "skipped: two" in capsys.readouterr().out
    assert report.main(["four"]) == 2
    assert "four" in capsys.readouterr().err


def test_the_list_says_what_each_experiment_measures(place, capsys):
    assert report.main(["--list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ("one", "two", "three", "speeds", "runs/three"))
    assert not (place / "runs").exists()


def test_an_installed_package_keeps_everything_in_its_output(place, monkeypatch):
    monkeypatch.setattr(report, "DOCS", place / "elsewhere")
    assert report.main(["one", "--output=out"]) == 0
    assert record_of(place / "out/speeds.json")["tables"]["one"]
