"""Continuous batching for a server: each request takes a row as soon as one is free."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.scheduling.blocks import Blocks, Seen
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.scheduling.programs import Programs, shardings
from speccascade_jax.scheduling.prompts import Reading, Request
from speccascade_jax.scheduling.scheduler import Scheduler
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Tokenizer

TIMED = 7  # measurements of each block size when a server starts
ROUNDS = 2  # rounds per measurement


class Continuous(Scheduler):
    """A Scheduler that serves requests in order of arrival, each as soon as a row is free.

    The batch has one of two widths: `width`, which fits the longest request, or a third of it while all
    running requests fit and none uses a truncation. (Attention over padding takes a tenth of a round.) If
    many requests wait, the prompts of several with similar lengths are read together, before there are rows
    for all of them, and several rows are refilled at once. If the plan has a `chunk`, there is one width:
    prompts are read `chunk` tokens at a time, and running rows do a round between two chunks.
    """

    def __init__(
        self,
        programs: Programs,
        batch_size: int,
        tokenizer: Tokenizer,
        bucket: Callable[[int], int],
        width: int,
        prefixes: PrefixCache | None = None,
    ):
        super().__init__(programs, batch_size, tokenizer, bucket, prefixes=prefixes)
        alone = programs.plan.chunk or not programs.plan.sampler.level  # a second width costs compile time
        self.widths = [width] if alone else sorted({bucket(max(width // 3, 1)), width})
        self.ahead = max(batch_size // 2, 1)  # prompts read together on each device if that many wait
        self.most_idle = self.share
        self.reading: list[Reading] = []
        self.blank: dict[int, Any] = {}  # width -> a state of empty rows
        self.cached: dict[int, int] = {}  # id -> tokens of its prompt found in the prefix cache
        sizes = programs.plan.block_sizes
        self.blocks = Blocks(sizes) if sizes else None  # chooses each turn's block size
        self.behind = False  # whether the drafter has not read all committed tokens
        self.learnt: Any = None  # the rows' request ids and counts at the end of the last turn

    @property
    def busy(self) -> bool:
        return super().busy or bool(self.reading)

    def _turn(self, entry: tuple[int, Request]) -> Any:
        return -entry[0]

    def cancel(self, number: int) -> None:
        self.reading = [left for reading in self.reading for left in reading.without([number])]
        self.cached.pop(number, None)
        super().cancel(number)

    @property
    def many_wait(self) -> bool:
        """Whether enough requests wait for several prompts to be read together on each device."""
        return len(self.waiting) >= self.ahead * self.programs.devices

    def run(self, rounds: int | None = None) -> None:
        self.share = self.most_idle if self.many_wait else 1
        super().run(rounds)

    def _program(self) -> Any:
        plain = all_plain(request for _, request in self.running.values())
        size = None if self.blocks is None else self._block_size(self.blocks, plain)
        return self.programs.run(self.batch_size, self.width, plain, size)

    def _block_size(self, blocks: Blocks, plain: bool) -> int:
        """The next turn's block size. If it is not 0, the drafter first reads the tokens that it has
        missed."""
        requests, programs = [request for _, request in self.running.values()], self.programs
        sampler: Any = programs.plan.sampler
        methods = {number for request in requests for number in request.methods or (0,)}
        lossless = all(sampler.methods[number].lossless for number in methods)
        kept = [limit_of(request) for request in requests if request.keeps_size]
        program = Timed(self.batch_size, self.width, plain, lossless)
        size = blocks.choose(program, [limit_of(request) for request in requests], max(kept, default=0))
        if size and self.behind:
            caught_up = programs.catch_up(self.batch_size, self.width)
            self.state = programs.call(caught_up, programs.weights, self.state)
        self.behind = size == 0
        return size

    def _take_finished(self) -> None:
        if self.blocks is not None:
            self._learn(self.blocks)
        super()._take_finished()

    def _learn(self, blocks: Blocks) -> None:
        """Passes the counts of the turn's rounds to `blocks`."""
        counts, numbers = self.seen.counts[-1], np.full(len(self.seen.room), -1)
        limits = np.zeros_like(numbers)
        for row, (number, request) in self.running.items():
            numbers[row], limits[row] = number, min(blocks.size, limit_of(request))
        fresh = Seen(counts.histogram.copy(), counts.emitted.copy(), limits)
        if self.learnt is not None:
            same = numbers == self.learnt[0]
            fresh.histogram[same] -= self.learnt[1].histogram[same]
            fresh.emitted[same] -= self.learnt[1].emitted[same]
        running = numbers >= 0
        blocks.acceptance.learn(Seen._make(x[running] for x in fresh))
        self.learnt = numbers, counts

    def _place(self) -> bool:
        if self.state is None:
            self.width = self.widths[0]
            self.state = self._nothing(self.batch_size, self.width)
        return self._place_by_chunks() if self.programs.plan.chunk else self._place_one_by_one()

    def _nothing(self, rows: int, width: int) -> Any:
        """A state of empty rows."""
        return self._begun(Reading({}, None, rows, width), unread=bool(self.programs.plan.chunk))

    def _place_one_by_one(self) -> bool:
        """Fills idle rows, first with requests whose prompts have been read."""
        while True:
            self.reading = [
                left for reading in self.reading for left in reading.without(self._refill(reading))
            ]
            idle, count = self._idle(), self.ahead
            supplied = {place // reading.rows for reading in self.reading for place in reading.placed}
            devices = [device for device, rows in enumerate(idle) if rows and device not in supplied]
            if not (devices and self.waiting):
                return False
            if len(self.waiting) < count * len(devices):
                count = 1
            self._call_up(count * len(devices))
            self.reading.append(self._read(count, devices))

    def _call_up(self, count: int) -> None:
        """Moves requests of the same length behind the first in the queue, because prompts that are read
        together are padded to the longest."""
        width = self._width_of([self.waiting[-1][1]])
        alike = [number for number, request in self.waiting if self._width_of([request]) == width]
        chosen = sorted(alike)[:count]
        self.waiting.sort(key=lambda entry: (entry[0] in chosen, -entry[0]))

    def _place_by_chunks(self) -> bool:
        """Reads the next chunk of a prompt; running rows do a round before the one after it."""
        while self.waiting or self.reading:
            devices = [device for device, rows in enumerate(self._idle()) if rows]
            if not self.reading and not devices:
                break
            [reading], running = self.reading or [self._known(devices)], bool(self.running)
            reading = self.prompts.advanced(reading, keep=True)
            complete = self.prompts.complete(reading)
            self.reading = reading.without(self._refill(reading)) if complete else [reading]
            if running:
                return bool(self.reading or (self.waiting and any(self._idle())))
        return False

    def _width_of(self, requests: Iterable[Request]) -> int:
        return self.widths[-1] if self.programs.plan.chunk else super()._width_of(requests)

    def _becomes(self, width: int) -> bool:
        return False

    def _refill(self, read: Reading) -> set[int]:
        if any(self._idle()):
            self._fit([read, *self.reading])
        return super()._refill(read)

    def _fit(self, reading: Sequence[Reading]) -> None:
        """Gives the batch the width that its rows and the next ones need."""
        placed = [self.running, *(read.placed for read in reading)]
        here = [request for places in placed for _, request in places.values()]
        needed = self._width_of(here) if all_plain(here) else self.widths[-1]
        width = next(size for size in self.widths if size >= max(needed, *(read.width for read in reading)))
        if width == self.width:
            return
        self.state = self._resized(self.state, self.width, width)
        self.width = width

    def _resized(self, state: Any, width: int, wanted: int) -> Any:
        """The batch's state, resized from `width` to `wanted`."""
        programs, rows = self.programs, self.batch_size
        if wanted not in self.blank:
            self.blank[wanted] = self._nothing(1, wanted)
        nowhere = np.full(programs.devices, rows, np.int32)
        resize = programs.refill(rows, width, 1, wanted, True)
        return programs.call(resize, state, self.blank[wanted], programs.place(nowhere))

    def _known(self, devices: Sequence[int]) -> Reading:
        """Starts reading the next request on each of these devices; restores cached prefixes."""
        reading = self._reading({device: self.waiting.pop() for device in devices if self.waiting}, 1)
        reading = self.prompts.restored(reading._replace(fresh=self._begun(reading, unread=True)))
        self.cached |= {number: self.prompts.cached_tokens(reading) for number, _ in reading.placed.values()}
        return reading

    def precompile(self, widths: Sequence[int]) -> None:
        programs, rows, chunk = self.programs, self.batch_size, self.programs.plan.chunk
        sizes = programs.plan.block_sizes or (None,)
        for width in self.widths:
            for size in sizes:
                programs.run(rows, width, True, size)
            if 0 in sizes:
                programs.catch_up(rows, width)
            programs.stop(rows, width)
            for other in self.widths:
                if other != width:
                    programs.refill(rows, width, 1, other, True)
            for fresh in [width] if chunk else [size for size in widths if size <= width]:
                for count in {1} if chunk else {1, self.ahead}:
                    programs.refill(rows, width, count, fresh, False)
        for size in sizes:
            programs.run(rows, self.widths[-1], False, size)  # a narrow batch has no truncations
        for number in range(len(programs.readers)) if chunk else ():
            programs.read(1, self.widths[0], number, chunk)
            if self.prompts.stores(number):
                programs.cut(1, self.widths[0], number, chunk)
                programs.put(1, self.widths[0], number, chunk)

    def measure(
        self, settings: Settings, widths: Sequence[int] = (), plain: Sequence[bool] = (True, False)
    ) -> None:
        """Measures the seconds of a round of each block size in a full batch of each of `widths` (by default
        all), without truncations and with them. Call precompile() first."""
        blocks, programs, rows = self.blocks, self.programs, self.batch_size
        sampler: Any = programs.plan.sampler
        if blocks is None:
            return
        for lossless, method in {rule.lossless: n for n, rule in enumerate(sampler.methods)}.items():
            request = Request([programs.plan.eos_id], settings, methods=(method,))
            everywhere = {row: (row, request) for row in range(rows * programs.devices)}
            reading = Reading(everywhere, None, rows, self.widths[0])
            state = self._begun(reading, unread=bool(programs.plan.chunk))
            sizes = [size for size in blocks.sizes if size or lossless]
            for width in widths or self.widths:
                if width != self.widths[0]:
                    state = self._resized(state, self.widths[0], width)
                for alone in plain if width == self.widths[-1] else (True,):
                    by_size = {size: programs.run(rows, width, alone, size) for size in sizes}
                    blocks.seconds[Timed(rows, width, alone, lossless)] = self._seconds(by_size, state, width)

    def _seconds(self, by_size: dict[int, Any], state: Any, width: int) -> dict[int, float]:
        """The median seconds of a round of each program. The programs run in turn, so that a busy machine
        slows all of them."""
        programs, spent = self.programs, {size: list[float]() for size in by_size}
        # A program donates the memory of its state, so each run gets a copy.
        copied = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=shardings(state))
        for _ in range(TIMED):
            for size, program in by_size.items():
                fresh, began = jax.block_until_ready(copied(state)), time.perf_counter()
                arguments = (programs.weights, fresh, np.int32(self.batch_size), np.int32(ROUNDS))
                _, seen = programs.call(program, *arguments)
                rounds = programs.snapshot(self.batch_size, width, seen).counts[-1].rounds.max()
                spent[size].append((time.perf_counter() - began) / max(rounds, 1))
        return {size: median(seconds) for size, seconds in spent.items()}


class Timed(NamedTuple):
    """The conditions that determine a round's seconds, apart from its block size."""

    rows: int
    width: int
    plain: bool
    lossless: bool  # no row needs the distribution at the bonus position


def limit_of(request: Request) -> int:
    """A request's largest number of drafts per round."""
    return request.settings.block_sizes(1)[-1]


def all_plain(requests: Iterable[Request]) -> bool:
    """Whether no request uses a truncation."""
    every = [request.settings for request in requests]
    return all(
        getattr(settings, name) in (None, truncation.off)
        for settings in every
        for name, truncation in TRUNCATIONS.items()
    )
