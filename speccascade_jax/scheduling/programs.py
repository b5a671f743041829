"""The compiled programs of a scheduler, one for each shape."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.nests import insert, insert_rows
from speccascade_jax.core.protocols import Markers, Sampler
from speccascade_jax.core.transforms import TRUNCATIONS, SamplingOptions
from speccascade_jax.parallel import AXIS, TENSOR_AXIS, fetched, shared_by, split_rows
from speccascade_jax.scheduling.chunks import Reader, Unread, readers_of
from speccascade_jax.scheduling.kernels import compiler_options
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.tokenizers.markers import LONGEST, PLACES
from speccascade_jax.vocabularies.joining import shapes_of

Array = jax.Array
GIGABYTE = 2**30
NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
LAWS = 8  # about how many arrays [B, block size + 1, V] a round holds at once


@dataclasses.dataclass
class Clock:
    """Seconds spent compiling and seconds spent decoding."""

    compile_seconds: float = 0.0
    decode_seconds: float = 0.0
    compilations: int = 0

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.decode_seconds += time.perf_counter() - began


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings that a program is compiled for. All others may differ between rows."""

    sampler: Sampler
    max_new_tokens: int
    eos_id: int
    vocab_size: int
    truncations: tuple[str, ...] = ()  # truncations that some row uses
    bounds: tuple[tuple[str, int], ...] = ()  # largest value of each truncation with a bound
    history: int = 0  # rounds whose counts are kept, to cut at a stop sequence; 0: none
    ragged: bool = False  # rows have their own block sizes, up to the sampler's
    block_sizes: tuple[int, ...] = ()  # the sizes to choose from; (): only the sampler's
    chunk: int = 0  # prompt tokens read between two rounds; 0: the whole prompt
    spans: bool = False  # some row changes alpha after a marker

    def options(self, temperature: Any, values: Mapping[str, Any]) -> SamplingOptions:
        """SamplingOptions with values for this program's truncations."""
        return SamplingOptions(temperature, **values, **{f"max_{name}": bound for name, bound in self.bounds})

    def requests(self, rows: int, width: int) -> loop.Requests:
        """The shapes of `rows` requests whose inputs are padded to `width`, with Seeds for keys."""

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *shape), dtype)

        levels, numbers = self.sampler.level, array(jnp.float32)
        options = self.options(numbers, {name: array(TRUNCATIONS[name].dtype) for name in self.truncations})
        # Only shapes: what runs here would run on the mesh, whose chips may be absent.
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        seeds: Any = Seeds(array(data.dtype, *data.shape), array(jnp.uint32))
        whole = array(jnp.int32)
        markers = Markers._make((array(jnp.int32, PLACES, LONGEST), array(jnp.float32, PLACES, levels)))
        inputs = shapes_of(self.sampler.models, array(jnp.int32, width), partial(array, jnp.int32))
        by_level = array(jnp.float32, levels), array(jnp.int32, levels)
        return loop.Requests._make(
            (seeds, inputs, whole, whole, options, *by_level, whole, markers if self.spans else None)
        )


class Snapshot(NamedTuple):
    """The parts of a State that the host reads."""

    tokens: Any
    origin: Any
    emitted: Any
    room: Any
    counts: Any
    history: Any

    @classmethod
    def of(cls, state: loop.State) -> "Snapshot":
        return cls(state.tokens, state.origin, state.emitted, state.rows.room, state.counts, state.history)


class Seeds(NamedTuple):
    """What the rows' keys are made of, in place of Requests.keys. The program that reads the requests makes
    the keys, because a call of its own would take longer."""

    data: Any  # uint32 [B, K], key_data() of the requests' seeds
    numbers: Any  # uint32 [B], of the requests


def with_keys(requests: loop.Requests) -> loop.Requests:
    """Requests whose Seeds have become keys: each request's number folded into the key of its seed."""
    seeds: Any = requests.keys
    keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seeds.data), seeds.numbers)
    return requests._replace(keys=keys)


class Programs:
    """The compiled programs of a Plan. Each device has its own rows and its own loop, but the devices of a
    group that shards the models run in step.

    Numbers of rows are per device. A program is compiled from shapes when it is first needed.
    """

    def __init__(
        self, plan: Plan, params: Any, mesh: Mesh | None, clock: Clock, prefixes: PrefixCache | None = None
    ):
        """`prefixes`: the prefix cache, in the same memory."""
        self.plan, self.params, self.mesh, self.clock, self.prefixes = plan, params, mesh, clock, prefixes
        # The programs take a flat list: in each call, JAX would flatten nnx variables one by one in Python.
        self.structure: Any
        self.weights, self.structure = jax.tree.flatten(params)
        self.devices = 1 if mesh is None else mesh.shape[AXIS]
        self.compiled: dict[tuple[Any, ...], Any] = {}  # (name, rows, width, ...) -> program
        self.shapes: dict[tuple[int, int], Any] = {}  # the shapes of begin()'s result
        self.states: dict[tuple[int, int], Any] = {}
        self.packings: dict[tuple[int, int], Packing] = {}
        self.kept: dict[tuple[int, int], Any] = {}  # shapes of cut()'s result, by reader and size

    @cached_property
    def readers(self) -> tuple[Reader, ...]:
        """The readers that read prompts in chunks."""
        return readers_of(self.plan.sampler, self.params)

    def begin(self, rows: int, width: int, unread: bool = False) -> Any:
        """(weights, Requests with Seeds for keys, each row's block size + 1 or None) -> State. With `unread`,
        the models of `readers` have read nothing yet.

        Raises FieldError if the state does not fit into the devices' memory.
        """

        def compiled() -> Any:
            begin, arguments = self._begin(unread), self._arguments(rows, width)
            known = self.states.get((rows, width))
            where = {} if known is None else {"out_shardings": shardings(known)}
            traced = jax.jit(begin, **where).trace(self.weights, *arguments)
            self._check_memory(rows, traced.out_info)
            self.shapes[rows, width] = traced.out_info
            return traced.lower()

        return self._once(("begin", rows, width, unread), compiled)

    def read(self, rows: int, width: int, number: int, size: int) -> Any:
        """(weights, State, tokens [B, size], their first position) -> State: the `number`-th reader reads its
        next chunk. Donates the state."""

        def compiled() -> Any:
            state, reader = self._state(rows, width), self.readers[number]

            def read(params: Any, state: loop.State, tokens: Any, start: Any) -> loop.State:
                caches = reader.read(params, state.caches, state.rows.start - 1, tokens, start)
                return state._replace(caches=caches)

            tokens = self._placed(jax.ShapeDtypeStruct((rows * self.devices, size), jnp.int32))
            mapped = self._mapped(self._of_weights(read), P(), P(AXIS), P(AXIS), P())
            return jax.jit(mapped, donate_argnums=1, out_shardings=shardings(state)).lower(
                self.weights, state, tokens, NUMBER
            )

        return self._once(("read", rows, width, number, size), compiled)

    def cut(self, rows: int, width: int, number: int, size: int) -> Any:
        """(State, device, row of that device, first position) -> the segment that the `number`-th reader has
        read there, replicated on every device."""

        def compiled() -> Any:
            known = self.kept.get((number, size))
            where = {} if known is None else {"out_shardings": shardings(known)}
            return jax.jit(self._cut(number, size), **where).lower(self._state(rows, width), *[NUMBER] * 3)

        return self._once(("cut", rows, width, number, size), compiled)

    def put(self, rows: int, width: int, number: int, size: int) -> Any:
        """(State, a segment from cut(), the rows that take it as bool [B], first position) -> State. Donates
        the state."""

        def compiled() -> Any:
            state, reader = self._state(rows, width), self.readers[number]

            def put(state: loop.State, segments: Any, rows: Any, start: Any) -> loop.State:
                return state._replace(caches=reader.with_segments(state.caches, segments, rows, start))

            which = self._placed(jax.ShapeDtypeStruct((rows * self.devices,), jnp.bool))
            mapped = self._mapped(put, P(AXIS), P(), P(AXIS), P())
            return jax.jit(mapped, donate_argnums=0, out_shardings=shardings(state)).lower(
                state, self.segments(rows, width, number, size), which, NUMBER
            )

        return self._once(("put", rows, width, number, size), compiled)

    def segments(self, rows: int, width: int, number: int, size: int) -> Any:
        """The shapes and shardings of cut()'s result, which are the same for all rows and widths."""
        if (number, size) not in self.kept:
            where = self.cut(rows, width, number, size).output_shardings
            shapes = jax.eval_shape(self._cut(number, size), self._state(rows, width), *[NUMBER] * 3)
            self.kept[number, size] = placed_as(shapes, where)
        return self.kept[number, size]

    def run(self, rows: int, width: int, plain: bool = False, size: int | None = None) -> Any:
        """(weights, State, finished rows, rounds) -> State, its Snapshot for snapshot(): runs until that many
        rows are finished or that many rounds have run. Donates the state. `plain` omits the truncations'
        sorts, for states in which no unfinished row truncates. `size`: the block size, one of the plan's."""

        def compiled() -> Any:
            state, sampler = self._state(rows, width), self._sampler(size)
            decode = run_plainly if plain else loop.run
            in_step = AXIS if self.mesh is not None and TENSOR_AXIS in self.mesh.axis_names else None
            packing = self._packing(rows, width)

            def run(params: Any, state: loop.State, *limits: Any) -> tuple[loop.State, Any]:
                done = decode(sampler, params, state, *limits, eos_id=self.plan.eos_id, in_step=in_step)
                return done, packing.pack(Snapshot.of(done))

            mapped = self._mapped(self._of_weights(run), P(), P(AXIS), P(), P())
            where = shardings(state), None if self.mesh is None else NamedSharding(self.mesh, P(AXIS))
            return jax.jit(mapped, donate_argnums=1, out_shardings=where).lower(
                self.weights, state, NUMBER, NUMBER
            )

        return self._once(("run", rows, width, plain, size), compiled)

    def catch_up(self, rows: int, width: int) -> Any:
        """(weights, State) -> State: loop.caught_up(). Donates the state."""

        def compiled() -> Any:
            state = self._state(rows, width)
            caught_up = self._of_weights(partial(loop.caught_up, self.plan.sampler))
            mapped = self._mapped(caught_up, P(), P(AXIS))
            return jax.jit(mapped, donate_argnums=1, out_shardings=shardings(state)).lower(
                self.weights, state
            )

        return self._once(("catch_up", rows, width), compiled)

    def refill(self, rows: int, width: int, fresh_rows: int, fresh_width: int, like_fresh: bool) -> Any:
        """(State, fresh State, slots) -> State, with the width of the first state, or with `like_fresh` that
        of the fresh one."""

        def compiled() -> Any:
            state, fresh = self._state(rows, width), self._state(fresh_rows, fresh_width)
            slots = self._placed(jax.ShapeDtypeStruct((fresh_rows * self.devices,), jnp.int32))
            mapped = self._mapped(
                partial(refill, self.plan.sampler, like_fresh=like_fresh), P(AXIS), P(AXIS), P(AXIS)
            )
            where = shardings(self._state(rows, fresh_width if like_fresh else width))
            return jax.jit(mapped, donate_argnums=() if like_fresh else 0, out_shardings=where).lower(
                state, fresh, slots
            )

        return self._once(("refill", rows, width, fresh_rows, fresh_width, like_fresh), compiled)

    def stop(self, rows: int, width: int) -> Any:
        """(State, the rows to stop as bool [B]) -> State. Donates the state."""

        def compiled() -> Any:
            state = self._state(rows, width)
            which = self._placed(jax.ShapeDtypeStruct((rows * self.devices,), jnp.bool))
            return jax.jit(stop_rows, donate_argnums=0, out_shardings=shardings(state)).lower(state, which)

        return self._once(("stop", rows, width), compiled)

    def call(self, program: Any, *arguments: Any) -> Any:
        with self.clock.decoding():
            return program(*arguments)

    def fetch(self, arrays: Any) -> Any:
        with self.clock.decoding():
            return fetched(arrays)

    def snapshot(self, rows: int, width: int, arrays: Any) -> Snapshot:
        """Fetches the second result of run()."""
        return self._packing(rows, width).unpack(self.fetch(arrays))

    def place(self, rows: Any) -> Any:
        """Puts host arrays [B, ...] onto the devices, each device's rows on that device."""
        return rows if self.mesh is None else split_rows(self.mesh, rows)

    def _sampler(self, size: int | None) -> Sampler:
        sampler: Any = self.plan.sampler
        return sampler if size is None else sampler.of_blocks(size)

    def _begin(self, unread: bool) -> Callable[..., Any]:
        plan = self.plan
        sampler: Any = Unread(plan.sampler) if unread else plan.sampler

        def begin(params: Any, batch: loop.Requests, want: Any) -> loop.State:
            state = loop.begin(
                sampler,
                params,
                with_keys(batch),
                max_new_tokens=plan.max_new_tokens,
                history=plan.history,
                eos_id=plan.eos_id,
            )
            return state._replace(rows=state.rows._replace(want=want))

        return self._mapped(self._of_weights(begin), P(), P(AXIS), P(AXIS))

    def _of_weights(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose first argument is the parameters, as a function of `weights`."""
        return lambda weights, *arguments: function(self.structure.unflatten(weights), *arguments)

    def _arguments(self, rows: int, width: int) -> tuple[Any, Any]:
        """The shapes of begin()'s arguments, without the weights."""
        size = rows * self.devices
        want = jax.ShapeDtypeStruct((size,), jnp.int32) if self.plan.ragged else None
        return self._placed((self.plan.requests(size, width), want))

    def _cut(self, number: int, size: int) -> Callable[..., Any]:
        reader, mesh = self.readers[number], self.mesh

        def cut(state: loop.State, device: Any, row: Any, start: Any) -> Any:
            segments = reader.segments(state.caches, row, start, size)
            if mesh is None:
                return segments
            here = lax.axis_index(AXIS) == device
            return jax.tree.map(lambda x: lax.psum(jnp.where(here, x, 0), AXIS), segments)

        return self._mapped(cut, P(AXIS), P(), P(), P(), by_rows=False)

    def _mapped(self, function: Callable[..., Any], *specs: Any, by_rows: bool = True) -> Callable[..., Any]:
        """Maps a function over each device's rows. It returns rows or, if not `by_rows`, a replicated
        result."""
        if self.mesh is None:
            return function
        out = P(AXIS) if by_rows else P()
        # The compiler partitions the work within a group of devices that shards the models.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out, axis_names={AXIS}, check_vma=False
        )

    def _placed(self, shapes: Any) -> Any:
        """Like place(), for shapes."""
        if self.mesh is None:
            return shapes
        where = NamedSharding(self.mesh, P(AXIS))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)

    def _state(self, rows: int, width: int) -> Any:
        """The shapes of a State, with the shardings that begin() has chosen and all programs keep."""
        if (rows, width) not in self.states:
            # Either begin() will do. A compiled one is preferred, so that none is compiled only for this.
            unread = bool(self.plan.chunk) or ("begin", rows, width, True) in self.compiled
            where = self.begin(rows, width, unread).output_shardings
            self.states[rows, width] = placed_as(self.shapes[rows, width], where)
        return self.states[rows, width]

    def _packing(self, rows: int, width: int) -> "Packing":
        if (rows, width) not in self.packings:
            self.packings[rows, width] = Packing(Snapshot.of(self._state(rows, width)))
        return self.packings[rows, width]

    def _once(self, key: Any, lower: Callable[[], Any]) -> Any:
        if key not in self.compiled:
            began, before = time.perf_counter(), self.clock.compile_seconds
            with shared_by(self.params):
                lowered = lower()
                self.compiled[key] = lowered.compile(compiler_options(lowered))
            # lower() may have compiled programs whose results this one takes: count that time once.
            self.clock.compile_seconds = before + time.perf_counter() - began
            self.clock.compilations += 1
        return self.compiled[key]

    @property
    def reserved_bytes(self) -> int:
        """The additional memory per device that the prefix cache may take for prompts of this plan."""
        if self.prefixes is None or not any(reader.stores for reader in self.readers):
            return 0
        return self.prefixes.limit - self.prefixes.bytes

    def _check_memory(self, rows: int, state: Any) -> None:
        plan, free = self.plan, free_memory()
        laws = LAWS * 4 * rows * plan.sampler.width * plan.vocab_size
        need = laws + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) // self.devices
        reserved = self.reserved_bytes
        if free is not None and need + reserved > free:
            kept = f", and what prompts begin with up to {reserved / GIGABYTE:.1f} GB" if reserved else ""
            smaller = "prefix_cache_bytes, " if reserved else ""
            raise FieldError(
                "max_new_tokens",
                plan.max_new_tokens,
                f"lower batch_size, {smaller}max_new_tokens or block_size.",
                f"{rows} rows of up to {plan.max_new_tokens} tokens in blocks of {plan.sampler.width} need "
                f"about {need / GIGABYTE:.1f} GB on each device{kept}; {free / GIGABYTE:.1f} GB are free",
            )


def run_plainly(sampler: Sampler, params: Any, state: loop.State, *limits: Any, **static: Any) -> loop.State:
    """loop.run() without truncations, whose values stay in the state for later rows."""
    options = state.rows.options
    plain = state._replace(rows=state.rows._replace(options=SamplingOptions(options.temperature)))
    done = loop.run(sampler, params, plain, *limits, **static)
    return done._replace(rows=done.rows._replace(options=options))


def refill(
    sampler: Sampler,
    state: loop.State,
    fresh: loop.State,
    slots: Int[jax.Array, " R"],
    like_fresh: bool = False,
) -> loop.State:
    """Returns `state` with its rows `slots` replaced by the rows of `fresh`; slots of B or more are ignored.

    The two states may have inputs of different widths. The buffers of the result are as large as those of
    `state` or, with `like_fresh`, as those of `fresh`, which must hold all unfinished rows.
    """
    caches = insert(sampler.models, state.caches, fresh.caches, slots, like_fresh)
    rest = insert_rows(state._replace(caches=None), fresh._replace(caches=None), slots, like_fresh)
    return rest._replace(caches=caches)


def stop_rows(state: loop.State, stopped: jax.Array) -> loop.State:
    """Returns `state` with the rows where `stopped` [B] is true finished."""
    return state._replace(rows=state.rows._replace(room=jnp.where(stopped, 0, state.rows.room)))


def placed_as(shapes: Any, where: Any) -> Any:
    """Combines shapes with shardings."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, where)


def shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, shapes)


def free_memory() -> int | None:
    """The free bytes of the first device, or of the host for CPU devices; None if unknown."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics["bytes_in_use"]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def crowded() -> bool:
    """Whether this process uses more than half of the memory maps that it may have. A compiled CPU program
    takes hundreds of them, and XLA aborts the process when they run out."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps) > limit // 2
    except OSError:
        return False


class Packing:
    """Joins a tree's arrays [B, ...] into one array [B, N] for each dtype: the host fetches few arrays in
    less time than many."""

    def __init__(self, shapes: Any):
        self.structure: Any
        leaves, self.structure = jax.tree.flatten(shapes)
        ends = dict.fromkeys((x.dtype.name for x in leaves), 0)
        self.places = list[tuple[str, slice, tuple[int, ...]]]()
        for x in leaves:
            dtype, size = x.dtype.name, math.prod(x.shape[1:])
            ends[dtype] += size
            self.places.append((dtype, slice(ends[dtype] - size, ends[dtype]), x.shape))

    def pack(self, tree: Any) -> dict[str, Array]:
        parts = dict[str, list[Array]]()
        for x in jax.tree.leaves(tree):
            parts.setdefault(x.dtype.name, []).append(x.reshape(len(x), -1))
        return {dtype: jnp.concatenate(some, axis=1) for dtype, some in parts.items()}

    def unpack(self, arrays: Mapping[str, np.ndarray]) -> Any:
        parts = [arrays[dtype][:, place].reshape(shape) for dtype, place, shape in self.places]
        return self.structure.unflatten(parts)


@lru_cache(maxsize=1024)
def key_data(seed: int) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.key(seed)))
