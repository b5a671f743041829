"""Makes a new task from a file of pairs: its splits, its tokenizer, and the configs of its two models."""

import dataclasses
import json
import math
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speccascade_jax import config as configs
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.inputs import check_text, parse_json, read_lines
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer
from speccascade_jax.training.data import field, lookup

Pair = tuple[str, str]
"""A source and its target."""
FIELDS = (
    ("source", "target"),
    ("input", "output"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "response"),
    ("src", "tgt"),
    ("text", "label"),
)
"""Known names of the two fields of a pair, in order of preference."""
FEWEST = 100  # minimum number of training pairs
HELD_OUT = 0.05, 500  # share of the pairs in each held-out split, and its largest size
LONGEST = 512  # most tokens of a source or a target; training skips longer ones
BYTES = 300  # pieces in every vocabulary: bytes and special tokens
ROOM = 1.25  # margin over the longest text, because later ones may be longer
ROWS = 8  # rows of the smallest batch
EPOCHS = 60  # more passes over the data do not improve a small model
SHORT = 3  # most words of a target that is right or wrong as a whole


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a T5 to train from scratch."""

    d_model: int
    num_heads: int
    d_kv: int
    d_ff: int
    encoder_layers: int
    decoder_layers: int


@dataclasses.dataclass(frozen=True)
class Size:
    """Choices that suit a number of pairs: the two models, their vocabulary and their training time."""

    pairs: float  # the most pairs that these choices suit
    vocabulary: int
    verifier: Shape
    drafter: Shape
    verifier_steps: int
    drafter_steps: int


SIZES = (
    Size(30_000, 512, Shape(128, 4, 32, 256, 2, 4), Shape(64, 2, 32, 128, 2, 1), 2400, 2400),
    Size(80_000, 512, Shape(192, 3, 64, 384, 2, 4), Shape(128, 2, 64, 256, 4, 1), 2400, 6000),
    Size(float("inf"), 2048, Shape(512, 8, 64, 1024, 2, 5), Shape(192, 3, 64, 512, 4, 1), 4500, 10_000),
)
"""The smallest first. The second is that of the shipped pair e2e; the third is that of the demo pair before
its verifier got two more encoder layers."""


@dataclasses.dataclass(frozen=True)
class NewTask:
    """A task to write, and its folders."""

    name: str
    metric: str
    size: Size
    splits: dict[str, list[Pair]]  # train, validation and test
    data: Path  # the folder of the splits and the tokenizer
    configs: Path  # the folder of the configs

    @property
    def vocabulary(self) -> int:
        """The number of pieces: the size's, doubled until every character fits next to the bytes."""
        characters = set().union(*(text for pair in self.splits["train"] for text in pair))
        return next(n for k in range(20) if (n := self.size.vocabulary << k) >= len(characters) + BYTES)

    @property
    def files(self) -> list[Path]:
        """The paths of the three configs, in the order of use."""
        return [self.configs / f"{self.name}{role}.py" for role in ("_verifier", "_drafter", "")]


def fields_of(example: dict[str, Any], where: str) -> tuple[str, str]:
    """The names of the source and target fields: known names, or the only two text fields. Raises FieldError
    if they cannot be determined."""
    for names in FIELDS:
        if all(isinstance(lookup(example, name), str) for name in names):
            return names
    texts = [name for name, value in example.items() if isinstance(value, str)]
    if len(texts) == 2:
        return texts[0], texts[1]
    raise FieldError(
        "source_field",
        None,
        "name them with --source-field and --target-field.",
        f"{where}: cannot tell the source from the target among the fields {', '.join(example) or '(none)'}",
    )


def read_pairs(path: str, source_field: str | None = None, target_field: str | None = None) -> list[Pair]:
    """The pairs of a file: a .jsonl file whose lines are objects or lists of two texts, or a .tsv file with
    two columns, optionally gzipped. Raises ValueError with the line number."""
    kind = path.removesuffix(".gz").rpartition(".")[2]
    if kind not in ("jsonl", "tsv"):
        raise FieldError(
            "data", path, "give a .jsonl or a .tsv file.", f"--data is {path}, whose name ends in neither"
        )
    if (source_field is None) != (target_field is None):
        raise FieldError(
            "target_field" if target_field is None else "source_field",
            None,
            "give both, or neither.",
            "only one of --source-field and --target-field is given",
        )
    names = None if source_field is None or target_field is None else (source_field, target_field)
    return list(_columns(path) if kind == "tsv" else _objects(path, names))


def _columns(path: str) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(
                f"{path}, line {number}: {len(columns)} columns; write the source, one tab and the target."
            )
        yield columns[0], columns[1]


def _objects(path: str, names: tuple[str, str] | None) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        example = parse_json(line, where)
        if isinstance(example, list) and len(example) == 2:
            yield (
                check_text(example[0], f"{where}: the source"),
                check_text(example[1], f"{where}: the target"),
            )
            continue
        if not isinstance(example, dict):
            raise ValueError(f'{where}: write an object such as {{"source": "a text", "target": "another"}}.')
        names = names or fields_of(example, where)
        yield field(example, names[0], where), field(example, names[1], where)


def held_out(pairs: Sequence[Pair], seed: int = 0) -> dict[str, list[Pair]]:
    """Splits the pairs into train, validation and test. All pairs with the same source are in the same split.

    Raises FieldError if there are too few.
    """
    groups: dict[str, list[Pair]] = {}
    for pair in dict.fromkeys(pairs):
        groups.setdefault(pair[0], []).append(pair)
    share, largest = HELD_OUT
    size = min(largest, int(share * len(groups)))
    order = [list(groups.values())[n] for n in np.random.default_rng(seed).permutation(len(groups))]
    parts = {"validation": order[:size], "test": order[size : 2 * size], "train": order[2 * size :]}
    splits = {name: [pair for group in part for pair in group] for name, part in parts.items()}
    if len(splits["train"]) < FEWEST:
        raise FieldError(
            "data",
            len(groups),
            "give more.",
            f"--data has {len(groups)} different sources, which leaves {len(splits['train'])} pairs to learn "
            f"from; a task needs {FEWEST}",
        )
    return splits


def metric_of(pairs: Sequence[Pair]) -> str:
    """The default metric: exact_match for targets of few words, which are right or wrong as a whole."""
    words = statistics.median(len(target.split()) for _, target in pairs)
    return "exact_match" if words <= SHORT else "bleu"


def check_absent(name: str, data: Path, folder: Path) -> None:
    """Raises FieldError for a name that configs cannot have, and if a file of the task already exists."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise FieldError(
            "name",
            name,
            "write lower-case letters, digits and underscores, a letter first.",
            f"NAME is {name!r}",
        )
    known, roles = configs.available(), ("", "_verifier", "_drafter")
    taken = [known[name + role] for role in roles if name + role in known]
    runs = [Path("runs", name + role) for role in roles[1:]]
    taken += [
        path for path in (data, *(folder / f"{name}{role}.py" for role in roles), *runs) if path.exists()
    ]
    if taken:
        raise FieldError("name", name, "choose another NAME, or delete it.", f"{taken[0]} exists already")


def write(task: NewTask) -> dict[str, Any]:
    """Writes the splits, the tokenizer and the configs, and returns the chosen values.

    The data folder appears once it is complete, followed by the configs. If it raises ValueError or OSError,
    no files are left behind.
    """
    task.data.parent.mkdir(parents=True, exist_ok=True)
    written = list[Path]()
    try:
        with tempfile.TemporaryDirectory(prefix=f".{task.name}", dir=task.data.parent) as made:
            new = Path(made, "data")
            new.mkdir()
            for split, pairs in task.splits.items():
                lines = (json.dumps({"source": s, "target": t}, ensure_ascii=False) + "\n" for s, t in pairs)
                (new / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
            texts = (text for pair in task.splits["train"] for text in pair)
            train_tokenizer(texts, new / "spiece.model", task.vocabulary)
            choices = chosen(task, Tokenizer(new / "spiece.model"))
            new.rename(task.data)
            written.append(task.data)
        task.configs.mkdir(parents=True, exist_ok=True)
        for path, text in zip(task.files, sources(task, choices), strict=True):
            written.append(path)
            write_whole(path, text)
    except BaseException:
        for path in written:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
    return choices


def chosen(task: NewTask, tokenizer: Tokenizer) -> dict[str, Any]:
    """The values that depend on the texts' lengths in tokens: limits, batches and steps."""
    pairs = [pair for split in task.splits.values() for pair in split]
    lengths = [
        [len(ids) + 1 for ids in tokenizer.encode_batch(list(texts))] for texts in zip(*pairs, strict=True)
    ]
    limits = [min(8 * math.ceil(ROOM * max(column) / 8), LONGEST) for column in lengths]
    left_out = sum(s > limits[0] or t > limits[1] for s, t in zip(*lengths, strict=True))
    count, mean = len(task.splits["train"]), max(map(statistics.fmean, lengths))
    # A batch is at most a tenth of the data, so that every length bucket fills batches.
    batch_tokens = max(ROWS * max(limits), min(2048, int(count * mean / 10)))
    most_steps = max(200, int(EPOCHS * count * mean / batch_tokens))
    return {
        "source_length": limits[0],
        "target_length": limits[1],
        "left_out": left_out,
        "batch_tokens": batch_tokens,
        "verifier_steps": min(task.size.verifier_steps, most_steps),
        "drafter_steps": min(task.size.drafter_steps, most_steps),
    }


def _model(shape: Shape, vocabulary: int, dropout: float) -> str:
    return (
        "T5Config(\n"
        f"        vocab_size={vocabulary},\n"
        f"        d_model={shape.d_model},\n"
        f"        d_kv={shape.d_kv},\n"
        f"        num_heads={shape.num_heads},\n"
        f"        d_ff={shape.d_ff},\n"
        f"        num_encoder_layers={shape.encoder_layers},\n"
        f"        num_decoder_layers={shape.decoder_layers},\n"
        f"        dropout_rate={dropout},\n"
        "    )"
    )


def sources(task: NewTask, choices: dict[str, Any]) -> tuple[str, str, str]:
    """The contents of task.files."""
    name, size, data = task.name, task.size, task.data.as_posix()
    steps, drafter_steps = choices["verifier_steps"], choices["drafter_steps"]
    verifier = f'''"""The verifier of the task {name}: the large model, trained from scratch on {data}."""

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

task = Task(
    train="{data}/train.jsonl",
    validation="{data}/validation.jsonl",
    test="{data}/test.jsonl",
    metric="{task.metric}",
    max_source_length={choices["source_length"]},
    max_target_length={choices["target_length"]},
)

config = TrainConfig(
    name="{name}_verifier",
    output_dir="runs/{name}_verifier",
    task=task,
    tokenizer="{data}/spiece.model",
    tokenizer_size={task.vocabulary},
    model={_model(size.verifier, task.vocabulary, 0.1)},
    steps={steps},
    batch_tokens={choices["batch_tokens"]},
    optimizer="adamw",
    learning_rate=0.015,
    warmup_steps={min(100, steps // 10)},
    decay="linear",
    clip_norm=1.0,
    eval_every={max(1, steps // 8)},
    save_every={max(1, steps // 8)},
    validation_examples=128,
)
'''
    drafter = f'''"""The drafter of the task {name}: the small model, distilled from the verifier."""

import dataclasses

from speccascade_jax.config import load
from speccascade_jax.models.t5 import T5Config

config = dataclasses.replace(
    load("{name}_verifier"),
    name="{name}_drafter",
    output_dir="runs/{name}_drafter",
    model={_model(size.drafter, task.vocabulary, 0.0)},
    teacher="runs/{name}_verifier/export",
    distillation=0.7,
    steps={drafter_steps},
    eval_every={max(1, drafter_steps // 8)},
    save_every={max(1, drafter_steps // 8)},
)
'''
    examples = "".join(f"        {source!r},\n" for source, _ in task.splits["test"][:3])
    pair = f'''"""The task {name}: how its pair decodes."""

from speccascade_jax.config import DecodeConfig

config = DecodeConfig(
    drafter="runs/{name}_drafter/export",
    verifier="runs/{name}_verifier/export",
    method="speculative",
    block_size=5,
    max_source_length={choices["source_length"]},
    max_new_tokens={choices["target_length"]},
    task="{name}_verifier",
    missing="Train it: speccascade finetune --config={name}_verifier, then --config={name}_drafter.",
    examples=(
{examples}    ),
)
'''
    return verifier, drafter, pair
