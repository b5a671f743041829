"""A server's scheduler: requests take rows one by one, whatever the others do."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.scheduling.programs import Programs
from speccascade_jax.scheduling.scheduler import Reading, Request, Scheduler
from speccascade_jax.tokenizers.tokenizer import Tokenizer


class Continuous(Scheduler):
    """A Scheduler whose requests take rows as they become free, in the order they came.

    The batch has one of two widths: that of the longest request, `width`, or, as long as all that run are
    shorter and none truncates, a third of it, since attention over padding is a tenth of a round. Where many
    wait, the prompts of a few of like lengths are read at once, ahead of rows for all of them, and a share of
    the rows is given away at once.
    With a plan's `chunk` there is one width: prompts are read so many tokens at a time, and rows that run do
    a round in between.
    """

    def __init__(
        self,
        programs: Programs,
        batch_size: int,
        tokenizer: Tokenizer,
        bucket: Callable[[int], int],
        width: int,
    ):
        super().__init__(programs, batch_size, tokenizer, bucket)
        alone = programs.plan.chunk or not programs.plan.sampler.level  # a second width costs compile time
        self.widths = [width] if alone else sorted({bucket(max(width // 3, 1)), width})
        self.ahead = max(batch_size // 2, 1)  # prompts read at once for each device, where so many wait
        self.most_idle = self.share
        self.reading: list[Reading] = []
        self.blank: dict[int, Any] = {}  # by width: states that hold nothing

    @property
    def busy(self) -> bool:
        return super().busy or bool(self.reading)

    def _turn(self, entry: tuple[int, Request]) -> Any:
        return -entry[0]

    def cancel(self, number: int) -> None:
        self.reading = [left for reading in self.reading for left in reading.without([number])]
        super().cancel(number)

    def run(self, rounds: int | None = None) -> None:
        self.share = self.most_idle if len(self.waiting) >= self.ahead * self.programs.devices else 1
        super().run(rounds)

    def _plain(self) -> bool:
        return all_plain(request for _, request in self.running.values())

    def _place(self) -> bool:
        if self.state is None:
            self.width = self.widths[0]
            self.state = self._begun({}, self.batch_size, self.width)
        return self._place_by_chunks() if self.programs.plan.chunk else self._place_one_by_one()

    def _place_one_by_one(self) -> bool:
        """Whoever comes takes an idle row, those first whose prompts have been read."""
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
        """Has those take the next turns, after whose turn it is, that are as long: prompts that are read
        together are padded to the longest."""
        width = self._width_of([self.waiting[-1][1]])
        alike = [number for number, request in self.waiting if self._width_of([request]) == width]
        chosen = sorted(alike)[:count]
        self.waiting.sort(key=lambda entry: (entry[0] in chosen, -entry[0]))

    def _place_by_chunks(self) -> bool:
        """Rows that run do a round between two chunks of a prompt."""
        while self.waiting or self.reading:
            devices = [device for device, rows in enumerate(self._idle()) if rows]
            if not self.reading and not devices:
                break
            [reading], running = self.reading or [self._read(1, devices)], bool(self.running)
            self.reading = self._read_chunk(reading)
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
        """Makes the batch as wide as its rows and those to come need."""
        programs, rows = self.programs, self.batch_size
        placed = [self.running, *(read.placed for read in reading)]
        here = [request for places in placed for _, request in places.values()]
        needed = self._width_of(here) if all_plain(here) else self.widths[-1]
        width = next(size for size in self.widths if size >= max(needed, *(read.width for read in reading)))
        if width == self.width:
            return
        if width not in self.blank:
            self.blank[width] = self._begun({}, 1, width)
        nowhere = np.full(programs.devices, rows, np.int32)
        resize = programs.refill(rows, self.width, 1, width, True)
        self.state = programs.call(resize, self.state, self.blank[width], programs.place(nowhere))
        self.width = width

    def _read_chunk(self, reading: Reading) -> list[Reading]:
        """Reads the next chunk of the prompts. Fully read prompts take their rows; returns the others."""
        programs, size = self.programs, self.programs.plan.chunk
        longest = max(len(request.tokens) for _, request in reading.placed.values())
        # The last chunk that fits: it may read some tokens again.
        start = min(reading.start, reading.width - size)
        tokens = np.zeros((reading.rows * programs.devices, size), np.int32)
        for place, (_, request) in reading.placed.items():
            part = request.tokens[start : start + size]
            tokens[place, : len(part)] = part
        fresh = programs.call(
            programs.read(reading.rows, reading.width),
            programs.params,
            reading.fresh,
            programs.place(tokens),
            np.int32(start),
        )
        read = reading._replace(fresh=fresh, start=start + size)
        if read.start < longest - 1:  # the last token is read by the first round
            return [read]
        return read.without(self._refill(read))

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
        if chunk:
            programs.read(1, self.widths[0])


def all_plain(requests: Iterable[Request]) -> bool:
    """Whether none of them leaves out any of the likely tokens."""
    every = [request.settings for request in requests]
    return all(
        getattr(settings, name) in (None, truncation.off)
        for settings in every
        for name, truncation in TRUNCATIONS.items()
    )
