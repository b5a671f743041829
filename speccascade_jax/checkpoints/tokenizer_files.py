"""Which file of a checkpoint folder is its tokenizer."""

from pathlib import Path

from speccascade_jax.checkpoints.files import MEGABYTE, exists, read

LARGEST_FILE = 256 * MEGABYTE
NAMES = ("spiece.model", "tokenizer.model", "tokenizer.json")  # SentencePiece (T5's, Gemma's); Hugging Face's


def find(folder: Path) -> Path | None:
    """The folder's tokenizer file, SentencePiece's where both kinds lie there."""
    return next((folder / name for name in NAMES if exists(folder / name)), None)


def name_for(tokenizer: str) -> str:
    """The name by which find() knows the kind of this file."""
    name = Path(tokenizer).name
    return name if name in NAMES else NAMES[-1 if name.endswith(".json") else 0]


def copy(tokenizer: Path, folder: Path) -> None:
    """Puts the file into `folder` under the name by which find() knows its kind."""
    place = folder / name_for(tokenizer.name)
    if tokenizer.resolve() != place.resolve():
        place.write_bytes(read(tokenizer, LARGEST_FILE))
