"""Records of experiments, and the tables that pages draw from them.

    python -m speccascade_jax.evaluation.records docs/results docs/archive

A record is NAME.json: what was measured, by which command, at which commit, on which machine and when (null
where it was not kept), its tables, and under `figures` what only the page's sentences tell. NAME.md shows a
table between two comments, which the command above writes anew:

    <!-- table: ratios -->
    ...
    <!-- end of table -->
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from speccascade_jax.inference.outputs import write_whole

FIELDS = ("experiment", "command", "commit", "machine", "date", "tables")
PLACE = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file. Raises ValueError where a field is missing, or a row lacks cells."""
    record = json.loads(path.read_text(encoding="utf-8"))
    missing = [field for field in FIELDS if field not in record]
    if missing:
        raise ValueError(f"{path} has no field {missing[0]}.")
    for name, table in record["tables"].items():
        for row in table["rows"]:
            if len(row) != len(table["columns"]):
                raise ValueError(
                    f"{path}: table {name} has {len(table['columns'])} columns; {row} has {len(row)}."
                )
    return record


def drawn(table: dict[str, Any]) -> str:
    """A table as Markdown, its title above."""
    rule = ["---"] * len(table["columns"])
    lines = ("| " + " | ".join(cells) + " |" for cells in (table["columns"], rule, *table["rows"]))
    return f"*{table['title']}*\n\n" + "\n".join(re.sub(r" {2,}", " ", line) for line in lines)


def redrawn(page: str, record: dict[str, Any]) -> str:
    """The page with its tables as in the record. Raises ValueError for a table that the record lacks."""

    def table(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in record["tables"]:
            raise ValueError(f"the record has no table {name!r}; known: {', '.join(record['tables'])}.")
        return f"<!-- table: {name} -->\n{drawn(record['tables'][name])}\n<!-- end of table -->"

    return PLACE.sub(table, page)


def main(folders: list[str]) -> None:
    for folder in folders:
        for path in sorted(Path(folder).glob("*.json")):
            page = path.with_suffix(".md")
            if page.exists():
                write_whole(page, redrawn(page.read_text(encoding="utf-8"), read_record(path)))


if __name__ == "__main__":
    main(sys.argv[1:])
