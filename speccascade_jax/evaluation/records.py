"""Records of experiments, and the tables and pictures that pages draw from them.

    python -m speccascade_jax.evaluation.records docs/results docs/archive

A record is NAME.json. It has a summary, the command, commit, machine and date of the measurement (null if
unknown), its tables, and under `figures` the figures that appear only in the page's sentences. A table
written by scripts/report.py names its experiment in `from`; `experiments` then has the command, commit,
machine, date and settings of that experiment. NAME.md shows a table between two comments, which the command
above regenerates:

    <!-- table: ratios -->
    ...
    <!-- end of table -->

`pictures` declares pictures of these tables (evaluation/pictures.py). The command draws them to ../pictures,
and a page shows one between the comments <!-- picture: NAME --> and <!-- end of picture -->.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from speccascade_jax.evaluation.pictures import draw
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.models.dtypes import processor

FIELDS = ("experiment", "command", "commit", "machine", "date", "tables")
INSTRUCTIONS = {
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "bfloat16 products",
    "amx_tile": "AMX",
}
"""The flags of /proc/cpuinfo and their names in a machine's description."""
Tables = dict[str, dict[str, Any]]
PLACE = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n.*?<!-- end of table -->", re.DOTALL)
PICTURE = re.compile(r"<!-- picture: (?P<name>[\w-]+) -->\n.*?<!-- end of picture -->", re.DOTALL)


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file. Raises ValueError if a field is missing, or a row lacks cells."""
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


def merged(record: dict[str, Any] | None, name: str, about: dict[str, Any], tables: Tables) -> dict[str, Any]:
    """The record with the `tables` of experiment `name`, in place of its earlier ones.

    record: None if there is none yet. about: summary, command, commit, machine, date, settings, and the names
    of its pictures. The record's own command, commit, machine and date are those of tables without an
    experiment or, if there are none, of all its experiments.
    """
    before = record or {"experiment": about["summary"], "tables": {}}
    kept = {key: table for key, table in before["tables"].items() if table.get("from") != name}
    everything = {**kept, **{key: {**table, "from": name} for key, table in tables.items()}}
    experiments = {**before.get("experiments", {}), name: about}
    new = {**before, "experiments": experiments, "tables": everything}
    if all("from" in table for table in everything.values()):
        sources = [experiments[source] for source in dict.fromkeys(t["from"] for t in everything.values())]
        for field in ("command", "commit", "machine", "date"):
            new[field] = list(dict.fromkeys(source[field] for source in sources))
            if len(new[field]) == 1 and field != "command":
                [new[field]] = new[field]
    return {"experiment": new.pop("experiment"), **{field: new.pop(field) for field in FIELDS[1:-1]}, **new}


def pictures(record: dict[str, Any], folder: str) -> list[str]:
    """The paths of the experiments' pictures in `folder`."""
    about = record.get("experiments", {}).values()
    return [os.path.normpath(f"{folder}/{name}.png") for each in about for name in each.get("pictures", ())]


def places(record: dict[str, Any], folder: str) -> list[str]:
    """The parts of a page that show a record's tables and figures."""
    return [
        *(f"<!-- table: {name} -->" for name in record["tables"]),
        *(f"<!-- picture: {name} -->" for name in record.get("pictures", ())),
        *pictures(record, folder),
    ]


def drafted(record: dict[str, Any], folder: str) -> str:
    """A draft of a page that shows a record's tables and pictures."""
    commands = "\n".join([record["command"]] if isinstance(record["command"], str) else record["command"])
    tables = (
        f"<!-- table: {name} -->\n{drawn(table)}\n<!-- end of table -->"
        for name, table in record["tables"].items()
    )
    parts = [
        f"# {record['experiment'].rstrip('.')}",
        *(image(record, name, folder) for name in record.get("pictures", ())),
        *(f"![{Path(path).stem}]({path})" for path in pictures(record, folder)),
        *tables,
        f"```bash\n{commands}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def commit() -> str | None:
    """The commit of this checkout, and whether it has uncommitted changes; None outside a checkout."""
    package = Path(__file__).parent.parent

    def said(*words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=package, capture_output=True, text=True)
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    name = said("rev-parse", "--short", "HEAD")
    return f"{name} with changes" if name and said("status", "--porcelain", "-uno", "--", ".") else name


def machine() -> str:
    """The processor, its number of cores and its matrix instructions."""
    cores = f"{os.cpu_count()} cores"
    if jax.default_backend() != "cpu":
        return f"{jax.device_count()} {jax.devices()[0].device_kind}"
    fields = processor()
    flags = fields.get("flags", "").split()
    there = [shown for flag, shown in INSTRUCTIONS.items() if flag in flags]
    return ", ".join([fields.get("model name", platform.machine()), cores, *there])


def drawn(table: dict[str, Any]) -> str:
    """A table in Markdown, below its title."""
    rule = ["---"] * len(table["columns"])
    lines = ("| " + " | ".join(cells) + " |" for cells in (table["columns"], rule, *table["rows"]))
    return f"*{table['title']}*\n\n" + "\n".join(re.sub(r" {2,}", " ", line) for line in lines)


def image(record: dict[str, Any], name: str, folder: str) -> str:
    """The Markdown of a picture that the record declares, which is in `folder`."""
    path = os.path.normpath(f"{folder}/{name}.svg")
    return f"<!-- picture: {name} -->\n![{record['pictures'][name]['alt']}]({path})\n<!-- end of picture -->"


def redrawn(page: str, record: dict[str, Any]) -> str:
    """The page with the record's tables and pictures. Raises ValueError for one that the record lacks."""

    def picture(place: re.Match[str]) -> str:
        declared = record.get("pictures", {})
        if place["name"] not in declared:
            raise ValueError(f"the record has no picture {place['name']!r}; known: {', '.join(declared)}.")
        return image(record, place["name"], "../pictures")

    def table(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in record["tables"]:
            raise ValueError(f"the record has no table {name!r}; known: {', '.join(record['tables'])}.")
        return f"<!-- table: {name} -->\n{drawn(record['tables'][name])}\n<!-- end of table -->"

    return PICTURE.sub(picture, PLACE.sub(table, page))


def main(folders: list[str]) -> None:
    for folder in folders:
        for path in sorted(Path(folder).glob("*.json")):
            page, record = path.with_suffix(".md"), read_record(path)
            if page.exists():
                write_whole(page, redrawn(page.read_text(encoding="utf-8"), record))
            draw(record, path.parent.parent / "pictures")


if __name__ == "__main__":
    main(sys.argv[1:])
