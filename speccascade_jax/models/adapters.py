"""A kernel with a low-rank adapter next to it (LoRA: Hu et al. 2021, arXiv 2106.09685)."""

import dataclasses
from functools import partial
from typing import Any

import jax

Array = jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class AdaptedKernel:
    """The matrix base + scale * a @ b, [in, out], which projections apply without computing it."""

    base: Any  # [in, out], without the adapter
    a: Any  # float32 [in, rank]
    b: Any  # float32 [rank, out]
    scale: float  # alpha / rank
