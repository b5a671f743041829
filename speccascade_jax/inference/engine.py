"""Encoded inputs through compiled programs: batch after batch, or with rows that others refill."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.core import decoding
from speccascade_jax.core.decoding import Generation, Sampler, State
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.inference.tokenizer import pad
from speccascade_jax.parallel import AXIS

Array = jax.Array
Slots = dict[int, int]  # a batch's slot -> the number of the input in it
Ends = Callable[[list[int]], bool]


class Job(NamedTuple):
    """What a batch is decoded with."""

    sampler: Sampler
    params: Any
    options: SamplingOptions
    alpha: float
    seed: int


@dataclasses.dataclass
class Clock:
    """Seconds spent compiling and decoding, apart."""

    compile_seconds: float = 0.0
    decode_seconds: float = 0.0
    compilations: int = 0

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.decode_seconds += time.perf_counter() - began


class Programs(NamedTuple):
    """A sampler's, jitted; see decoding. With several devices each has its own rows and its own loop."""

    generate: Any  # params, keys, inputs, lengths, options, alphas -> Generation
    begin: Any     # params, keys, inputs, lengths -> State
    advance: Any   # params, state, options, alphas -> State; takes the state's memory, as the next three
    run: Any       # params, state, options, alphas, resting -> State
    refill: Any    # state, fresh, slots -> State
    narrow: Any    # the same, as wide as `fresh`
    finish: Any    # state -> Generation


@dataclasses.dataclass(frozen=True)
class Engine:
    """Decodes token ids on one device, or on a mesh of which each device has `batch_size` rows."""

    max_new_tokens: int
    eos_id: int
    pad_id: int
    mesh: Mesh | None = None
    clock: Clock = dataclasses.field(default_factory=Clock, compare=False)
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)
    programs: dict[Sampler, Programs] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def decode(self, job: Job, rows: Sequence[Sequence[int]], indices: Sequence[int], batch_size: int,
               bucket: Callable[[int], int], ends: Ends | None = None) -> Iterator[tuple[Slots, Generation]]:
        """Which inputs ended where in a batch, and that batch on the host, until all `rows` [N] are decoded.

        indices [N] number the inputs for their random draws; rows are padded to bucket(the longest). Rows
        rest once ends(tokens), which is asked after every round.
        """
        waiting = sorted(range(len(rows)), key=lambda n: len(rows[n]))  # the longest come first: pop()

        def take(count: int) -> tuple[Slots, tuple[Any, ...]]:
            """The next inputs, `count` a device and dealt out in turn; generate's arguments for them."""
            chosen = [waiting.pop() for _ in range(min(count * self.devices, len(waiting)))]
            slots = {k % self.devices * count + k // self.devices: n for k, n in enumerate(chosen)}
            given = {slot: (indices[n], rows[n]) for slot, n in slots.items()}
            return slots, self._arguments(job, given, count * self.devices, bucket(len(rows[chosen[0]])))

        if batch_size > 1 and ends is None:
            yield from self._in_turns(job, waiting, take, batch_size, lambda n: bucket(len(rows[n])))
        while waiting:
            slots, arguments = take(batch_size)
            yield slots, self._fetched(
                self._call(self._programs(job.sampler).generate, *arguments) if ends is None else
                self._until(job, arguments, ends))

    def stream(self, job: Job, row: Sequence[int], number: int, width: int) -> Iterator[Generation]:
        """decode() of one input padded to `width`, seen after every round."""
        arguments = self._arguments(job, {0: (number, row)}, self.devices, width)
        finish = self._programs(job.sampler).finish
        for state in islice(self._by_round(job, arguments), 1, None):
            yield self._fetched(self._call(finish, state))

    def precompile(self, job: Job, batch_size: int, widths: Sequence[int], by_round: bool = False) -> None:
        """Compiles what decode() runs for inputs padded to any of `widths`, which ascend.

        `by_round`: with something that ends rows.
        """
        programs, share = self._programs(job.sampler), self.share(batch_size) * self.devices
        nowhere, none, fresh = self._placed(np.full(share, batch_size, np.int32)), np.int32(0), []
        for width in widths:
            whole, few = (self._arguments(job, {0: (0, [self.eos_id] * width)}, rows, width)
                          for rows in (batch_size * self.devices, share))
            params, *rows, options, alphas = whole
            if by_round:
                state = self._call(programs.begin, params, *rows)
                for _ in range(2):
                    state = self._call(programs.advance, params, state, options, alphas)
                continue
            if batch_size == 1:
                self._prepared(programs.generate, whole)
                continue
            fresh.append(self._call(programs.begin, *few[:4]))
            for other in fresh:
                state = self._call(programs.begin, params, *rows)
                for _ in range(2):  # where devices share parameters, what it gives may lie elsewhere
                    state = self._call(programs.run, params, state, options, alphas, none)
                if other is not fresh[-1]:
                    narrow = self._call(programs.narrow, state, other, nowhere)
                    self._call(programs.run, params, narrow, options, alphas, none)
                state = self._call(programs.refill, state, other, nowhere)
                self._call(programs.finish, self._call(programs.run, params, state, options, alphas, none))

    def share(self, batch_size: int) -> int:
        """How many of a device's rows rest before others take their places."""
        return max(batch_size // 4, 1)

    def _in_turns(self, job: Job, waiting: list[int], take: Callable[[int], tuple[Slots, tuple[Any, ...]]],
                  batch_size: int, width_of: Callable[[int], int]) -> Iterator[tuple[Slots, Generation]]:
        """Wherever a quarter of every device's rows rest, waiting inputs take their places.

        They come in order of length, so that few rows rest at the end, and the state becomes narrower.
        """
        programs, share = self._programs(job.sampler), self.share(batch_size)
        if not waiting:
            return
        busy, (params, *rows, options, alphas) = take(batch_size)
        width = rows[1].shape[1]
        state = self._call(programs.begin, params, *rows)
        idle: list[list[int]] = [[] for _ in range(self.devices)]
        while busy:
            resting = np.int32(share if waiting else batch_size)
            state = self._call(programs.run, params, state, options, alphas, resting)
            room, result = self._fetched((state.rows.room, self._call(programs.finish, state)))
            done = {slot: busy.pop(slot) for slot in [*busy] if room[slot] == 0}
            yield done, result
            for slot in done:
                idle[slot // batch_size].append(slot % batch_size)
            while waiting and min(map(len, idle)) >= share:
                slots, (_, *rows, _, _) = take(share)
                free = [local.pop() for local in idle for _ in range(share)]
                busy |= {slot // share * batch_size + free[slot]: n for slot, n in slots.items()}
                fresh = self._call(programs.begin, params, *rows)
                narrower = rows[1].shape[1] < width and max(map(width_of, busy.values())) == rows[1].shape[1]
                width = rows[1].shape[1] if narrower else width
                state = self._call(programs.narrow if narrower else programs.refill, state, fresh,
                                   self._placed(np.array(free, np.int32)))

    def _by_round(self, job: Job, arguments: tuple[Any, ...], ends: Ends | None = None) -> Iterator[State]:
        """The state before the first and after every round; rows whose tokens end rest."""
        programs, (params, *rows, options, alphas) = self._programs(job.sampler), arguments
        state = self._call(programs.begin, params, *rows)
        while True:
            yield state
            tokens, emitted, room = self._fetched((state.tokens, state.emitted, state.rows.room))
            if ends is not None:
                rests = [ends(row[:size].tolist()) for row, size in zip(tokens, emitted, strict=True)]
                room = np.where(rests, 0, room)
                placed = jax.device_put(room, state.rows.room.sharding)
                state = state._replace(rows=state.rows._replace(room=placed))
            if not room.any():
                return
            state = self._call(programs.advance, params, state, options, alphas)

    def _until(self, job: Job, arguments: tuple[Any, ...], ends: Ends) -> Generation:
        """generate(), but rows whose tokens end rest from that round on; its counts are the whole round's."""
        for state in self._by_round(job, arguments, ends):  # noqa: B007
            pass
        return self._call(self._programs(job.sampler).finish, state)

    def _arguments(self, job: Job, rows: Mapping[int, tuple[int, Sequence[int]]], size: int, width: int
                   ) -> tuple[Any, ...]:
        """generate's arguments for a batch of `size` rows, which rest from the start where there is none.

        rows: slot -> its number and its tokens.
        """
        numbers, tokens = zip(*(rows.get(slot, (0, [])) for slot in range(size)), strict=True)
        inputs, lengths = pad(tokens, width, self.pad_id)
        alphas = np.full(job.sampler.level, job.alpha, np.float32)
        own = self._placed((row_keys(key_of(job.seed), np.array(numbers, np.uint32)), inputs, lengths))
        return job.params, *own, jax.tree.map(np.float32, job.options), alphas

    def _placed(self, rows: Any) -> Any:
        """Arrays [B, ...] where each device has its own rows."""
        return rows if self.mesh is None else jax.device_put(rows, NamedSharding(self.mesh, P(AXIS)))

    def _programs(self, sampler: Sampler) -> Programs:
        if sampler not in self.programs:
            split, whole = P(AXIS), P()

            def jitted(function: Any, *specs: Any, donate: tuple[int, ...] = ()) -> Any:
                if self.mesh is not None:
                    function = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=split,
                                             check_vma=False)
                return jax.jit(function, donate_argnums=donate)

            limit, eos_id, rows = self.max_new_tokens, self.eos_id, (whole, split, split, split)
            self.programs[sampler] = Programs(
                generate=jitted(partial(decoding.generate, sampler, max_new_tokens=limit, eos_id=eos_id),
                                *rows, whole, whole),
                begin=jitted(partial(decoding.begin, sampler, max_new_tokens=limit), *rows),
                advance=jitted(partial(decoding.advance, sampler, eos_id=eos_id),
                               whole, split, whole, whole, donate=(1,)),
                run=jitted(partial(decoding.run, sampler, eos_id=eos_id),
                           whole, split, whole, whole, whole, donate=(1,)),
                refill=jitted(decoding.refill, split, split, split, donate=(0,)),
                narrow=jitted(partial(decoding.refill, narrow=True), split, split, split),
                finish=jitted(partial(decoding.finish, max_new_tokens=limit), split))
        return self.programs[sampler]

    def _prepared(self, program: Any, arguments: tuple[Any, ...]) -> Any:
        """`program` for arrays like these, compiled once; that is timed apart."""
        leaves, structure = jax.tree.flatten(arguments)
        key = program, structure, *((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
        if key not in self.compiled:
            began = time.perf_counter()
            self.compiled[key] = program.lower(*arguments).compile()
            self.clock.compile_seconds += time.perf_counter() - began
            self.clock.compilations += 1
        return self.compiled[key]

    def _call(self, program: Any, *arguments: Any) -> Any:
        prepared = self._prepared(program, arguments)
        with self.clock.decoding():
            return prepared(*arguments)

    def _fetched(self, arrays: Any) -> Any:
        with self.clock.decoding():
            return jax.device_get(arrays)


@cache
def key_of(seed: int) -> Array:
    return jax.random.key(seed)


@jax.jit
def row_keys(key: Array, numbers: Array) -> Array:
    """A typed key for each of `numbers` [B]."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
