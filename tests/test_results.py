"""Results pages show the contents of their records."""

import json
import re
from pathlib import Path

import pytest

from speccascade_jax.evaluation.pictures import draw, figures, kept, shown
from speccascade_jax.evaluation.records import FIELDS, PICTURE, PLACE, main, read_record, redrawn

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORDS = sorted(path for folder in ("results", "archive") for path in (DOCS / folder).glob("*.json"))
NAMES = [path.stem for path in RECORDS]
PICTURES = [(path, name) for path in RECORDS for name in read_record(path).get("pictures", {})]


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
    assert sorted(place["name"] for place in PICTURE.finditer(text)) == sorted(record.get("pictures", {}))


@pytest.mark.parametrize(("path", "name"), PICTURES, ids=[name for _, name in PICTURES])
def test_a_picture_shows_the_numbers_of_its_record(path, name):
    drawn = DOCS / "pictures" / f"{name}.svg"
    assert kept(drawn) == shown(read_record(path), name)
    assert drawn.stat().st_size < 60_000


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda path: path.stem)
def test_each_page_has_its_line_in_the_summary(page):
    summary = (DOCS / "results" / "index.md").read_text(encoding="utf-8")
    assert page.stem == "index" or f"({page.name})" in summary


@pytest.mark.parametrize("page", [path.with_suffix(".md") for path in RECORDS], ids=NAMES)
def test_pages_with_a_record_show_figures_only_in_its_tables(page):
    """No tables except generated ones."""
    if page.exists():
        rest = PLACE.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"^\|.*\|$", rest, re.MULTILINE)


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda path: path.stem)
def test_each_page_but_the_summary_has_a_record(page):
    assert page.stem == "index" or page.with_suffix(".json") in RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=NAMES)
def test_figures_of_sentences_are_described_in_words(path):
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


def test_a_changed_record_changes_its_picture(tmp_path):
    path, name = next((path, name) for path, name in PICTURES if name == "verification-ratios")
    record, drawn = read_record(path), DOCS / "pictures" / f"{name}.svg"
    [again] = draw(record, tmp_path)
    if again.read_text("utf-8").split("<defs>")[0] == drawn.read_text("utf-8").split("<defs>")[0]:
        assert again.read_bytes() == drawn.read_bytes()  # by the same version of matplotlib
    record["tables"]["expected"]["rows"][0][-1] = "1.050 (1.037 to 1.062)"
    assert kept(drawn) != shown(record, name)
    before = again.read_bytes()
    draw(record, tmp_path)
    assert again.read_bytes() != before and kept(again) == shown(record, name)


def test_cells_tell_figures_and_intervals():
    assert figures("**1.9** (1.7 to +2.1), 0.5") == [[1.9, 1.7, 2.1], [0.5, None, None]]
    assert figures("39.6, 0.46 (0.4, 0.5)") == [[39.6, None, None], [0.46, 0.4, 0.5]]
    assert figures("1,275") == [[1275, None, None]] and figures("`e2e` of 0.1.0") == figures("-") == []


def test_pictures_of_missing_tables_are_refused(tmp_path):
    table = {"title": "Speeds.", "columns": ["", "speed"], "rows": [["lossless", "1.9"], ["none", "-"]]}
    panel = {"title": "Speeds", "table": "t", "names": [""], "x": "speed"}
    for wrong, match in (
        ({"table": "u"}, "table 'u'"),
        ({"x": "time"}, "column 'time'"),
        ({"rows": {"": ["none"]}}, "no figure"),
    ):
        picture = {"alt": "Speeds", "panels": [panel | wrong]}
        with pytest.raises(ValueError, match=match):
            draw({"tables": {"t": table}, "pictures": {"a": picture}}, tmp_path)
    with pytest.raises(ValueError, match="speeds"):
        redrawn("<!-- picture: speeds -->\n<!-- end of picture -->", {"tables": {}})


def test_damaged_records_are_refused(tmp_path):
    path = tmp_path / "a.json"
    whole = json.loads(RECORDS[0].read_text(encoding="utf-8"))
    for field in FIELDS:
        path.write_text(json.dumps({name: value for name, value in whole.items() if name != field}))
        with pytest.raises(ValueError, match=field):
            read_record(path)
    next(iter(whole["tables"].values()))["rows"].append(["one cell"])
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="columns"):
        read_record(path)
    with pytest.raises(ValueError, match="speeds"):
        redrawn("<!-- table: speeds -->\n<!-- end of table -->", whole)
