"""Model cards: the README.md next to exported weights, for readers and for the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

WRITTEN = "<!-- Written by speccascade_jax at every export. To keep a text of yours, remove this line. -->"
LICENCE = (
    "The licence of the weights depends on the licences of the data and of the models that they were trained "
    "from. Name it here, and as `license` in the header, before you publish them."
)


def card(
    name: str, kind: str, events: list[dict[str, Any]], licence: str = "other", terms: str = LICENCE
) -> str:
    """The README.md of a model of family `kind`, from the events of its training log. `licence` is a Hugging
    Face licence identifier, and `terms` describes its conditions."""
    start = next((event for event in events if event["event"] == "start"), {})
    config = start.get("config", {})
    task = config.get("task", {})
    parts = [
        "---",
        "library_name: speccascade_jax",
        f"license: {licence}",
        "tags:",
        "- speculative-decoding",
        f"- {kind}",
        *_base_model(config.get("init")),
        "---",
        WRITTEN,
        f"# {name}",
        "",
        " ".join(_sentences(config, kind, start)),
        "",
        "```python",
        "from speccascade_jax import Cascade",
        "",
        'cascade = Cascade.from_pretrained("VERIFIER", drafter="DRAFTER")  # either of them is this folder',
        "```",
        "",
        "## Data",
        "",
        f"Training split: `{task.get('train', 'unknown')}`. Test split: `{task.get('test', 'unknown')}`.",
        *([f"Sources begin with `{task['prefix']}`."] if task.get("prefix") else []),
        "",
        "## Licence",
        "",
        terms,
        "",
        "## Metrics",
        "",
        *_table(events),
    ]
    return "\n".join(parts) + "\n"


def _base_model(init: Any) -> list[str]:
    """The header lines that name the initial model, if it is on the Hugging Face hub."""
    at_hub = isinstance(init, str) and init.startswith("hf://")
    return [f"base_model: {init.removeprefix('hf://')}"] if at_hub else []


def _sentences(config: dict[str, Any], kind: str, start: dict[str, Any]) -> list[str]:
    """Sentences about the model and its training."""
    size = f" with {start['parameters']:,} parameters" if "parameters" in start else ""
    said = [f"A model of the family {kind}{size}."]
    if "steps" in config:
        origin = f"from `{config['init']}`" if config.get("init") else "from scratch"
        said.append(
            f"It was trained {origin} for {config['steps']:,} steps by the config `{config['name']}`."
        )
    if config.get("teacher"):
        said.append(f"It also learned from `{config['teacher']}`.")
    return said


def _table(events: list[dict[str, Any]]) -> list[str]:
    """A table of the evaluation with the least loss, whose parameters are exported, and the last one."""
    evaluations = [event for event in events if event["event"] == "evaluation" and "loss" in event]
    if not evaluations:
        return ["No evaluation was recorded."]
    best = min(evaluations, key=lambda event: event["loss"])
    metric = best.get("metric", "quality")
    rows = ["| step | validation loss | " + metric + " |", "|---|---|---|"]
    for event in [best] if best is evaluations[-1] else [best, evaluations[-1]]:
        quality = event.get("quality")
        shown = "-" if quality is None else f"{quality:.2f}"
        rows.append(f"| {event['step']:,} | {event['loss']:.4f} | {shown} |")
    return [*rows, "", "Both are of the validation split; the metric is of decoded texts of a part of it."]


def kind_of(folder: Path) -> str:
    """The family of the model in an exported folder."""
    for name, field in (("model.json", "family"), ("config.json", "model_type")):
        if (folder / name).is_file():
            return str(json.loads((folder / name).read_text(encoding="utf-8")).get(field, "t5"))
    return "t5"


def is_ours(path: Path) -> bool:
    """Whether a card may be written to `path`: the file is missing or is a card without edits."""
    return not path.exists() or WRITTEN in path.read_text(encoding="utf-8", errors="replace")
