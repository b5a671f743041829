"""The compiled decoding loop: runs a sampler's rounds until every row is finished.

Functions:

    generate              decodes a batch in one call
    begin, run, finish    the same in steps; scheduling.programs puts new requests into finished rows
    caught_up             prepares for drafting after rounds without it
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Key

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.nests import each, fitted
from speccascade_jax.core.protocols import (
    NO_TOKEN,
    AnyArray,
    Cache,
    Counts,
    Markers,
    Origin,
    Params,
    Prefix,
    Rows,
    Sampler,
    ability_of,
)
from speccascade_jax.core.randomness import noise
from speccascade_jax.core.rounds import add, after, noise_sizes_of, placed_at, step
from speccascade_jax.core.spans import begun, committed, window
from speccascade_jax.core.transforms import SamplingOptions

Array = jax.Array


class Requests(NamedTuple):
    """The request of each row."""

    keys: Key[Array, " B"]
    inputs: Any  # [B, S], or nested like the models if they read different tokens
    input_length: Int[Array, " B"]  # 0: the row stays empty
    limit: Int[Array, " B"]  # most tokens to write
    options: SamplingOptions  # every value [B]
    alphas: Float[Array, "B K"]
    methods: Int[Array, "B K"]  # index of the method of each verifier
    verifications: Int[Array, " B"]  # index among the sampler's verifications
    markers: Markers | None = None  # None: no row has markers


class History(NamedTuple):
    """The state of a row after each of its last H rounds; round n is stored at index n modulo H."""

    rounds: Int[Array, " B"]
    emitted: Int[Array, "B H"]
    counts: Counts  # [B, H, ...]


class State(NamedTuple):
    """The state of the decoding loop. Every array, except those of `caches`, begins with the axis of rows."""

    tokens: Int[Array, "B N"]  # emitted tokens; scratch from `emitted` on
    origin: Int[Array, "B N"]
    emitted: Int[Array, " B"]
    rows: Rows
    caches: Cache
    counts: Counts
    history: History | None  # None if not needed
    before: Int[Array, " B"]  # the last token of the prefix


class Generation(NamedTuple):
    """The outputs. tokens, origin and level are -1 from `length` on, which counts the end-of-sequence
    token."""

    tokens: Int[Array, "B N"]
    origin: Int[Array, "B N"]
    level: Int[Array, "B N"]  # of the model that wrote the token; 0 is the smallest
    length: Int[Array, " B"]
    counts: Counts


def requests(
    sampler: Sampler,
    keys: Key[Array, " B"],
    inputs: Any,
    input_length: Int[AnyArray, " B"],
    options: SamplingOptions,
    alphas: Any,
    methods: Any,
    limits: Any,
    max_new_tokens: int,
    verifications: Any = None,
    markers: Markers | None = None,
) -> Requests:
    """The arguments of generate() with a value for every row. Raises FieldError for wrong shapes."""
    rows, levels = input_length.shape[0], sampler.level
    by_level = {
        "alphas": jnp.asarray(alphas, jnp.float32),
        "methods": jnp.zeros(levels, jnp.int32) if methods is None else jnp.asarray(methods),
    }
    for name, value in by_level.items():
        if value.shape not in ((levels,), (rows, levels)):
            raise FieldError(
                name,
                value.shape,
                f"give [{levels}], or [{rows}, {levels}] for a value per row.",
                f"{name} has shape {value.shape}, and this sampler has {levels} verifiers",
            )
        by_level[name] = jnp.broadcast_to(value, (rows, levels))
    limit = jnp.broadcast_to(jnp.asarray(max_new_tokens if limits is None else limits, jnp.int32), (rows,))
    inputs = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), inputs)
    ways = jnp.broadcast_to(jnp.asarray(0 if verifications is None else verifications, jnp.int32), (rows,))
    options = options.of_rows(rows)
    return Requests(
        keys,
        inputs,
        jnp.asarray(input_length),
        limit,
        options,
        **by_level,
        verifications=ways,
        markers=markers,
    )


def begin(
    sampler: Sampler,
    params: Params,
    batch: Requests,
    *,
    max_new_tokens: int,
    history: int = 0,
    eos_id: int = NO_TOKEN,
) -> State:
    """Prefills every model; rows with input_length 0 are finished from the start and stay empty.

    history: the number of past rounds to record. eos_id: the value later passed to run(), if any; the shapes
    of a round's counts then come from that round, which is traced only once.
    """
    length = prompt_width(sampler, params, batch) + max_new_tokens + sampler.overhang
    prefix, caches = prefilled(sampler, params, batch, length)
    last = jnp.take_along_axis(prefix.tokens, prefix.length[:, None] - 1, axis=1)[:, 0]
    room = jnp.where(batch.input_length > 0, jnp.clip(batch.limit, 0, max_new_tokens), 0).astype(jnp.int32)
    blank = jnp.zeros((len(room), max_new_tokens + sampler.width), jnp.int32)
    before = max(2**sampler.level, window(batch.markers, sampler.overhang))
    rows = Rows(
        noise(batch.keys, noise_sizes_of(sampler), length, by_round(sampler, batch.verifications)),
        batch.options,
        batch.alphas,
        batch.methods,
        batch.verifications,
        jnp.pad(last[:, None], ((0, 0), (before, 0)), constant_values=NO_TOKEN),
        prefix.length,
        room,
        spans=None if batch.markers is None else begun(batch.markers, prefix.length),
    )
    shapes = jax.eval_shape(lambda: step(sampler, params, caches, rows, eos_id)[2])
    nothing = jnp.zeros_like(room)

    def zeros(*extra: int) -> Counts:
        return jax.tree.map(lambda x: jnp.zeros((x.shape[0], *extra, *x.shape[1:]), x.dtype), shapes)

    seen = History(nothing, jnp.zeros((len(room), history), jnp.int32), zeros(history)) if history else None
    return State(blank, blank, nothing, rows, caches, zeros(), seen, last)


def prompt_width(sampler: Sampler, params: Params, batch: Requests) -> int:
    """The number of columns of the prefix that the smallest model continues."""
    model, weights, inputs = sampler.models, params, batch.inputs
    while type(model) is tuple:
        weights, inputs = (tree[0] if type(tree) is tuple else tree for tree in (weights, inputs))
        model = model[0]
    widest = max(x.shape[-1] for x in jax.tree.leaves(batch.inputs)) + 1  # no prefix is longer
    prefix = jax.eval_shape(lambda: model.prefill(weights, inputs, batch.input_length, widest)[0])
    return prefix.tokens.shape[1]


def by_round(sampler: Sampler, verifications: Int[Array, " B"]) -> Bool[Array, " B"] | None:
    """A mask of the rows whose verification is `by_round`; None if all are."""
    ways = [way.by_round for way in ability_of(sampler, "verifications")]
    return None if all(ways) else jnp.array(ways)[verifications]


def prefilled(sampler: Sampler, params: Params, batch: Requests, length: int) -> tuple[Prefix, Cache]:
    """The prefix to continue, as the smallest model reads it, and every model's cache."""
    both = each(
        lambda model, weights, read: model.prefill(weights, read, batch.input_length, length),
        sampler.models,
        params,
        batch.inputs,
    )
    caches = each(lambda model, pair: pair[1], sampler.models, both)
    while not isinstance(both[0], Prefix):
        both = both[0]
    return both[0], caches


def advance(sampler: Sampler, params: Params, state: State, *, eos_id: int) -> State:
    """Runs one round: every unfinished row commits one block."""
    so_far = state.counts if ability_of(sampler, "remembers") else None
    with jax.named_scope("round"):
        block, caches, counted = step(
            sampler, params, state.caches, state.rows._replace(so_far=so_far), eos_id
        )
    recent = after(block, state.rows.recent)
    finished = (block.size > 0) & (recent[:, -1] == eos_id)
    rows = state.rows._replace(
        recent=recent,
        start=state.rows.start + block.size,
        room=jnp.where(finished, 0, state.rows.room - block.size),
    )
    rows = committed(rows)
    emitted, counts, history = state.emitted + block.size, add(state.counts, counted), state.history
    if history is not None:
        size = history.emitted.shape[1]
        at = jnp.where(state.rows.room > 0, history.rounds % size, size)  # a finished row does not change
        kept = jax.tree.map(
            lambda old, new: placed_at(old, new[:, None], at),
            (history.emitted, history.counts),
            (emitted, counts),
        )
        history = History(history.rounds + (state.rows.room > 0), *kept)
    tokens, origin = (
        placed_at(old, new, state.emitted)
        for old, new in ((state.tokens, block.tokens), (state.origin, block.origin))
    )
    return State(tokens, origin, emitted, rows, caches, counts, history, state.before)


def run(
    sampler: Sampler,
    params: Params,
    state: State,
    finished: Any,
    rounds: Any = None,
    *,
    eos_id: int,
    in_step: str | None = None,
) -> State:
    """Runs at most `rounds` rounds, until at least `finished` rows are finished. Along the axis `in_step` of
    a mesh, all devices run the same number of rounds, because they exchange arrays within a round."""
    busy = state.rows.room.shape[0] - finished

    def goes_on(carry: tuple[State, Array]) -> Array:
        on = jnp.sum(carry[0].rows.room > 0) > busy
        if in_step is not None:
            on = lax.pmax(on.astype(jnp.int32), in_step) > 0
        return on if rounds is None else on & (carry[1] < rounds)

    def one_more(carry: tuple[State, Array]) -> tuple[State, Array]:
        return advance(sampler, params, carry[0], eos_id=eos_id), carry[1] + 1

    return lax.while_loop(goes_on, one_more, (state, jnp.int32(0)))[0]


def caught_up(sampler: Any, params: Params, state: State) -> State:
    """`state` after rounds without drafting, once the drafter has read the tokens written in them. For a
    sampler that `resizes`."""
    start, tokens = state.rows.start, jnp.concatenate([state.before[:, None], state.tokens], axis=1)
    first = start - state.emitted - 1
    return state._replace(caches=sampler.caught_up(params, state.caches, tokens, first, start - 1))


def finish(state: State, max_new_tokens: int) -> Generation:
    past = jnp.arange(max_new_tokens) >= state.emitted[:, None]
    tokens, origin = (fitted(x, (max_new_tokens,)) for x in (state.tokens, state.origin))
    written = tokens, origin % len(Origin), origin // len(Origin)
    return Generation._make((*(jnp.where(past, -1, x) for x in written), state.emitted, state.counts))


@partial(jax.jit, static_argnames=("sampler", "max_new_tokens", "eos_id"))
def generate(
    sampler: Sampler,
    params: Params,
    keys: Key[Array, " B"],
    inputs: Any,
    input_length: Int[AnyArray, " B"],
    options: SamplingOptions,
    alphas: Any,
    *,
    max_new_tokens: int,
    eos_id: int,
    methods: Any = None,
    limits: Any = None,
    verifications: Any = None,
    markers: Markers | None = None,
) -> Generation:
    """Decodes every row until eos_id or its limit, in one lax.while_loop.

    inputs: [B, S] int, or nested like the models if they read different tokens. params: nested like the
    sampler's models: a model's parameters for Autoregressive, (drafter's, verifier's) for Speculative.
    alphas: [K] or [B, K], the lenience of each verifier, smallest first (K = 0 for Autoregressive). methods:
    [K] or [B, K], the index of each row's method, if a verifier has several. limits: [B], the most tokens of
    each row, up to max_new_tokens. verifications: [B], the index of each row's verification. markers: the
    lenience after certain tokens (core.spans). All of these, the keys and the options are traced: different
    rows share one program, and sweeping compiles once. Raises FieldError for arrays of other shapes.
    """
    batch = requests(
        sampler,
        keys,
        inputs,
        input_length,
        options,
        alphas,
        methods,
        limits,
        max_new_tokens,
        verifications,
        markers,
    )
    state = begin(sampler, params, batch, max_new_tokens=max_new_tokens, eos_id=eos_id)
    state = run(sampler, params, state, len(batch.limit), eos_id=eos_id)
    return finish(state, max_new_tokens)
