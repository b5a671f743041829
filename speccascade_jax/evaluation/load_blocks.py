"""Compares block sizes that follow the load with fixed ones and the verifier alone, in a server's
scheduler."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import ability_of
from speccascade_jax.core.samplers.named import VERIFIER
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.blocks import sizes_up_to
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import Lane
from speccascade_jax.settings import Settings


class Pass(NamedTuple):
    """The measurements of one pass over the texts."""

    tokens_per_second: float
    first_token_ms: float  # median
    block_size: float  # mean over turns; 0 for the verifier alone


@dataclasses.dataclass
class Decoder:
    """A full batch whose rows take the next text as soon as one ends."""

    scheduler: Continuous
    lane: Lane
    settings: Settings
    rows: int
    fixed: int | None = None  # a block size for all rounds

    def requests(self, cascade: Cascade, texts: Sequence[str]) -> list[Request]:
        read, _ = cascade.encode(texts, truncate=True)
        numbers = self.lane.numbers(self.settings)
        return [
            Request(row, self.settings, n, numbers, foreign=foreign)
            for n, (row, foreign) in enumerate(zip(read, cascade.foreign_readings(texts), strict=True))
        ]

    def run(self, requests: Sequence[Request]) -> Pass:
        """Decodes all requests, keeping twice as many requests as rows in the scheduler."""
        scheduler, waiting, came = self.scheduler, iter(requests), dict[int, float]()
        unseen, firsts, sizes, tokens = set[int](), list[float](), list[int](), 0
        blocks = scheduler.blocks
        if blocks is not None and self.fixed is not None:
            blocks.seconds = {}  # measured for other sizes
        began = time.perf_counter()
        while True:
            for request in islice(waiting, 2 * self.rows - len(came)):
                [number] = scheduler.admit([request])
                came[number] = time.perf_counter()
                unseen.add(number)
            if not came:
                break
            scheduler.run(2)
            now = time.perf_counter()
            done = dict(scheduler.finished())
            for number in [*unseen]:
                begun = scheduler.partial(number)
                if number in done or (begun is not None and begun.tokens):
                    unseen.remove(number)
                    firsts.append(now - came[number])
            for number, result in done.items():
                del came[number]
                if isinstance(result, Exception):
                    raise result
                tokens += len(result.tokens)
            sizes.append(0 if blocks is None else blocks.size)
        seconds = time.perf_counter() - began
        return Pass(tokens / seconds, 1000 * median(firsts), sum(sizes) / len(sizes))


def decoders(cascade: Cascade, settings: Settings, rows: int) -> dict[str, Decoder]:
    """The decoders: block sizes by load, the settings' fixed size, and the verifier alone."""
    alone = settings.by(VERIFIER)
    width, made = cascade.max_source_length, dict[str, Decoder]()
    for name, choice in (("by_load", settings), ("fixed", settings), ("verifier", alone)):
        [lane] = cascade.lanes([choice]).values()
        if choice is settings and not ability_of(lane.plan.sampler, "resizes"):
            raise FieldError(
                "by_load",
                rows,
                "take a config of one drafter that drafts token by token and one verifier.",
                "the drafts of these models have one size",
            )
        fixed = None
        if choice is settings:
            size = lane.plan.sampler.width - 1
            plan = dataclasses.replace(lane.plan, ragged=True, block_sizes=sizes_up_to(size))
            lane, fixed = lane._replace(plan=plan), size if name == "fixed" else None
        scheduler = cascade.steady_scheduler(lane.plan, lane.params, rows, width)
        made[name] = Decoder(scheduler, lane, choice, rows, fixed)
    return made


def compared(
    cascade: Cascade,
    settings: Settings,
    rows: int,
    texts: Sequence[str],
    passes: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The figures of each decoder over the passes, which they make in turn, and the throughput of blocks by
    load relative to the better of the others, for each pass and as a median.

    Raises FieldError for models whose blocks cannot follow the load.
    """
    all_of = decoders(cascade, settings, rows)
    requests = {name: decoder.requests(cascade, texts) for name, decoder in all_of.items()}
    for name, decoder in all_of.items():
        decoder.run(requests[name])  # compiles
        say(f"{rows} rows, {name}: compiled")
    by_load = all_of["by_load"].scheduler
    if by_load.blocks is not None:
        by_load.measure(settings, by_load.widths[:1], (True,))
        by_load.programs.catch_up(rows, by_load.widths[0])
        for kind, seconds in by_load.blocks.seconds.items():
            shown = ", ".join(f"{size}: {1000 * value:.1f}" for size, value in seconds.items())
            say(f"{rows} rows, width {kind.width}: ms of a round by block size: {shown}")
    measured: dict[str, list[Pass]] = {name: [] for name in all_of}
    for turn in range(passes):  # in alternating order: what runs first in a pass may find the machine slower
        for name in [*all_of][:: -1 if turn % 2 else 1]:
            measured[name].append(all_of[name].run(requests[name]))
    ratios = sorted(
        load.tokens_per_second / max(fixed.tokens_per_second, alone.tokens_per_second)
        for load, fixed, alone in zip(*measured.values(), strict=True)
    )
    return {
        **{
            name: {field: median(getattr(timed, field) for timed in several) for field in Pass._fields}
            for name, several in measured.items()
        },
        "ratio": median(ratios),
        "ratio_least": ratios[0],
        "ratio_most": ratios[-1],
    }
