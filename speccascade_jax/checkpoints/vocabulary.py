"""Which file of a checkpoint folder is its tokenizer."""

from pathlib import Path

NAMES = ("spiece.model", "tokenizer.json")  # SentencePiece; Hugging Face tokenizers


def find(folder: Path) -> Path | None:
    """The folder's tokenizer file, SentencePiece's where both kinds lie there."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def copy(tokenizer: Path, folder: Path) -> None:
    """Puts the file into `folder` under the name by which find() knows its kind."""
    place = folder / NAMES[tokenizer.suffix == ".json"]
    if tokenizer.resolve() != place.resolve():
        place.write_bytes(tokenizer.read_bytes())
