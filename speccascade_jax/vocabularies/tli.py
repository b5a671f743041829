"""Token-level intersection (Timor et al., ICML 2025, arXiv 2502.05202, Algorithm 4)."""

from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int

from speccascade_jax.core.protocols import Params
from speccascade_jax.models.decoder import DecoderOnlyModel
from speccascade_jax.models.quantization import columns_of, tied_kernel
from speccascade_jax.models.t5 import T5Model
from speccascade_jax.vocabularies.strategy import Strategy


def pruned(model: Any, params: Params, keep: Int[np.ndarray, " I"]) -> tuple[Params, Any, bool]:
    """Restricts the logits to the columns `keep`, in that order. Returns TranslatedParams' `drafter` and
    `head`, and False if the model's head cannot be cut and keeps all columns."""
    if isinstance(model, T5Model | DecoderOnlyModel) and not model.config.tied_embeddings:
        flat = dict(nnx.to_flat_state(params))
        kernel = flat["head", "kernel"]
        flat["head", "kernel"] = kernel.replace(columns_of(kernel.get_value(), keep))
        return nnx.from_flat_state(flat), None, True
    if isinstance(model, T5Model | DecoderOnlyModel):
        return params, columns_of(tied_kernel(params["embedding"].get_value()), keep), True
    return params, None, False


TLI = Strategy(
    "tli", "the drafter writes the tokens that both have, its law renormalised over them", head=pruned
)
