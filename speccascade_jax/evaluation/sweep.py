"""A sweep: the quality and latency of a pair at many settings.

A sweep's folder has quality.jsonl, with a line for each point, and latency.jsonl, with a line for each timed
example. Killed runs resume both. A point is a Settings.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method, Scheme
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers.named import SINGLE_MODEL
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.core.verification import TOKEN, is_default
from speccascade_jax.evaluation.quality import METRICS, statistics
from speccascade_jax.evaluation.rates import check_counts, position_acceptance
from speccascade_jax.inference.outputs import resume
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.settings import NAMED, Settings

COMPARED = (
    "token_v3",
    "opt",
    "diff",
    "chow",
    "lossy",
    "bild_star",
    "speculative",
    "token_cascade",
    "sequence",
    "mixture",
    "typical",
    "cactus",
    "relaxed",
)  # the methods that a sweep compares by default
LOSSLESS = tuple(name for name, method in METHODS.items() if method.lossless)
TENTHS = tuple(n / 10 for n in range(11))
WARM = 5  # untimed examples: XLA on CPUs makes a kernel when it first runs, and adaptive blocks have
# kernels of each width
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # raised by damaged lines
References = Sequence[Sequence[str]]
Track = Callable[[Sequence[Any], str], Iterator[Any]]


def block_size_of(point: Settings) -> Any:
    """The block size of a point, which may be "adaptive"; 0 if its method has none. A config's own sampler
    has none at block size 1, which is what grid() gives to samplers."""
    entries = [NAMED.get(name) for name in point.name.split("+")]
    unknown = None in entries and point.block_size == 1
    return 0 if unknown or any(isinstance(entry, Scheme) for entry in entries) else point.block_size


def alone(point: Settings, model: str) -> Settings:
    """The settings of one model (`verifier` or `drafter`) decoding alone like the point, without
    verification."""
    return dataclasses.replace(
        point, method=model, alpha=0.0, alpha_after={}, block_size=1, verification=TOKEN.name
    )


def curve_of(point: Settings) -> str:
    """The name of the curve of points that differ only in alpha: the method, and in parentheses the
    verification and the lenience after a marker if they are not the default."""
    after = "/".join(
        "+".join(f"{value:g}" for value in (values if isinstance(values, tuple) else (values,)))
        for values in point.alpha_after.values()
    )
    unusual = [point.verification] * (not is_default(point.verification)) + [f"{after} after"] * bool(after)
    return f"{point.name} ({'; '.join(unusual)})" if unusual else point.name


class Contest(NamedTuple):
    """A point's curve, its lenience on that curve, and the verifier that it is compared with."""

    name: str
    lenience: Any
    panel: Settings


def contests(point: Settings, points: Any) -> Iterator[Contest]:
    """The curves on which a point of `points` lies: that of points with the same truncation and, if the
    truncation is its lenience, one that is compared with the verifier without truncation."""
    verifier = alone(point, "verifier")
    if alone(point, "drafter") in points:
        yield Contest(curve_of(point), point.alpha, verifier)
    follows_verifier = point.lossless or point == verifier
    for kind in TRUNCATIONS if follows_verifier and point.temperature > 0 else ():
        without: dict[str, Any] = {kind: None}
        plain, value = dataclasses.replace(verifier, **without), getattr(point, kind)
        if value is not None and plain in points:
            yield Contest(f"{curve_of(point)}, {kind}", value, plain)


def grid(
    base: Settings,
    methods: Sequence[str],
    alphas: Sequence[float] | None,
    block_sizes: Sequence[Any],
    temperatures: Sequence[float],
    top_ps: Sequence[float | None] = (None,),
    truncations: Sequence[str] = (),
    known: Mapping[str, Method | Scheme] = NAMED,
    verifications: Sequence[str] | None = None,
    alphas_after: Sequence[float] | None = None,
) -> list[Settings]:
    """Every point once, with the two models alone first at each temperature and top-p. At temperature 0, only
    the first top-p appears, since truncation changes no text. Other fields are those of `base`. Without
    truncation, the grid also contains the verifier and the LOSSLESS methods at all values of the
    `truncations`, with the first of the `verifications`.

    alphas (by default tenths, and those `between` of the method's Sweep) are multiplied by the Sweep's
    `scale`, and those in [0, 1] are clipped to the method's range. The same applies to alphas_after, the
    leniences after any of base's markers; None keeps those. Greedy methods appear only at temperature 0,
    methods without a block size once for all `block_sizes` and `verifications`, and lossless ones once for
    all alphas. known: the methods by name.

    Raises FieldError for an empty list, a method that is unknown or repeated, a value out of range, and
    alphas_after without a marker.
    """
    ways = (base.verification,) if verifications is None else verifications
    _check_lists(base, methods, alphas, block_sizes, temperatures, top_ps, ways, alphas_after)
    points: dict[Settings, None] = {}
    rules = {method: _rule(method, known) for method in methods}
    if len(rules) < len(methods):
        twice = next(method for method in methods if methods.count(method) > 1)
        raise FieldError("methods", twice, "name it once.", f"--methods names {twice!r} twice")
    for temperature, top_p in itertools.product(temperatures, top_ps):
        changes: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
        chosen = dataclasses.replace(base, **changes)
        points |= dict.fromkeys(alone(chosen, model) for model in SINGLE_MODEL)
        for method, rule in rules.items():
            if method in SINGLE_MODEL or (isinstance(rule, Scheme) and rule.greedy and temperature != 0):
                continue
            settings = chosen.by(method, known)
            points |= dict.fromkeys(_points_of(settings, rule, alphas, block_sizes, ways, alphas_after))
        if temperature > 0 and top_p is None:
            points |= dict.fromkeys(_truncated(chosen, truncations, block_sizes, ways[0]))
    for point in points:
        point.check(10**9, known=known)  # the vocabulary size is unknown before the models are loaded
    return [point for point in points if point.temperature > 0 or point.top_p == top_ps[0]]


def _check_lists(
    base: Settings,
    methods: Sequence[str],
    alphas: Sequence[float] | None,
    block_sizes: Sequence[Any],
    temperatures: Sequence[float],
    top_ps: Sequence[float | None],
    ways: Sequence[str],
    alphas_after: Sequence[float] | None,
) -> None:
    """Raises FieldError for an empty list, a block size below 1, and alphas_after without a marker."""
    if (least := min((size for size in block_sizes if isinstance(size, int)), default=1)) < 1:
        raise FieldError("block_sizes", least, "each is at least 1.", f"--block-sizes holds {least}")
    for name, values in (
        ("methods", methods),
        ("alphas", TENTHS if alphas is None else alphas),
        ("block-sizes", block_sizes),
        ("temperatures", temperatures),
        ("top-ps", top_ps),
        ("verifications", ways),
        ("alphas-after", (0.0,) if alphas_after is None else alphas_after),
    ):
        if not values:
            raise FieldError(name.replace("-", "_"), values, "give at least one.", f"--{name} is empty")
    if alphas_after is not None and not base.alpha_after:
        raise FieldError(
            "alphas_after",
            alphas_after,
            "name one with --alpha-after, whatever its lenience.",
            "--alphas-after holds leniences after a marker, and there is no marker",
        )


def _points_of(
    settings: Settings,
    rule: Method | Scheme,
    alphas: Sequence[float] | None,
    block_sizes: Sequence[Any],
    ways: Sequence[str],
    alphas_after: Sequence[float] | None,
) -> Iterator[Settings]:
    """The points of the method in `settings`, whose entry is `rule`."""
    method = settings.name
    sizes = [(1, TOKEN.name)] if isinstance(rule, Scheme) else itertools.product(block_sizes, ways)
    leniences = sorted({*TENTHS, *rule.sweep.between}) if alphas is None else alphas
    if isinstance(rule, Method) and rule.lossless:
        leniences = (0.0,)
    spans: list[Any] = [settings.alpha_after]
    if settings.alpha_after and alphas_after is not None:
        values = [_lenience("alphas_after", method, rule, alpha) for alpha in alphas_after]
        spans = [dict.fromkeys(settings.alpha_after, value) for value in values]
    for (block_size, way), alpha, span in itertools.product(sizes, leniences, spans):
        yield dataclasses.replace(
            settings,
            block_size=block_size,
            verification=way,
            alpha=_lenience("alphas", method, rule, alpha),
            alpha_after=span,
        )


def _truncated(
    chosen: Settings, truncations: Sequence[str], block_sizes: Sequence[Any], way: str
) -> Iterator[Settings]:
    """The verifier alone and the LOSSLESS methods at all values of each truncation that `chosen` leaves
    off."""
    for kind in truncations:
        for value in TRUNCATIONS[kind].sweep if getattr(chosen, kind) is None else ():
            changed: dict[str, Any] = {kind: value, "alpha": 0.0, "alpha_after": {}, "verification": way}
            cuts = [
                dataclasses.replace(chosen, **changed, method=method, block_size=size)
                for method in LOSSLESS
                for size in block_sizes
            ]
            yield alone(cuts[0], "verifier")
            yield from cuts


def _rule(method: str, known: Mapping[str, Method | Scheme]) -> Method | Scheme:
    if method not in known:
        raise FieldError("methods", method, f"known: {', '.join(known)}.", f"unknown method {method!r}")
    return known[method]


def _lenience(field: str, method: str, rule: Method | Scheme, alpha: float) -> float:
    value = alpha * rule.sweep.scale
    if not 0 <= alpha < math.inf or (alpha > 1 and value > rule.high):
        flag = field.replace("_", "-")
        raise FieldError(field, alpha, f"for {method} it must be in [0, 1].", f"--{flag} holds {alpha}")
    return round(min(max(value, rule.low), rule.high), 6)


def _is_timed(point: Settings) -> bool:
    entry = NAMED.get(point.name)
    return entry is None or entry.sweep.timed


class OneShape(Cascade):
    """A Cascade that pads all inputs to one length, so that each method and block size needs one program."""

    def bucket(self, length: int) -> int:
        return self.max_source_length


@dataclasses.dataclass(frozen=True)
class Quality:
    """A point decoded over a split."""

    statistics: np.ndarray  # [N, K], see quality.statistics
    counts: dict[str, int]  # summed over the examples
    acceptance: float  # accepted / tested drafted positions
    tokens: int

    def rate(self, above: str, below: str) -> float | None:
        return self.counts[above] / self.counts[below] if self.counts.get(below) else None


def measure_quality(
    cascade: Cascade,
    points: Sequence[Settings],
    sources: Sequence[str],
    references: References,
    metric: str,
    path: Path,
    settings: dict[str, Any],
    *,
    batch_size: int,
    track: Track,
) -> dict[Settings, Quality]:
    """The quality of every point over `sources`, read from `path` if it is already there.

    settings: everything that determines the results besides the point; stored next to `path`. Raises
    ValueError if `path` has results of other settings or a damaged line.
    """
    known: dict[Settings, Quality] = {}

    def read(_: int, line: Any) -> None:
        try:
            fields: dict[str, Any] = line["point"]
            whole: dict[str, Any] = {field.name: fields[field.name] for field in dataclasses.fields(Settings)}
            point = Settings(**{name: _as_tuples(value) for name, value in whole.items()})
            known[point] = Quality(
                _finite(line["statistics"], len(sources), METRICS[metric].sums),
                {name: int(count) for name, count in line["counts"].items()},
                float(line["acceptance"]),
                int(line["tokens"]),
            )
        except DAMAGE:
            raise ValueError("no measurement of this sweep") from None

    _, file = resume(path, settings, read)
    with file:
        for point in track([p for p in points if p not in known], "quality"):
            outputs = list(cascade.generate(sources, point, batch_size=batch_size, truncate=True))
            quality = known[point] = _quality(point, outputs, references, metric)
            line = {"point": dataclasses.asdict(point), **dataclasses.asdict(quality)}
            file.add({**line, "statistics": quality.statistics.tolist()})
    return {point: known[point] for point in points}


def _as_tuples(value: Any) -> Any:
    """A field read from JSON, with lists converted back to tuples."""
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _finite(values: Any, *shape: int) -> np.ndarray:
    numbers = np.array(values, np.float64).reshape(shape)
    if not np.isfinite(numbers).all():
        raise ValueError("no numbers")
    return numbers


def _quality(point: Settings, outputs: Sequence[Output], references: References, metric: str) -> Quality:
    rows = [output.counts for output in outputs]
    check_counts(rows, [len(output.tokens) for output in outputs], stopped=bool(point.stop))
    rows = [
        row
        | {
            f"passes of model {n}": level.get("rounds", level.get("passes"))
            for n, level in enumerate(row.get("below", ()))
        }
        for row in rows
    ]
    names = {name for row in rows for name, value in row.items() if isinstance(value, int)}
    return Quality(
        np.round(statistics(metric, [o.text for o in outputs], references), 6),
        {name: sum(row.get(name, 0) for row in rows) for name in sorted(names)},
        position_acceptance([o.origin for o in outputs]),
        sum(len(o.tokens) for o in outputs),
    )


@dataclasses.dataclass(frozen=True)
class Latency:
    """A point timed at batch 1: seconds and tokens of each example, over all trials."""

    seconds: np.ndarray  # [N]
    tokens: np.ndarray  # [N]


def measure_latency(
    cascade: Cascade,
    points: Sequence[Settings],
    sources: Sequence[str],
    path: Path,
    settings: dict[str, Any],
    *,
    trials: int,
    track: Track,
) -> dict[Settings, Latency]:
    """The time of every point for each example at batch size 1, `trials` times.

    All points decode an example in turn, in random order, so that a machine that slows down affects all of
    them. Compilation and first runs are not counted. Methods whose time is meaningless are left out.

    Raises ValueError if `path` has results of other settings or a damaged line.
    """
    points = [point for point in points if _is_timed(point)]
    settings = {**settings, "points": [dataclasses.asdict(point) for point in points]}
    totals = np.zeros((2, len(points), len(sources)))
    work = [(trial, n) for trial in range(trials) for n in range(len(sources))]

    def read(_: int, line: Any) -> None:
        try:
            work.remove((line["trial"], line["example"]))
            totals[:, :, line["example"]] += _finite([line["seconds"], line["tokens"]], 2, len(points))
        except DAMAGE:
            raise ValueError("no measurement of this sweep") from None

    def decode(point: Settings, n: int) -> tuple[float, Output]:
        before = cascade.clock.decode_seconds
        output = next(iter(cascade.generate([sources[n]], point, first_index=n, truncate=True)))
        return cascade.clock.decode_seconds - before, output

    _, file = resume(path, settings, read)
    with file:
        if work:
            rows, _ = cascade.encode(sources, truncate=True)
            programs = {
                (
                    p.method,
                    p.block_size,
                    p.verification,
                    not p.alpha_after,
                    *(getattr(p, kind) is None for kind in TRUNCATIONS),
                ): p
                for p in points
            }
            shapes = {cascade.bucket(len(row)): n for n, row in enumerate(rows)}
            examples = sorted({*shapes.values(), *range(len(rows))[:WARM]})
            for point, n in track(list(itertools.product(programs.values(), examples)), "compiling"):
                decode(point, n)
        for trial, n in track(work, "latency"):
            seconds, tokens = [0.0] * len(points), [0] * len(points)
            # In a new order each time, because a program is slower after another one than after itself.
            for k in np.random.default_rng([trial, n]).permutation(len(points)):
                seconds[k], output = decode(points[k], n)
                tokens[k] = len(output.tokens)
            totals[:, :, n] += np.array([seconds, tokens])
            file.add({"trial": trial, "example": n, "seconds": seconds, "tokens": tokens})
    return {point: Latency(*totals[:, k]) for k, point in enumerate(points)}
