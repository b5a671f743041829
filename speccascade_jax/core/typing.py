"""Shared types: the LanguageModel protocol, Prefix, SamplingOptions.

Shape letters: B rows, T tokens in this call, S source, L buffer, G block size (gamma),
V vocabulary, H heads, D width.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Float, Int

Array = jax.Array
Params = Any
Cache = Any


class Prefix(NamedTuple):
    """What decoding continues: a prompt, or the start token of an encoder-decoder."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]


@partial(jax.tree_util.register_dataclass, data_fields=["temperature", "top_p"], meta_fields=["top_k"])
@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How a distribution is transformed before sampling, in this order (SPEC section 3).

    temperature and top_p are traced: sweeping them compiles once. top_k is static (None: off);
    top_p=None leaves the nucleus, and the sort it needs, out of the program.
    """

    temperature: float | Float[Array, ""] = 1.0
    top_p: float | Float[Array, ""] | None = None
    top_k: int | None = None


@runtime_checkable
class LanguageModel(Protocol):
    """A next-token model whose cache is an explicit pytree with a per-row `length`.

    Static and hashable; parameters are passed in. Four laws, tested for every model:
      append    extend() writes at cache.length and raises it by T; logits[:, t] predict what
                follows tokens[:, t]
      chunk     extending by a+b equals extending by a, then by b
      rollback  lowering cache.length, then extending, equals never having written
      rows      no row's logits depend on another row
    """

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, params: Params, inputs: Int[Array, "B S"], input_length: Int[Array, " B"],
                max_length: int) -> tuple[Prefix, Cache]:
        """The prefix to continue and a cache that covers all of it but its last token.

        `max_length` positions are allocated, the prefix included.
        """
        ...

    def extend(self, params: Params, tokens: Int[Array, "B T"], cache: Cache
               ) -> tuple[Float[Array, "B T V"], Cache]:
        """Float32 logits after each token, and the longer cache."""
        ...
