"""Text in, text out: tokenizers (and the text API over generate)."""

import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece


class Tokenizer:
    """A SentencePiece vocabulary with T5's special tokens."""

    def __init__(self, path: str | Path):
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_proto=Path(path).read_bytes())
        except (OSError, RuntimeError) as error:
            raise ValueError(f"cannot read the SentencePiece model {path}: {error}") from None
        self.pad_id: int = self.processor.pad_id()
        self.eos_id: int = self.processor.eos_id()
        self.size: int = self.processor.get_piece_size()

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without an end-of-sequence token."""
        return self.processor.encode(texts)

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode([t for t in tokens if 0 <= t < self.size])


def train_tokenizer(texts: Iterable[str], path: str | Path, size: int) -> None:
    """Trains a SentencePiece unigram vocabulary of `size` pieces with T5's special ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=size, model_type="unigram",
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, byte_fallback=True, character_coverage=0.9995,
        minloglevel=2, num_threads=1)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(model.getvalue())
