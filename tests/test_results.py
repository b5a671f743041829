"""Pages of results show what their records hold."""

import json
import re
from pathlib import Path

import pytest

from speccascade_jax.evaluation.records import PLACE, main, read_record, redrawn

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORDS = sorted(path for folder in ("results", "archive") for path in (DOCS / folder).glob("*.json"))
NAMES = [path.stem for path in RECORDS]


def test_there_are_records():
    assert len(RECORDS) > 8


@pytest.mark.parametrize("path", RECORDS, ids=NAMES)
def test_a_page_shows_all_tables_of_its_record_as_they_are(path):
    record, page = read_record(path), path.with_suffix(".md")
    if not page.exists():  # a page of the guide tells it
        return
    text = page.read_text(encoding="utf-8")
    assert redrawn(text, record) == text
    assert sorted(place["name"] for place in PLACE.finditer(text)) == sorted(record["tables"])


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda path: path.stem)
def test_each_page_has_its_line_in_the_summary(page):
    summary = (DOCS / "results" / "index.md").read_text(encoding="utf-8")
    assert page.stem == "index" or f"({page.name})" in summary


@pytest.mark.parametrize("page", [path.with_suffix(".md") for path in RECORDS], ids=NAMES)
def test_figures_of_a_page_with_a_record_stand_in_its_tables_only(page):
    """No table beside those that are drawn."""
    if page.exists():
        rest = PLACE.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"^\|.*\|$", rest, re.MULTILINE)


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda path: path.stem)
def test_each_page_but_the_summary_has_a_record(page):
    assert page.stem == "index" or page.with_suffix(".json") in RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=NAMES)
def test_figures_of_sentences_are_told_in_words(path):
    """What was measured -> what came out: a bare number would excuse whatever equals it."""
    for what, figure in read_record(path).get("figures", {}).items():
        assert re.search(r"[a-zA-Z]{3}", what) and isinstance(figure, str) and re.search(r"\d", figure)


def test_a_changed_record_changes_its_page(tmp_path):
    table = {"title": "Speeds.", "columns": ["", "speed"], "rows": [["lossless", "1.9"]]}
    record = dict.fromkeys(("experiment", "command", "commit", "machine", "date"))
    file, page = tmp_path / "a.json", tmp_path / "a.md"
    page.write_text("# A\n\n<!-- table: t -->\n<!-- end of table -->\n\nText.\n")
    for speed in "1.9", "2.5":
        table["rows"] = [["lossless", speed]]
        file.write_text(json.dumps(record | {"tables": {"t": table}}))
        main([str(tmp_path)])
        assert f"| lossless | {speed} |" in page.read_text()
    assert page.read_text().startswith("# A\n") and page.read_text().endswith("Text.\n")
    assert page.read_text().count("| lossless |") == 1


def test_damaged_records_are_refused(tmp_path):
    path = tmp_path / "a.json"
    whole = json.loads(RECORDS[0].read_text(encoding="utf-8"))
    for field in whole:
        path.write_text(json.dumps({name: value for name, value in whole.items() if name != field}))
        with pytest.raises(ValueError, match=field):
            read_record(path)
    next(iter(whole["tables"].values()))["rows"].append(["one cell"])
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="columns"):
        read_record(path)
    with pytest.raises(ValueError, match="speeds"):
        redrawn("<!-- table: speeds -->\n<!-- end of table -->", whole)
