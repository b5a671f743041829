"""Vocabularies: SentencePiece files, Hugging Face's tokenizer.json, and how to train one."""

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from speccascade_jax.checkpoints.files import checked_path, parse_json, read
from speccascade_jax.checkpoints.tokenizer_files import LARGEST_FILE
from speccascade_jax.core.errors import FieldError
from speccascade_jax.tokenizers.chat import ChatTemplate, read_companion, specials_of
from speccascade_jax.tokenizers.json_checks import checked_content, guarded

SPACE = "\u2581"  # SentencePiece's space
TRIED = 1000  # tokens decoded as a test when a tokenizer.json is read
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decode()'s result for part of a character
BYTE = re.compile("<0x[0-9A-F]{2}>")
BYTES = 256  # pieces that represent a byte
WORD = re.compile(rf"{SPACE}?(?:\w+|[^\w{SPACE}])")


class Pieces(NamedTuple):
    """A way to find the pieces of a vocabulary."""

    model_type: str  # SentencePiece's model type
    words: bool = False  # whether the most common words become pieces first


PIECES = {
    "unigram": Pieces("unigram"),
    "bpe": Pieces("bpe"),
    "char": Pieces("char"),
    "word": Pieces("char", words=True),
}
"""The kinds by their names in a config's tokenizer_pieces."""


class Surface(NamedTuple):
    """The surface form of a token."""

    kind: str  # piece, byte, or a role: pad, eos, bos, unknown, or the name of another token without text
    text: bytes  # UTF-8, possibly part of a character; empty for tokens without text


def by_text(surfaces: Sequence[Surface]) -> dict[bytes, int]:
    """text -> token. If several have the same text, a piece takes precedence over a byte, then the lowest
    id."""
    order = sorted(range(len(surfaces)), key=lambda token: (surfaces[token].kind == "byte", token))
    return {surfaces[token].text: token for token in reversed(order) if surfaces[token].text}


class TokenizerJson:
    """A Hugging Face tokenizer.json under the names of SentencePiece's methods; `roles` maps known roles to
    special tokens."""

    def __init__(self, described: Mapping[str, Any], roles: Mapping[str, str]):
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                "to read a tokenizer.json: pip install tokenizers; or put the model's "
                "SentencePiece file in its place."
            ) from None
        self.tokenizer = guarded(tokenizers.Tokenizer.from_str, checked_content(described))
        guarded(self.tokenizer.encode, "\U0010fffd")  # fails if unknown characters have no piece
        ids, self.added = self.tokenizer.get_vocab(), self.tokenizer.get_added_tokens_decoder()
        # In Gemma's vocabulary, </s> is an HTML tag.
        eos = roles.get("eos_token", "<eos>" if "<bos>" in ids else "</s>")
        if eos not in ids:
            raise RuntimeError(
                f"it has no {eos}, and no tokenizer_config.json next to it tells what ends a "
                "text: put the model's own there"
            )
        self.eos, self.bos = ids[eos], ids.get(roles.get("bos_token", "<bos>"), -1)
        self.pad = ids.get(roles.get("pad_token", "<pad>"), self.eos)
        self.unknown = roles.get("unk_token", "<unk>")
        # T5's sentinels come last; the SentencePiece file of the same vocabulary has none.
        self.pieces = [
            piece for piece in sorted(ids, key=ids.__getitem__) if not piece.startswith("<extra_id_")
        ]
        if [ids[piece] for piece in self.pieces] != list(range(len(self.pieces))):
            raise RuntimeError("its ids are not 0, 1, 2 and so on")
        self.bytes = byte_level(described)
        self.frame = self._frame()
        guarded(self.tokenizer.decode, list(range(min(len(self.pieces), TRIED))))

    def _frame(self) -> tuple[list[int], list[int]] | None:
        """The tokens that the file adds before and after a text; None if there are none."""
        inner, whole = (
            guarded(self.tokenizer.encode, "a", add_special_tokens=added).ids for added in (False, True)
        )
        if any(token >= len(self.pieces) for token in whole):
            raise RuntimeError(f"it frames a text by the ids {whole}, and has {len(self.pieces)} tokens")
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner and len(whole) > len(inner):
                return whole[:begin], whole[begin + len(inner) :]
        return None

    def pad_id(self) -> int:
        return self.pad

    def eos_id(self) -> int:
        return self.eos

    def bos_id(self) -> int:
        return self.bos

    def get_piece_size(self) -> int:
        return len(self.pieces)

    def id_to_piece(self, token: int) -> str:
        return self.pieces[token]

    def piece_to_id(self, piece: str) -> int:
        return self.tokenizer.token_to_id(piece) or 0

    def is_control(self, token: int) -> bool:
        added = self.added.get(token)
        return added is not None and added.special and not self.is_unknown(token)

    def is_unknown(self, token: int) -> bool:
        return self.pieces[token] == self.unknown

    def text(self, token: int) -> bytes:
        """The text of a token that is neither special nor a byte."""
        piece = self.pieces[token]
        if self.bytes is None or token in self.added or not self.bytes.keys() >= set(piece):
            return piece.replace(SPACE, " ").encode()
        return bytes(self.bytes[character] for character in piece)

    def is_byte(self, token: int) -> bool:
        return BYTE.fullmatch(self.pieces[token]) is not None

    def encode(self, texts: str | list[str]) -> Any:
        if isinstance(texts, str):
            return self.tokenizer.encode(texts, add_special_tokens=False).ids
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def byte_level(described: Mapping[str, Any]) -> dict[str, int] | None:
    """character -> byte, if a tokenizer.json's pieces consist of bytes (as in GPT-2: printable bytes are
    themselves, the others the characters from 256 on); None otherwise."""
    decoder = described.get("decoder") or {}
    if not any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ()))):
        return None
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Tokenizer:
    """A vocabulary and its special tokens, from a SentencePiece file or a tokenizer.json and the files next
    to it that define the special tokens' roles."""

    path: Path | None = None  # its file
    frame: tuple[list[int], list[int]] | None = None  # tokens around a source; None: <bos> or else eos

    def __init__(self, path: str | Path):
        path = checked_path(path) if isinstance(path, str) else path
        content = read(path, LARGEST_FILE)
        if not content:
            raise ValueError(f"the tokenizer {path} is empty: fetch it again.")
        told = read_companion(path.parent, "tokenizer_config.json")
        self.specials = {
            **specials_of(read_companion(path.parent, "special_tokens_map.json")),
            **specials_of(told),
        }
        try:
            self.processor: Any = (
                TokenizerJson(parse_json(path, content), self.specials)
                if path.suffix == ".json"
                else sentencepiece.SentencePieceProcessor(model_proto=content)
            )
        except (RuntimeError, UnicodeDecodeError) as error:  # the second if an error quotes the file
            raise ValueError(f"cannot read the tokenizer {path}: {error}") from None
        self.path = path
        self.eos_id: int = self.processor.eos_id()
        self.bos_id: int = self.processor.bos_id()  # -1: none, as in T5
        self.size: int = self.processor.get_piece_size()
        if self.eos_id < 0:
            raise ValueError(
                f"the tokenizer {path} has no piece for the end of a sequence: use the model's own."
            )
        pad = self.processor.pad_id()
        self.pad_id: int = self.eos_id if pad < 0 else pad  # any token can serve as padding
        begins = self.bos_id >= 0 and told.get("add_bos_token") is not False
        frame = getattr(self.processor, "frame", None)
        encodes = not isinstance(self.processor, TokenizerJson) or not told
        usual = ([self.bos_id] if begins else []), ([self.eos_id] if encodes and self.bos_id < 0 else [])
        self.frame = frame or usual

    @property
    def begin(self) -> list[int]:
        """The tokens before a source's."""
        return self.frame[0] if self.frame else [self.bos_id] * (self.bos_id >= 0)

    @property
    def end(self) -> list[int]:
        """The tokens after a source's."""
        return self.frame[1] if self.frame else [self.eos_id] * (self.bos_id < 0)

    def ends(self, config: Any) -> list[str]:
        """The pieces besides eos_id that end a text, according to generation_config.json or the model's
        config."""
        told = read_companion(self.path.parent, "generation_config.json") if self.path else {}
        named = told.get("eos_token_id")
        ids = {*(named if isinstance(named, list) else [named]), *getattr(config, "more_eos", ())}
        return self.pieces_of(sorted(n for n in ids if type(n) is int and n >= 0 and n != self.eos_id))

    @cached_property
    def chat(self) -> ChatTemplate | None:
        """The chat template next to the file, if any. Raises ValueError if it cannot be read."""
        return ChatTemplate.find(self.path.parent, self.specials) if self.path else None

    def template(self) -> ChatTemplate:
        """The chat template. Raises ValueError if there is none."""
        if self.chat is None:
            raise ValueError(
                f"there is no chat template next to {self.path}: put the model's "
                "chat_template.jinja or tokenizer_config.json there."
            )
        return self.chat

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text with the beginning of the answer, without the tokens that framed() adds.
        Raises ValueError if there is no template or if it refuses the conversation."""
        text = self.template().render(messages)
        return text.removeprefix(self.specials.get("bos_token", "<bos>")) if self.begin else text

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without those that begin and end a sequence."""
        if len(texts) == 1:  # for lists SentencePiece starts threads, which takes longer than one text
            return [self.processor.encode(texts[0])]
        return self.processor.encode(texts)

    def framed(self, tokens: Iterable[int], limit: int | None = None) -> list[int]:
        """The ids that a model reads for a source of `tokens`, truncated to `limit` ids.

        An encoder's source ends with the end-of-sequence token and is truncated at the end. A decoder-only
        model's prompt may begin with <bos> and is truncated at the beginning.
        """
        tokens = list(tokens)
        excess = 0 if limit is None else max(len(tokens) + len(self.begin) + len(self.end) - limit, 0)
        kept = tokens[: len(tokens) - excess] if self.end else tokens[excess:]
        return [*self.begin, *kept, *self.end]

    def id_of(self, piece: str) -> int | None:
        """The id of a piece; None if it does not exist."""
        token = self.processor.piece_to_id(piece)
        return token if self.processor.id_to_piece(token) == piece else None

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; ids past the vocabulary (padded logits) are skipped."""
        return self.processor.decode([int(t) for t in tokens if 0 <= t < self.size])

    def pieces_of(self, tokens: Iterable[int]) -> list[str]:
        return [self.processor.id_to_piece(n) for n in tokens if n < self.size]

    def pieces(self) -> list[str]:
        return self.pieces_of(range(self.size))

    def surfaces(self) -> list["Surface"]:
        """The surface form of each token."""
        processor, roles = self.processor, {self.pad_id: "pad", self.bos_id: "bos", self.eos_id: "eos"}
        surfaces = []
        for token, piece in enumerate(self.pieces()):
            if token in roles or processor.is_control(token):
                surfaces.append(Surface(roles.get(token, piece), b""))
            elif processor.is_unknown(token):
                surfaces.append(Surface("unknown", b""))
            elif processor.is_byte(token):
                surfaces.append(Surface("byte", bytes([int(piece[1:-1], 16)])))
            else:
                text = processor.text(token) if isinstance(processor, TokenizerJson) else None
                surfaces.append(
                    Surface("piece", piece.replace(SPACE, " ").encode() if text is None else text)
                )
        return surfaces


def as_user(texts: Iterable[str], *tokenizers: Tokenizer) -> list[str]:
    """Formats each text as a user's message with the first chat template among the tokenizers."""
    tokenizer = next((candidate for candidate in tokenizers if candidate.chat is not None), tokenizers[-1])
    return [tokenizer.conversation([{"role": "user", "content": text}]) for text in texts]


def train_tokenizer(
    texts: Iterable[str], path: str | Path, size: int, *, bos: bool = False, pieces: str = "unigram"
) -> None:
    """Trains a SentencePiece vocabulary of at most `size` pieces with T5's special ids, or (`bos`) with
    Gemma's: <bos> 2 and <unk> 3. `pieces` is a name in PIECES: unigram; bpe; char, the most common
    characters; or word, the most common words and numbers with the space before them, then the most common
    characters. Other characters are spelled in bytes: with 260 char pieces (261 with `bos`), one piece is the
    space and the rest are bytes and special tokens."""
    model = io.BytesIO()
    special: dict[str, Any] = {"bos_id": -1, "unk_id": 2}
    if bos:
        special = {"bos_id": 2, "unk_id": 3, "eos_piece": "<eos>", "bos_piece": "<bos>"}
    kind = PIECES[pieces]
    if kind.words:
        texts = list(texts)
        special["user_defined_symbols"] = common_words(texts, size - BYTES - (4 if bos else 3))
        texts.append(".")  # SentencePiece needs a character outside words
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=size,
            model_type=kind.model_type,
            pad_id=0,
            eos_id=1,
            **special,
            byte_fallback=True,
            character_coverage=0.9995,
            hard_vocab_limit=False,
            minloglevel=2,
            num_threads=1,
        )
    except RuntimeError as error:
        raise too_few_pieces(size, str(error)) from None
    path = checked_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model.getvalue())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}.") from None


def common_words(texts: Iterable[str], room: int) -> list[str]:
    """The space and the most common words and numbers of `texts`, each with the space before it: with equally
    common punctuation, `room` pieces."""
    counts = Counter(word for text in texts for word in WORD.findall(SPACE + text.replace(" ", SPACE)))
    common = [word for word, _ in counts.most_common(max(room - 1, 0)) if len(word) > 1]
    return [*common, SPACE]  # a space in bytes would not decode to a space


def too_few_pieces(size: int, said: str) -> ValueError:
    """The error of a SentencePiece training with `size` pieces, in terms of our flags."""
    if needed := re.search(r"required_chars\. \d+ vs (\d+)", said):
        return FieldError(
            "tokenizer_size",
            size,
            f"set it to more than {needed[1]}.",
            f"tokenizer_size is {size}, and single characters and bytes alone are {needed[1]} pieces",
        )
    return ValueError(
        f"cannot train a vocabulary of {size} pieces ({said.strip()}); change --tokenizer-size, or check "
        "that the training split holds enough text."
    )


def text_of(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...]) -> str:
    """The tokens' text up to the first of the `stop` sequences."""
    stopped = up_to_stop(tokenizer, tokens, stop)
    return stopped[1] if stopped else tokenizer.decode(tokens)


def up_to_stop(
    tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...], goes_on: bool = False
) -> tuple[list[int], str] | None:
    """The tokens up to the one that completes the first of the `stop` sequences, and the text before it; None
    if there is none. A sequence is a piece (<end_of_turn>) or any text.

    The result does not depend on the number of tokens known so far: if more may follow (`goes_on`), an
    unfinished character at the end is not yet text.
    """
    if not stop:
        return None
    pieces = {tokenizer.id_of(sequence) for sequence in stop}
    end = next((n for n, token in enumerate(tokens) if token in pieces), None)
    last = len(tokens) if end is None else end

    def text(size: int) -> str:
        decoded = tokenizer.decode(tokens[:size])
        return decoded if size == last and (end is not None or not goes_on) else decoded.rstrip(UNFINISHED)

    if not any(sequence in text(last) for sequence in stop):
        return None if end is None else (tokens[: end + 1], text(last))
    size = next(n for n in range(1, last + 1) if any(sequence in text(n) for sequence in stop))
    return tokens[:size], text(size)[: min(at for sequence in stop if (at := text(size).find(sequence)) >= 0)]


def pad(rows: Sequence[Sequence[int] | np.ndarray], size: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [B, size] and the rows' lengths [B]."""
    tokens = np.full((len(rows), size), pad_id, np.int32)
    for n, row in enumerate(rows):
        tokens[n, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)
