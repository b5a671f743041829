"""Networks of several language models with one set of parameters, one cache and one prefill.

A network is the LanguageModel of its largest member. In a cascade, each member is represented by a `Member`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from speccascade_jax.core.protocols import AnyArray, Array, Cache, Params, Prefix
from speccascade_jax.models.base import ForcedModel, Keys
from speccascade_jax.models.layers import AfterLayer, last_written


class NetworkShape:
    """The fields that a network's config takes from its full model's config, which is the field named
    `full_part`."""

    full_part: ClassVar[str]
    learns_ahead: ClassVar[bool] = False  # the drafter is trained on its own outputs: forced_members(ahead=)

    @property
    def vocab_size(self) -> int:
        return int(getattr(self, self.full_part).vocab_size)

    @property
    def pad_id(self) -> int:
        return int(getattr(self, self.full_part).pad_id)

    @property
    def eos_id(self) -> int:
        return int(getattr(self, self.full_part).eos_id)


@runtime_checkable
class Network(Protocol):
    """A LanguageModel with several members. Between two calls of roll_back(), all members read the same text.

    A network that can be saved also has missing(name), which returns a message for an unknown member: "has
    ..., not ...". If its smallest member drafts several tokens in one pass, it has `draft_size`, their
    number.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def config(self) -> Any: ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the members, the smallest first, the full model last."""
        ...

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Cache]:
        """The prefill, shared by all members."""
        ...

    def extend_member(
        self, number: int, params: Params, tokens: Int[AnyArray, "B T"], cache: Cache
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """extend() by one member, from the end of its part of the cache."""
        ...

    def lengths(self, cache: Cache) -> Int[Array, "B M"]:
        """The number of positions that each member's part of the cache covers."""
        ...

    def roll_back(self, cache: Cache, length: Int[AnyArray, " B"]) -> Cache:
        """Makes every member's part cover `length` positions, or fewer if it covers fewer now."""
        ...

    def insert(self, cache: Cache, fresh: Cache, slots: Int[AnyArray, " R"], like_fresh: bool) -> Cache: ...


@dataclasses.dataclass(frozen=True)
class Member:
    """One model of a network: a LanguageModel whose parameters and cache are those of the whole network."""

    member_of: Network
    number: int

    @property
    def vocab_size(self) -> int:
        return self.member_of.vocab_size

    @property
    def config(self) -> Any:
        """The network's config."""
        return self.member_of.config

    def extend(
        self, params: Params, tokens: Int[AnyArray, "B T"], cache: Cache
    ) -> tuple[Float[Array, "B T V"], Cache]:
        return self.member_of.extend_member(self.number, params, tokens, cache)

    @property
    def drafts_at_once(self) -> int | None:
        """The number of tokens drafted in one pass from masks (core.samplers.block); None if the member reads
        each token before it writes the next."""
        return getattr(self.member_of, "draft_size", None) if self.number == 0 else None

    def length(self, cache: Cache) -> Int[Array, " B"]:
        """The number of positions that this member's part of the cache covers."""
        return self.member_of.lengths(cache)[:, self.number]

    # The rest is delegated to the network.

    def prefill(
        self, params: Params, inputs: Int[AnyArray, "B S"], input_length: Int[AnyArray, " B"], max_length: int
    ) -> tuple[Prefix, Cache]:
        return self.member_of.prefill(params, inputs, input_length, max_length)

    def roll_back(self, cache: Cache, length: Int[AnyArray, " B"]) -> Cache:
        return self.member_of.roll_back(cache, length)

    def insert(self, cache: Cache, fresh: Cache, slots: Int[AnyArray, " R"], like_fresh: bool) -> Cache:
        return self.member_of.insert(cache, fresh, slots, like_fresh)


def members(network: Network) -> tuple[Member, ...]:
    """All members, the smallest first, the full model last."""
    return tuple(Member(network, number) for number in range(len(network.names)))


class FlaxNetwork(ForcedModel):
    """A network, alone its full model, whose small members can learn from that."""

    @property
    def full(self) -> Any:
        """The full model without the small members."""
        raise NotImplementedError

    def forced_states(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Float[Array, "B T D"]:
        part = params[self.config.full_part]
        return self.full.forced_states(part, source, source_length, target, key, after)

    def head_logits(self, params: nnx.State, states: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        return self.full.head_logits(params[self.config.full_part], states)

    def forced_members(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
        **more: Any,
    ) -> tuple[Float[Array, "B T V"], ...]:
        """Teacher forcing by every member, the full model last, from one pass of the full model. `after` is
        called between its layers. key and `more` are as in member_logits()."""
        read = self.full_pass(params, source, source_length, target, key, after)
        return self.member_logits(params, read, source, source_length, target, key, **more)

    def full_pass(
        self,
        params: nnx.State,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
        after: AfterLayer = last_written,
    ) -> Any:
        """What the members read of the full model: a pytree of arrays [B, ...] that depends on its parameters
        only."""
        raise NotImplementedError

    def member_logits(
        self,
        params: nnx.State,
        read: Any,
        source: Int[AnyArray, "B S"],
        source_length: Int[AnyArray, " B"],
        target: Int[AnyArray, "B T"],
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T V"], ...]:
        """forced_members() after the full model's pass."""
        raise NotImplementedError


class PairModel(FlaxNetwork):
    """A network of two members, "drafter" and "verifier", with parameters under these names. Used alone it is
    the verifier. Its Flax network has draft(tokens, cache), the drafter's extend(), and advance(tokens,
    cache), which returns the input of verifier.logits() in place of logits.
    """

    names: ClassVar[tuple[str, ...]] = ("drafter", "verifier")
    drafter_name: ClassVar[str] = "a drafter"  # its name in messages
    by_prefix: ClassVar[bool] = False
    """Whether the drafter's distribution depends only on the text, not on where drafts began."""
    by_place: ClassVar[bool] = True
    """Whether it depends only on the text and on where the last draft began, because the drafter's entries
    for committed tokens are those made by the verifier."""

    @property
    def members(self) -> tuple[Member, ...]:
        return members(self)  # type: ignore[arg-type]  # a subclass is a Network

    def missing(self, name: str) -> str:
        return f"holds {self.drafter_name} and its verifier, no {name!r}: write @drafter or @verifier"

    def around(self, full: nnx.State, seed: int) -> nnx.State:
        """Parameters that contain the verifier's `full` (not copied) and a newly initialised drafter."""

        def begun() -> nnx.State:
            network = self.network(Keys(seed))
            del network.verifier
            return nnx.state(network)

        return nnx.from_flat_state(beneath("verifier", full) | dict(nnx.to_flat_state(jax.jit(begun)())))

    def extend(
        self, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: Any
    ) -> tuple[Float[Array, "B T V"], Any]:
        """The verifier's extend()."""
        return self.extend_member(1, params, tokens, cache)

    def extend_member(
        self, number: int, params: nnx.State, tokens: Int[AnyArray, "B T"], cache: Any
    ) -> tuple[Float[Array, "B T V"], Any]:
        network = self.merged(params)
        if number == 0:
            return network.draft(jnp.asarray(tokens), cache)
        x, cache = network.advance(tokens, cache)
        return network.verifier.logits(x), cache


def member(model: Any, name: str | None, where: Any) -> Any:
    """The member `name` of a network; its full model without a name. Any other model is its only member.

    Raises ValueError, naming the checkpoint `where`, for a name that the network does not have.
    """
    if not hasattr(model, "names"):
        if name is None:
            return model
        raise ValueError(
            f"{where} is a single model without a member {name!r}: give the folder "
            f"without @{name}, or fit exits to it with scripts/finetune.py."
        )
    name = model.names[-1] if name is None else name
    if name not in model.names:
        raise ValueError(f"{where} {model.missing(name)}.")
    return Member(model, model.names.index(name))


def beneath(name: str, state: nnx.State) -> dict[tuple[Any, ...], Any]:
    """The parameters of a part, by their paths in the network: the same objects."""
    return {(name, *path): value for path, value in nnx.to_flat_state(state)}


def check_order(models: Sequence[Any], params: Sequence[Any]) -> None:
    """Raises ValueError if the members of a network are not adjacent and in order, or if one that drafts
    several tokens at once does not draft for its verifier."""
    networks = [getattr(model, "member_of", None) for model in models]
    for n, model in enumerate(models):
        if getattr(model, "drafts_at_once", None) is None:
            continue
        if n > 0 or len(models) == 1 or networks[1] != networks[0]:
            raise ValueError(
                f"model {n} drafts several tokens at once from what its verifier has read, and does nothing "
                "else: name it first, and its verifier right after it."
            )
    for n, network in enumerate(networks):
        if network is None or network not in networks[:n]:
            continue
        if network != networks[n - 1] or params[n] is not params[n - 1]:
            raise ValueError(
                "members of one network must be adjacent, and two networks of one "
                f"shape cannot be combined: see models {networks.index(network)} and {n}."
            )
        if models[n - 1].number >= models[n].number:
            names = [network.names[models[k].number] for k in (n - 1, n)]
            raise ValueError(
                f"member {names[0]} comes before member {names[1]}: name each once, the smallest first."
            )
