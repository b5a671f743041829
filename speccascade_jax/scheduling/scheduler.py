"""The scheduler: requests wait for free rows, rounds run, and finished rows are returned.

    scheduler = Scheduler(programs, batch_size, tokenizer, bucket)
    ids = scheduler.admit(requests)
    while scheduler.busy:
        scheduler.run()
        for number, result in scheduler.finished():
            ...

It is the only loop over batches: decoding of files, evaluation and streaming all use it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.loop import Requests
from speccascade_jax.core.methods import Method
from speccascade_jax.core.protocols import NO_TOKEN, Markers, Origin
from speccascade_jax.core.samplers.proposals import Proposals
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.core.verification import is_default, verifications_of
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.scheduling.programs import Plan, Programs, Seeds, Snapshot, key_data
from speccascade_jax.scheduling.prompts import Entry, Prompts, Reading, Request
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.markers import LONGEST, PLACES, Tokenized
from speccascade_jax.tokenizers.tokenizer import Tokenizer, pad, up_to_stop
from speccascade_jax.vocabularies.joining import inputs_of

LOOK_EVERY = 8  # rounds between two searches for stop sequences
ALL_ROUNDS = np.int32(2**31 - 1)
ORIGINS = [origin.name.lower() for origin in sorted(Origin)]  # by number


class Result(NamedTuple):
    """The result of a request: its tokens up to the end or a stop sequence, their origins, and the counts."""

    tokens: list[int]
    origin: list[str]
    level: list[int]
    counts: dict[str, Any]


class LogitsError(ValueError):
    """Takes the place of a request's Result if a model's logits are NaN."""

    def __init__(self) -> None:
        super().__init__(
            "a model gave logits that are not numbers: the checkpoint is damaged, or dtype "
            "bfloat16 is too narrow for it."
        )


class Lane(NamedTuple):
    """Requests that share a program: its plan, its parameters, and the methods of each level."""

    plan: Plan
    params: Any
    methods: tuple[tuple[Method, ...], ...]

    def numbers(self, settings: Settings) -> tuple[int, ...]:
        """The index of the method that these settings name at each level.

        Raises FieldError for a verification that the lane does not have, and ValueError for such a method.
        """
        ways = verifications_of(self.plan.sampler)
        unasked = not self.methods and is_default(settings.verification)
        if ways and settings.verification not in ways and not unasked:
            raise FieldError(
                "verification",
                settings.verification,
                f"take {' or '.join(ways)}.",
                f"verification {settings.verification} is not compiled into this program",
            )
        rules = settings.rules(len(self.methods)) if self.methods else ()
        return tuple(known.index(rule) for known, rule in zip(self.methods, rules, strict=True))


class Proposer(Protocol):
    """Drafts on the host between two rounds, for a sampler whose first model is a
    core.samplers.proposals.Proposed."""

    def __call__(
        self, running: Mapping[int, tuple[int, Request]], written_by: Callable[[int], list[int]]
    ) -> Proposals:
        """The next drafts of the running rows. written_by(row) returns the tokens that a row has written."""
        ...


class Scheduler:
    """Runs requests in the rows of a batch, `batch_size` on each device; the others wait for a row.

    The longest waiting request is scheduled first, so that few rows are idle at the end and the batch's
    inputs become narrower over time. A result depends only on its request, never on other requests. (This
    holds in float32; other dtypes round products of different shapes differently.)
    """

    def __init__(
        self,
        programs: Programs,
        batch_size: int,
        tokenizer: Tokenizer,
        bucket: Callable[[int], int],
        proposer: Proposer | None = None,
        prefixes: PrefixCache | None = None,
    ):
        self.proposer, self.prompts = proposer, Prompts(programs, prefixes)
        self.programs, self.batch_size, self.tokenizer, self.bucket = programs, batch_size, tokenizer, bucket
        # The number of idle rows per device at which they are refilled.
        self.share = max(batch_size // 4, 1)
        self.waiting: list[tuple[int, Request]] = []  # the next request is last
        self.running: dict[int, tuple[int, Request]] = {}  # by row, numbered over all devices
        self.done: list[tuple[int, Result | LogitsError]] = []
        self.state: Any = None
        self.seen: Any = None  # a Snapshot of the state after the last run()
        self.width = self.admitted = 0

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self.waiting or self.running)

    def admit(self, requests: Iterable[Request]) -> list[int]:
        """Queues the requests and returns their ids, in order."""
        new = list(enumerate(requests, self.admitted))
        self.admitted += len(new)
        self.waiting = sorted([*self.waiting, *new], key=self._turn)
        return [number for number, _ in new]

    def _turn(self, entry: tuple[int, Request]) -> Any:
        """The sort key of a request in the queue; the largest is scheduled first."""
        return entry[1].size, entry[0]

    def cancel(self, number: int) -> None:
        """Removes a request and frees its row at once. A finished or unknown request is ignored."""
        self.waiting = [entry for entry in self.waiting if entry[0] != number]
        self._stop([row for row, (other, _) in self.running.items() if other == number])

    def finished(self) -> list[tuple[int, Result | LogitsError]]:
        """The (id, outcome) pairs of the requests that have finished since the last call. A request with NaN
        logits ends with a LogitsError; the others continue."""
        done, self.done = self.done, []
        return done

    def partial(self, number: int) -> Result | None:
        """The tokens that a running request had after the last run(); None if it is not running."""
        row = next((row for row, (other, _) in self.running.items() if other == number), None)
        return None if row is None or self.seen is None else self._result(row, self.running[row][1])[0]

    def run(self, rounds: int | None = None) -> None:
        """Gives rows to waiting requests, then runs until rows can be refilled, all requests are done, or
        `rounds` rounds have run. Returns every few rounds if a request has stop sequences.
        """
        held = self._place()
        if not self.running:
            return
        stops = any(request.stop for _, request in self.running.values())
        limit = ALL_ROUNDS if rounds is None else np.int32(rounds)
        limit = min(limit, np.int32(1 if held else LOOK_EVERY)) if stops or held else limit
        enough = self.share if self.waiting and not held else self.batch_size
        self.seen = self._rounds(np.int32(enough), limit)
        self._take_finished()

    def _rounds(self, enough: np.int32, limit: np.int32) -> Snapshot:
        """Runs up to `limit` rounds, or until `enough` rows are finished. With a proposer, it runs one
        round."""
        if self.proposer is not None:
            proposals = self.programs.place(self.proposer(self.running, self._written))
            self.state = self.state._replace(caches=(proposals, *self.state.caches[1:]))
            limit = np.int32(1)
        program, programs = self._program(), self.programs
        self.state, seen = programs.call(program, programs.weights, self.state, enough, limit)
        return programs.snapshot(self.batch_size, self.width, seen)

    def _program(self) -> Any:
        """The program that runs the next rounds."""
        return self.programs.run(self.batch_size, self.width)

    def _written(self, row: int) -> list[int]:
        """The tokens that a row had written after the last run()."""
        return self.seen.tokens[row, : int(self.seen.emitted[row])].tolist()

    def _take_finished(self) -> None:
        room, stopped = self.seen.room, list[int]()
        for row, (number, request) in [*self.running.items()]:
            broken = self._broken(row)
            if room[row] > 0 and not (request.stop or broken):
                continue
            result, complete = (LogitsError(), True) if broken else self._result(row, request)
            if room[row] == 0:
                del self.running[row]
            elif complete:
                stopped.append(row)
            else:
                continue
            self.done.append((number, result))
        self._stop(stopped)

    def _broken(self, row: int) -> bool:
        """Whether a row's logits were NaN: then its tokens contain ids outside the vocabulary."""
        tokens, emitted = self.seen.tokens[row], int(self.seen.emitted[row])
        return bool((tokens[:emitted] >= self.programs.plan.vocab_size).any())

    def _result(self, row: int, request: Request) -> tuple[Result, bool]:
        """A row's result up to its stop sequence, and whether it has reached one."""
        seen, written = self.seen, self._written(row)
        stopped = up_to_stop(self.tokenizer, written, request.stop, goes_on=bool(seen.room[row] > 0))
        if stopped is None:
            kept, counts = written, jax.tree.map(lambda x: x[row], seen.counts)
        else:
            kept = stopped[0]
            counts = counts_at(seen.history, row, len(kept))
        levels, origins = np.divmod(seen.origin[row, : len(kept)], len(Origin))
        names = [ORIGINS[code] for code in origins.tolist()]
        numbers = self.programs.plan.sampler.plain(counts)
        return Result(kept, names, levels.tolist(), numbers), stopped is not None

    def _stop(self, rows: list[int]) -> None:
        """Frees rows that are not finished."""
        if not rows:
            return
        which = np.isin(np.arange(self.batch_size * self.programs.devices), rows)
        programs = self.programs
        self.state = programs.call(
            programs.stop(self.batch_size, self.width), self.state, programs.place(which)
        )
        for row in rows:
            del self.running[row]

    def _place(self) -> bool:
        """Gives idle rows to waiting requests once every device has enough of them. Returns whether the
        running rows must do a round before more prompts are read."""
        while self.waiting:
            anew = not self.running
            count = self.batch_size if anew else self.share
            if min(map(len, self._idle())) < count:
                break
            read = self._read(count, range(self.programs.devices))
            if anew:
                self.state, self.width, self.running = read.fresh, read.width, read.placed
            else:
                self._refill(read)
        return False

    def _read(self, count: int, devices: Sequence[int]) -> Reading:
        """Reads the prompts of the next requests, up to `count` per device."""
        chosen = {
            device * count + k: self.waiting.pop() for k in range(count) for device in devices if self.waiting
        }
        reading = self._reading(chosen, count)
        if not self.prompts.shares(reading):
            return reading._replace(fresh=self._begun(reading))
        for request in self.prompts.ahead(reading):
            self._read_to_the_end(self._reading({0: (-1, request)}, 1), keep=True)
        return self._read_to_the_end(reading, keep=False)

    def _reading(self, chosen: dict[int, Entry], count: int) -> Reading:
        """A reading of these requests that has not started."""
        return Reading(chosen, None, count, self._width_of([request for _, request in chosen.values()]))

    def _read_to_the_end(self, reading: Reading, keep: bool) -> Reading:
        """Reads the prompts in chunks, after restoring cached prefixes. With `keep`, the chunks are
        cached."""
        reading = self.prompts.restored(reading._replace(fresh=self._begun(reading, unread=True)))
        while not self.prompts.complete(reading):
            reading = self.prompts.advanced(reading, keep)
        return reading

    def _width_of(self, requests: Iterable[Request]) -> int:
        return max(self.bucket(request.size) for request in requests)

    def _idle(self) -> list[list[int]]:
        """Each device's idle rows."""
        rows = self.batch_size
        return [
            [row for row in range(rows) if device * rows + row not in self.running]
            for device in range(self.programs.devices)
        ]

    def _refill(self, read: Reading) -> set[int]:
        """Moves as many requests of a reading as possible into idle rows, and returns their ids."""
        programs, rows, count, width = self.programs, self.batch_size, read.rows, read.width
        slots = np.full(count * programs.devices, rows, np.int32)  # `rows` means no slot
        for device, local in enumerate(self._idle()):
            places = [place for place in read.placed if place // count == device][: len(local)]
            slots[places] = local[: len(places)]
        taken = {
            place // count * rows + int(slots[place]): entry
            for place, entry in read.placed.items()
            if slots[place] < rows
        }
        if not taken:
            return set()
        self.running |= taken
        like_fresh = self._becomes(width)
        refill = programs.refill(rows, self.width, count, width, like_fresh)
        self.state = programs.call(refill, self.state, read.fresh, programs.place(slots))
        self.width = width if like_fresh else self.width
        return {number for number, _ in taken.values()}

    def _becomes(self, width: int) -> bool:
        """Whether the batch takes on the width of the requests that refill it."""
        needed = self._width_of(request for _, request in self.running.values())
        return width > self.width or (width < self.width and needed <= width)

    def precompile(self, widths: Sequence[int]) -> None:
        """Compiles every program that requests of these widths, in ascending order, may need."""
        programs, rows = self.programs, self.batch_size
        stops = programs.plan.history > 0
        for width in widths:
            programs.run(rows, width)
            if stops:
                programs.stop(rows, width)
            for other in [w for w in widths if w <= width] if rows > 1 else []:
                programs.refill(rows, width, self.share, other, False)
                if other < width:
                    programs.refill(rows, width, self.share, other, True)

    def _begun(self, reading: Reading, unread: bool = False) -> Any:
        """The initial state of a reading's rows; with `unread`, readers have not read their prompts."""
        programs, count, width = self.programs, reading.rows, reading.width
        plan, nobody = programs.plan, (-1, Request((), Settings()))
        rows = [reading.placed.get(row, nobody)[1] for row in range(count * programs.devices)]
        want = None
        if plan.ragged:
            sizes = [request.settings.block_sizes(plan.sampler.level)[-1] for request in rows]
            want = np.array(sizes, np.int32) + 1
        batch, want = programs.place((arguments(plan, rows, width, self.tokenizer.pad_id), want))
        return programs.call(programs.begin(count, width, unread), programs.weights, batch, want)


def arguments(plan: Plan, requests: Sequence[Request], width: int, pad_id: int) -> Requests:
    """The requests in the form that begin() takes, with Seeds for keys and inputs padded to `width`. A
    request without tokens is an empty row."""
    settings = [request.settings for request in requests]

    def column(name: str, off: float, dtype: Any) -> np.ndarray:
        with np.errstate(over="ignore"):  # 1e308 may overflow to infinity
            return np.array([off if (value := getattr(s, name)) is None else value for s in settings], dtype)

    inputs, lengths = pad([request.tokens for request in requests], width, pad_id)
    options = plan.options(
        column("temperature", 0, np.float32),
        {name: column(name, TRUNCATIONS[name].off, TRUNCATIONS[name].dtype) for name in plan.truncations},
    )
    inputs = inputs_of(plan.sampler.models, inputs, [request.foreign for request in requests])
    rows, levels = len(requests), plan.sampler.level
    alphas = as_floats([s.of_levels("alpha", levels) for s in settings])
    ways = verifications_of(plan.sampler)
    methods = np.array([request.methods or (0,) * levels for request in requests], np.int32)
    return Requests._make(
        (
            Seeds(
                np.stack([key_data(s.seed) for s in settings]),
                np.array([request.number for request in requests], np.uint32),
            ),
            inputs,
            lengths,
            column("max_new_tokens", plan.max_new_tokens, np.int32),
            options,
            alphas.reshape(rows, levels),
            methods.reshape(rows, levels),
            np.array(
                [ways.index(s.verification) if s.verification in ways else 0 for s in settings], np.int32
            ),
            markers_of([request.spans for request in requests], levels) if plan.spans else None,
        )
    )


def as_floats(values: Any) -> np.ndarray:
    """Converts to float32, clipped to its finite range."""
    largest = np.finfo(np.float32).max
    return np.clip(values, -largest, largest).astype(np.float32)


def markers_of(rows: Sequence[Tokenized], levels: int) -> Markers:
    """The rows' markers, padded to PLACES."""
    tokens = np.full((len(rows), PLACES, LONGEST), NO_TOKEN, np.int32)
    alphas = np.zeros((len(rows), PLACES, levels), np.float32)
    for row, spans in enumerate(rows):
        for place, (marker, leniences) in enumerate(spans):
            tokens[row, place, LONGEST - len(marker) :] = marker
            alphas[row, place] = as_floats(leniences)
    return Markers(tokens, alphas)


def counts_at(history: Any, row: int, size: int) -> Any:
    """A row's counts after the first round by which it had written `size` tokens."""
    rounds, kept = int(history.rounds[row]), history.emitted.shape[1]
    last = (n % kept for n in range(max(rounds - kept, 0), rounds))
    at = next(n for n in last if history.emitted[row, n] >= size)
    return jax.tree.map(lambda x: x[row, at], history.counts)
