"""Decodes the same models with other libraries, for scripts/benchmark.py.

Both are optional: transformers with torch, and ctranslate2.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from speccascade_jax.checkpoints import Checkpoint, load, save
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.t5 import T5Model

Decode = Callable[[list[int]], tuple[float, list[int]]]
"""Source tokens -> seconds, and the written tokens including the end-of-sequence token."""
NEEDED = {"hf": ("torch", "transformers"), "ctranslate2": ("ctranslate2", "torch", "transformers")}


def check_installed(libraries: Sequence[str]) -> None:
    """Raises FieldError with the remedy if a module that one of `libraries` needs is missing."""
    for library in libraries:
        needed = NEEDED[library]
        if any(find_spec(module) is None for module in needed):
            raise FieldError(
                "vs",
                library,
                f"pip install {' '.join(needed)}",
                f"comparing with {library} needs {', '.join(needed)}",
            )


def exported(checkpoint: Checkpoint, folder: Path) -> str:
    """Writes the checkpoint as a float32 Hugging Face folder, which both libraries read."""
    save(folder, checkpoint, "huggingface", np.float32)
    # Without this file, a T5 tokenizer adds a hundred sentinels and exceeds the model's vocabulary.
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "legacy": True})
    )
    return str(folder)


def decoders(
    libraries: Sequence[str], run: DecodeConfig, cascade: Cascade, block_size: int
) -> dict[str, Decode]:
    """The decoders of `libraries` for float32 exports of a pair. Raises FieldError unless both models are
    T5."""
    decoders: dict[str, Decode] = {}
    if not libraries:
        return decoders
    if not all(isinstance(model, T5Model) for model in (cascade.drafter, cascade.verifier)):
        raise FieldError("vs", libraries, "the config has other models.", "--vs compares T5 models")
    with tempfile.TemporaryDirectory() as folder:
        drafter, verifier = (
            exported(load(path), Path(folder) / name)
            for name, path in (("drafter", run.drafter), ("verifier", run.verifier))
        )
        if "hf" in libraries:
            decoders |= transformers_decoders(
                verifier, run.max_new_tokens, drafter=drafter, block_size=block_size
            )
        if "ctranslate2" in libraries:
            decoders |= ctranslate2_decoders(verifier, cascade.tokenizer.pieces(), run.max_new_tokens)
    return decoders


def transformers_decoders(
    verifier: str,
    max_new_tokens: int,
    *,
    drafter: str | None = None,
    block_size: int = 5,
    min_new_tokens: int = 0,
) -> dict[str, Decode]:
    """Greedy decoding in transformers, of the verifier alone and assisted by the drafter, at batch size 1 in
    float32."""
    import torch
    import transformers

    def loaded(path):
        model = transformers.T5ForConditionalGeneration.from_pretrained(path).eval()
        # Its decoding cache uses the encoder's number of layers for the decoder.
        model.config.num_layers = model.config.num_decoder_layers
        return model

    large = loaded(verifier)
    version = f"transformers {transformers.__version__}"

    least = {"min_new_tokens": min_new_tokens} if min_new_tokens else {}  # assisted decoding refuses even 0

    def decoder(**options) -> Decode:
        def decode(source):
            inputs = torch.tensor([source])
            began = time.perf_counter()
            with torch.inference_mode():
                output = large.generate(
                    inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, **least, **options
                )
            return time.perf_counter() - began, output[0, 1:].tolist()

        return decode

    decoders = {f"{version}, verifier": decoder()}
    if drafter is not None:
        small = loaded(drafter)
        small.generation_config.num_assistant_tokens = block_size
        small.generation_config.num_assistant_tokens_schedule = "constant"
        small.generation_config.assistant_confidence_threshold = 0.0
        decoders[f"{version}, assisted"] = decoder(assistant_model=small)
    return decoders


def ctranslate2_decoders(
    verifier: str, pieces: list[str], max_new_tokens: int, *, min_new_tokens: int = 0
) -> dict[str, Decode]:
    """Greedy decoding of the verifier alone in CTranslate2, at batch size 1 in float32 and int8."""
    os.environ.setdefault("CT2_USE_MKL", "0")  # its own kernels are faster
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    ids = {piece: n for n, piece in enumerate(pieces)}
    decoders: dict[str, Decode] = {}
    for kind in ("float32", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            TransformersConverter(verifier).convert(folder, quantization=kind, force=True)
            translator = ctranslate2.Translator(folder, compute_type=kind, intra_threads=os.cpu_count() or 1)

        def decode(source, translator=translator):
            words = [pieces[n] for n in source]
            began = time.perf_counter()
            output = translator.translate_batch(
                [words],
                beam_size=1,
                return_end_token=True,
                min_decoding_length=max(min_new_tokens, 1),
                max_decoding_length=max_new_tokens,
            )
            spent = time.perf_counter() - began
            return spent, [ids[piece] for piece in output[0].hypotheses[0]]

        decoders[f"ctranslate2 {ctranslate2.__version__} {kind}, verifier"] = decode
    return decoders
