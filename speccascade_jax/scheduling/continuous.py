"""A server's scheduler: each request takes a row as soon as there is one, whatever the others do."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.scheduling.programs import Programs
from speccascade_jax.scheduling.prompts import Reading, Request
from speccascade_jax.scheduling.scheduler import Scheduler
from speccascade_jax.tokenizers.tokenizer import Tokenizer


class Continuous(Scheduler):
    """A Scheduler whose requests take rows as they become free, in the order they came.

    The batch has one of two widths: that of the longest request, `width`, or a third of it while all running
    requests are shorter and none truncates, since attention over padding is a tenth of a round. If many
    requests wait, the prompts of a few with similar lengths are read at once, before there are rows for all
    of them, and several rows are given away at once. With a plan's `chunk` there is one width: prompts are
    read that many tokens at a time, and running rows do a round in between.
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
        self.ahead = max(batch_size // 2, 1)  # prompts read at once for each device, where so many wait
        self.most_idle = self.share
        self.reading: list[Reading] = []
        self.blank: dict[int, Any] = {}  # by width: states that hold nothing
        self.cached: dict[int, int] = {}  # by id: tokens of its prompt that were known

    @property
    def busy(self) -> bool:
        return super().busy or bool(self.reading)

    def _turn(self, entry: tuple[int, Request]) -> Any:
        return -entry[0]

    def cancel(self, number: int) -> None:
        self.reading = [left for reading in self.reading for left in reading.without([number])]
        self.cached.pop(number, None)
        super().cancel(number)

    def run(self, rounds: int | None = None) -> None:
        self.share = self.most_idle if len(self.waiting) >= self.ahead * self.programs.devices else 1
        super().run(rounds)

    def _plain(self) -> bool:
        return all_plain(request for _, request in self.running.values())

    def _place(self) -> bool:
        if self.state is None:
            self.width = self.widths[0]
            self.state = self._nothing(self.batch_size, self.width)
        return self._place_by_chunks() if self.programs.plan.chunk else self._place_one_by_one()

    def _nothing(self, rows: int, width: int) -> Any:
        """A state of empty rows."""
        return self._begun(Reading({}, None, rows, width), unread=bool(self.programs.plan.chunk))

    def _place_one_by_one(self) -> bool:
        """Waiting requests take idle rows, those whose prompts have been read first."""
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
        """Running rows do a round between two chunks of a prompt."""
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
        """Makes the batch as wide as its rows and the next ones need."""
        programs, rows = self.programs, self.batch_size
        placed = [self.running, *(read.placed for read in reading)]
        here = [request for places in placed for _, request in places.values()]
        needed = self._width_of(here) if all_plain(here) else self.widths[-1]
        width = next(size for size in self.widths if size >= max(needed, *(read.width for read in reading)))
        if width == self.width:
            return
        if width not in self.blank:
            self.blank[width] = self._nothing(1, width)
        nowhere = np.full(programs.devices, rows, np.int32)
        resize = programs.refill(rows, self.width, 1, width, True)
        self.state = programs.call(resize, self.state, self.blank[width], programs.place(nowhere))
        self.width = width

    def _known(self, devices: Sequence[int]) -> Reading:
        """The next request on each of these devices, with what is known of its prompt."""
        reading = self._reading({device: self.waiting.pop() for device in devices if self.waiting}, 1)
        reading = self.prompts.restored(reading._replace(fresh=self._begun(reading, unread=True)))
        self.cached |= {number: self.prompts.found(reading) for number, _ in reading.placed.values()}
        return reading

    def precompile(self, widths: Sequence[int]) -> None:
        programs, rows, chunk = self.programs, self.batch_size, self.programs.plan.chunk
        for width in self.widths:
            programs.run(rows, width, True)
            programs.stop(rows, width)
            for other in self.widths:
                if other != width:
                    programs.refill(rows, width, 1, other, True)
            for fresh in [width] if chunk else [size for size in widths if size <= width]:
                for count in {1} if chunk else {1, self.ahead}:
                    programs.refill(rows, width, count, fresh, False)
        programs.run(rows, self.widths[-1], False)  # rows that truncate are never in a narrow batch
        for number in range(len(programs.readers)) if chunk else ():
            programs.read(1, self.widths[0], number, chunk)
            if self.prompts.stores(number):
                programs.cut(1, self.widths[0], number, chunk)
                programs.put(1, self.widths[0], number, chunk)


def all_plain(requests: Iterable[Request]) -> bool:
    """Whether none of them truncates."""
    every = [request.settings for request in requests]
    return all(
        getattr(settings, name) in (None, truncation.off)
        for settings in every
        for name, truncation in TRUNCATIONS.items()
    )
