"""The protocols of the core: models, samplers, and the values that pass between them.

Shape letters: B rows, T tokens in this call, S source, L buffer, G block size (gamma),
V vocabulary, H heads, D width, K verifiers of a hierarchy.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core.randomness import Noise
from speccascade_jax.core.transforms import SamplingOptions

Array = jax.Array
AnyArray = jax.Array | np.ndarray
Params = Any
Cache = Any
Counts = Any
NO_TOKEN = -1  # an end-of-sequence id that matches no token
NO_LIMIT = 2**30
MASK = -1  # read in place of an unknown token, after which the model still predicts
UNSEEN = -2  # like MASK, but no other position attends to it


class Prefix(NamedTuple):
    """The tokens to continue: a prompt, or the start token of an encoder-decoder."""

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]


@runtime_checkable
class LanguageModel(Protocol):
    """A next-token model whose cache is an explicit pytree with a per-row `length`.

    Static and hashable; parameters are passed in. Five laws, tested for every model:
      append      extend() writes at cache.length and raises it by T; logits[:, t] predict what
                  follows tokens[:, t]
      chunk       extending by a+b equals extending by a, then by b
      rollback    roll_back(cache, n), then extending, equals never having written past n
      rows        no row's logits depend on another row
      vocabulary  tokens in and logits out are over the target vocabulary, whatever lies inside

    Every array of a cache begins with the axis of rows. A model with a different cache layout must also
    define insert(cache, fresh, slots, like_fresh): see core.nests.insert.

    A model's state after part of a prompt can be copied into other rows if the model has two more methods.
    segment(cache, row, start, size) returns the cache's content for positions start .. start+size-1 of a row;
    with_segment(cache, segment, rows, start) returns the cache with that content at the end of the chosen
    rows [B].
    """

    @property
    def vocab_size(self) -> int: ...

    def prefill(
        self, params: Params, inputs: Int[Array, "B S"], input_length: Int[Array, " B"], max_length: int
    ) -> tuple[Prefix, Cache]:
        """The prefix to continue, and a cache that covers all of it except its last token.

        `max_length` positions are allocated, including the prefix.
        """
        ...

    def extend(
        self, params: Params, tokens: Int[Array, "B T"], cache: Cache
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Float32 logits after each token, and the longer cache."""
        ...

    def roll_back(self, cache: Cache, length: Int[Array, " B"]) -> Cache:
        """The cache as it was when it covered `length` positions, which must not exceed its current
        length."""
        ...


class Origin(IntEnum):
    """The origin of a token."""

    DRAFT = 0  # drafted and accepted
    CORRECTION = 1  # drawn from the residual at a rejection
    BONUS = 2  # drawn from the target after a wholly accepted draft
    MODEL = 3  # a single model, decoding autoregressively

    def at(self, level: int) -> int:
        """The code in a Block for a token with this origin, written by `level` of a hierarchy."""
        return self + len(Origin) * level


class Markers(NamedTuple):
    """The token sequences after which each row has another lenience; see core.spans."""

    tokens: Int[AnyArray, "B M L"]  # right-aligned, padded with NO_TOKEN; only NO_TOKEN: no marker
    alphas: Float[AnyArray, "B M K"]  # the lenience after it, of each verifier from the smallest up


class Spans(NamedTuple):
    """A row's markers, and the last one that it has written."""

    markers: Markers
    first: Int[Array, " B"]  # the position of the first written token
    latest: Int[Array, " B"]  # the marker that the committed tokens have completed last; -1: none


class Rows(NamedTuple):
    """The request of each row and its state when a sampler writes the next block."""

    noise: Noise
    options: SamplingOptions  # a value for each row
    alphas: Float[Array, "B K"]  # lenience of each verifier, from the smallest up
    methods: Int[Array, "B K"]  # index of the method of each verifier
    verifications: Int[Array, " B"]  # index of the verification, the same at every level
    recent: Int[Array, "B R"]  # the last committed tokens, the newest last; NO_TOKEN before the first
    start: Int[Array, " B"]  # the position of the next one
    room: Int[Array, " B"]  # most tokens that it may take; 0: the row is finished
    want: Int[Array, " B"] | None = None  # tokens that it can use; None: as many as `room`
    so_far: Any = None  # the row's counts so far, for a sampler that `remembers`
    spans: Spans | None = None  # None: no row has a marker

    @property
    def last(self) -> Int[Array, " B"]:
        return self.recent[:, -1]


class Block(NamedTuple):
    """Up to N tokens for each row; entries at or past `size` are scratch."""

    tokens: Int[Array, "B N"]
    probs: Float[Array, "B N V"]  # the distribution that each token was drawn from
    untransformed: Float[Array, "B N V"]  # the same, built from untransformed distributions
    origin: Int[Array, "B N"]  # Origin.at(level)
    size: Int[Array, " B"]  # 0 .. min(N, room)


@runtime_checkable
class Sampler(Protocol):
    """Static and hashable. Optional capabilities are members of Abilities."""

    @property
    def models(self) -> Any:
        """Its language models, a nest of tuples that `params` and `caches` follow."""
        ...

    @property
    def width(self) -> int:
        """N: the largest number of tokens that a step emits."""
        ...

    @property
    def level(self) -> int:
        """The number of samplers that draft below this one."""
        ...

    @property
    def overhang(self) -> int:
        """The number of positions past the committed ones that a step may write into its caches."""
        ...

    def plain(self, counts: Counts) -> dict[str, Any]:
        """One row's counts as plain numbers, by name. `model_passes` or `drafter_passes` counts the calls of
        the smallest model."""
        ...

    def step(self, params: Params, caches: Cache, rows: Rows, eos_id: int) -> tuple[Block, Cache, Counts]:
        """Returns one block, cut after the first eos_id; the caches; and the counts, arrays [B, ...].

        On return the caches cover start + size - 1 positions.
        """
        ...


Laws = tuple[Float[Array, "B N V"], Float[Array, "B N V"]]
"""Of each token: built from the models' own distributions, and from the transformed ones."""


class Abilities(NamedTuple):
    """The optional members of a sampler, and their defaults."""

    verifications: tuple[Any, ...] = ()  # the verifications that rows.verifications indexes
    remembers: bool = False  # a step reads rows.so_far
    noise_sizes: tuple[tuple[int, ...], ...] | None = None  # see core.rounds.noise_sizes_of
    at_once: bool = False  # as a drafter, one step emits a whole draft
    behind: int | None = None  # committed tokens, besides the last, that its caches may lack; None: always 0
    catches_up: bool = False  # as a drafter, its cache covers the tokens that its `model` has read
    resizes: bool = False  # of_blocks(size) drafts less in the same states; see Speculative
    proposed: bool = False  # its drafts are put into its first cache between two rounds
    # (params, caches, rows, tokens [B, N]) -> Laws of the token after each prefix of `tokens`, whose first is
    # the one the caches lack; those of its drafts
    laws: Callable[..., Laws] | None = None
    draft_laws: Callable[..., Laws] | None = None
    # (methods, one for each verifier from the smallest up; none: the sampler's own) -> whether `laws` gives
    # the law of what they write, wherever the rounds begin
    states_law: Callable[[Sequence[Any]], bool] = lambda methods: True


def ability_of(sampler: Sampler, name: str) -> Any:
    """A sampler's optional member of this name, or the default if it lacks that.

    Members are read singly: many ask the drafter below for theirs, and all of them together would ask it
    several times at each level.
    """
    return getattr(sampler, name, Abilities._field_defaults[name])


def states_law(sampler: Sampler, methods: Sequence[Any] = ()) -> bool:
    """Whether a sampler's laws() gives the law of what `methods` write, one for each verifier from the
    smallest up; without any, of what its own methods do."""
    return ability_of(sampler, "laws") is not None and ability_of(sampler, "states_law")(methods)


def laws(sampler: Sampler, params: Params, caches: Cache, rows: Rows, tokens: Int[Array, "B N"]) -> Laws:
    """The law of the token after each prefix of `tokens`, whose first is the one the caches lack: built from
    the models' own distributions, and from the transformed ones. The second is what a text is drawn from.

    Raises ValueError for a sampler whose law is not one of the prefix.
    """
    stated = ability_of(sampler, "laws")
    if stated is None:
        raise ValueError(f"{type(sampler).__name__} states no law of its tokens by their prefix.")
    return stated(params, caches, rows, tokens)
