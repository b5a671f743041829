"""A server in several processes: the others repeat what the first one's engine does with its lanes.

A scheduler's decisions depend only on its requests and their tokens. So the same calls in the same order run
the same programs, and all devices take part in the same collectives.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from speccascade_jax.cluster import Job
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.serving.engine import ServedLane
from speccascade_jax.settings import Settings

log = logging.getLogger("speccascade_jax.serving")
END = None
"""The last message: nothing follows."""


def described(request: Request, cascade: Cascade) -> dict[str, Any]:
    """A request as JSON; its methods are indices, not names."""
    settings = {
        field.name: getattr(request.settings, field.name)
        for field in dataclasses.fields(Settings)
        if field.name not in ("method", "alpha_after")
    }
    foreign = [request.foreign.get(model) for model in cascade.foreign]
    return {**request._asdict(), "settings": settings, "foreign": foreign}


def request_of(content: dict[str, Any], cascade: Cascade) -> Request:
    """The inverse of described()."""
    foreign = zip(cascade.foreign, content["foreign"], strict=True)
    return Request(
        content["tokens"],
        Settings(**{name: _tuples(value) for name, value in content["settings"].items()}),
        content["number"],
        _tuples(content["methods"]),
        _tuples(content["stop"]),
        {model: ids for model, ids in foreign if ids is not None},
        _tuples(content["spans"]),
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def admit(lane: ServedLane, request: dict[str, Any]) -> None:
    lane.admit(request_of(request, lane.cascade))


def run(lane: ServedLane, rounds: int) -> None:
    lane.run(rounds)
    lane.scheduler.finished()  # the first process answers
    lane.scheduler.cached.clear()


def score(lane: ServedLane, what: tuple[dict[str, Any], list[int]]) -> None:
    request, tokens = what
    lane.score(request_of(request, lane.cascade), tokens)


CALLS: dict[str, Callable[[ServedLane, Any], Any]] = {
    "admit": admit,
    "cancel": ServedLane.cancel,
    "run": run,
    "score": score,
    "reset": lambda lane, _: lane.reset(),
}
"""The calls that a lane's `tell` transmits, and the functions that repeat them."""


def lead(job: Job, lanes: Sequence[ServedLane]) -> None:
    """Makes these lanes send their calls to the other processes of a job from now on."""
    if job.processes == 1:
        return

    def teller(number: int, cascade: Cascade) -> Callable[[str, Any], None]:
        def tell(call: str, what: Any) -> None:
            if isinstance(what, Request):
                what = described(what, cascade)
            elif call == "score":
                what = (described(what[0], cascade), what[1])
            job.tell([number, call, what])

        return tell

    for number, lane in enumerate(lanes):
        lane.tell = teller(number, lane.cascade)


def follow(calls: Iterator[Any], lanes: Sequence[ServedLane]) -> None:
    """Repeats the calls of the first process, received as JSON, until the last message."""
    for number, call, what in calls:
        try:
            CALLS[call](lanes[number], what)
        except Exception as error:  # the first process raises it as well, and resets the lane
            log.error("a round failed", exc_info=error, extra={"fields": {"event": "round_failed"}})
