"""The tokenizer files of a checkpoint folder."""

from pathlib import Path

from speccascade_jax.checkpoints.files import MEGABYTE, exists, parse_json, read

LARGEST_FILE, LARGEST_COMPANION = 256 * MEGABYTE, 64 * MEGABYTE
NAMES = ("spiece.model", "tokenizer.model", "tokenizer.json")  # SentencePiece (T5, Gemma); Hugging Face
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files with the special tokens' roles and the chat template."""


def find(folder: Path) -> Path | None:
    """The folder's tokenizer file. If there are both kinds, it is SentencePiece's for T5 and Gemma, and
    tokenizer.json for other families, because only that file has all of their special tokens."""
    names = [name for name in NAMES if exists(folder / name)]
    if names[-1:] == [NAMES[-1]] and len(names) > 1 and exists(folder / COMPANIONS[0]):
        told = parse_json(folder / COMPANIONS[0], read(folder / COMPANIONS[0], LARGEST_COMPANION))
        if not any(family in str(told.get("tokenizer_class")) for family in ("None", "T5", "Gemma")):
            names.reverse()
    return folder / names[0] if names else None


def name_for(tokenizer: str) -> str:
    """The name by which find() recognises this kind of file."""
    name = Path(tokenizer).name
    return name if name in NAMES else NAMES[-1 if name.endswith(".json") else 0]


def copy(tokenizer: Path, folder: Path) -> None:
    """Copies the file, under the name by which find() recognises it, and its companion files into
    `folder`."""
    place = folder / name_for(tokenizer.name)
    if tokenizer.resolve() == place.resolve():
        return
    place.write_bytes(read(tokenizer, LARGEST_FILE))
    for name in COMPANIONS:
        if exists(tokenizer.parent / name):
            (folder / name).write_bytes(read(tokenizer.parent / name, LARGEST_COMPANION))
