"""Simulates a server under load: arrivals, rows, rounds, and the latencies that clients see.

It follows the rules of scheduling.continuous and serving.engine, with given seconds for a round and a prompt
in place of the models. A round takes equally long however many rows are busy, because its programs have a
static batch. No round runs while prompts are read, or while a request is parsed and answered or refused.
"""

import collections
import dataclasses
import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.core.errors import FieldError

BUSIEST = 0.95
"""The largest load of a planned server. Closer to 1, waiting times would keep growing for too long."""
FITS = 4  # passes over the fitted fields, each of which also affects the others' rates a little
TOLERANCE = 1e-6  # of fitted fields, in seconds
LAST = 10_000_000  # most simulated rounds; a server that needs more is hopelessly overloaded


@dataclasses.dataclass(frozen=True)
class SimulatedServer:
    """The values that determine waiting times: flags of serve.py, and times on the given machine.

    Raises FieldError for values that are too small.
    """

    rows: int  # requests decoded at once
    round_seconds: float
    prompt_seconds: float  # to read one prompt
    queue: int  # most waiting requests; others are refused
    rounds: int = 1  # rounds between two checks for new requests
    together_seconds: float | None = None  # per prompt, to read `ahead` of them at once; None: prompt_seconds
    request_seconds: float = 0.0  # everything else that a request costs, even if refused: HTTP, tokenization
    step_seconds: float = 0.0  # everything else between two checks for new requests: events for clients

    def __post_init__(self) -> None:
        least = {"rows": 1, "queue": 0, "rounds": 1}
        least |= dict.fromkeys(("prompt_seconds", "request_seconds", "step_seconds"), 0)
        least |= {} if self.together_seconds is None else {"together_seconds": 0}
        for name, bound in least.items():
            if not bound <= getattr(self, name) < np.inf:
                raise FieldError(name, getattr(self, name), f"it must be at least {bound}.")
        if not 0 < self.round_seconds < np.inf:
            raise FieldError("round_seconds", self.round_seconds, "it must be above 0.")

    def by(self, name: str, seconds: float) -> "SimulatedServer":
        """The server with another value of a field that costs seconds."""
        changed: dict[str, Any] = {name: seconds}
        return dataclasses.replace(self, **changed)

    @property
    def costs(self) -> dict[str, float]:
        """The fields that cost seconds, without those that are None."""
        fields = dataclasses.asdict(self).items()
        return {name: value for name, value in fields if name.endswith("_seconds") and value is not None}

    @property
    def milliseconds(self) -> dict[str, float]:
        """All fields that cost time."""
        return {name.replace("_seconds", "_ms"): 1000 * value for name, value in self.costs.items()}

    def averaged(self, other: "SimulatedServer") -> "SimulatedServer":
        """The server with the means of its costs and another's."""
        means: dict[str, Any] = {name: (cost + other.costs[name]) / 2 for name, cost in self.costs.items()}
        return dataclasses.replace(self, **means)

    @property
    def ahead(self) -> int:
        """The number of prompts that are read together if that many wait."""
        return max(self.rows // 2, 1)

    def reading_seconds(self, prompts: int) -> float:
        """The time to read this many prompts at once."""
        together = self.prompt_seconds if self.together_seconds is None else self.together_seconds
        return prompts * (together if prompts > 1 else self.prompt_seconds)

    def load(self, rounds: Int[np.ndarray, " N"], requests_per_second: float) -> float:
        """The server's load: the share of its time in which it is busy if batches of such texts are full.
        Above 1, its queue grows without bound."""
        seconds = float(np.mean(rounds)) * self.round_seconds / self.rows
        seconds += self.reading_seconds(self.ahead) / self.ahead + self.request_seconds
        return seconds * requests_per_second


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The outcome of each request, in order of arrival. A refused request has NaN seconds."""

    first: Float[np.ndarray, " N"]  # seconds from the arrival to the first tokens
    whole: Float[np.ndarray, " N"]  # seconds from the arrival to the last tokens
    tokens: Int[np.ndarray, " N"]
    seconds: float  # from the first arrival to the last token
    busy: float  # the share of row-rounds in which a row wrote tokens

    @property
    def refused(self) -> int:
        return int(np.isnan(self.whole).sum())

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens[~np.isnan(self.whole)].sum() / self.seconds)

    def summary(self) -> dict[str, Any]:
        """Figures under the names that evaluation.load.Load uses."""
        figures: dict[str, Any] = {
            "requests": len(self.whole),
            "accepted": len(self.whole) - self.refused,
            "refused_429": self.refused,
            "tokens_per_second": self.tokens_per_second,
        }
        for key, times in (("first_token_ms", self.first), ("whole_ms", self.whole)):
            kept = 1000 * times[~np.isnan(times)]
            figures |= {f"{key}_p{p}": float(np.percentile(kept, p)) if kept.size else None for p in (50, 99)}
        return figures


@dataclasses.dataclass
class Row:
    """A request that occupies a row."""

    number: int
    left: int  # remaining rounds
    written: bool = False  # whether its client has received tokens


class Simulation:
    """The state of a server with one device, or one group of devices that share the models."""

    def __init__(
        self,
        server: SimulatedServer,
        arrivals: Float[np.ndarray, " N"],
        rounds: Int[np.ndarray, " N"],
        widths: Int[np.ndarray, " N"],
        pauses: Float[np.ndarray, " N"] | None = None,
    ) -> None:
        """With fewer `arrivals` than requests, each further request is sent when another has been answered,
        after its pause, one of `pauses` [N]."""
        self.server, self.rounds, self.widths, self.pauses = server, rounds, widths, pauses
        self.due = sorted(arrivals.tolist())  # a heap of the times of the next arrivals
        self.sent, self.arrivals = len(arrivals), np.full(len(rounds), np.nan)
        self.now, self.come = 0.0, 0
        self.waiting = {width: collections.deque[int]() for width in np.unique(widths)}
        self.read: collections.deque[int] = collections.deque()  # requests that wait for a row, prompts read
        self.rows: list[Row] = []
        self.first, self.whole = (np.full(len(rounds), np.nan) for _ in range(2))
        self.all_rounds = self.row_rounds = 0

    @property
    def unread(self) -> int:
        """The number of requests whose prompts have not been read."""
        return sum(map(len, self.waiting.values()))

    @property
    def called(self) -> bool:
        """Whether a request has arrived that is not queued or refused yet."""
        return bool(self.due) and self.due[0] <= self.now

    @property
    def many_wait(self) -> bool:
        """Whether several prompts are read together."""
        return self.unread >= self.server.ahead

    @property
    def present(self) -> int:
        """The number of requests that wait or occupy a row."""
        return self.unread + len(self.read) + len(self.rows)

    def run(self) -> None:
        """Runs until every request is answered or refused. Raises FieldError if that takes too long."""
        while self.due or self.present:
            self._hear()
            if not self.present:
                self.now = self.due[0] if self.due else self.now
                continue
            self._step()
            if self.all_rounds > LAST:
                raise FieldError(
                    "arrivals", len(self.arrivals), f"simulate fewer: they take more than {LAST:,} rounds."
                )

    def _hear(self, undelivered: int = 0) -> None:
        """Queues the requests that have arrived, or refuses them: `undelivered` texts count as present."""
        while self.called:
            self.arrivals[self.come] = heapq.heappop(self.due)
            if self.present + undelivered < self.server.rows + self.server.queue:
                self.waiting[self.widths[self.come]].append(self.come)
            else:
                self.now += self.server.request_seconds
            self.come += 1

    def _step(self) -> None:
        """Simulates ServedLane.step(): several runs of the scheduler, then deliveries to clients."""
        server = self.server
        crowded = self.present > server.rows
        fresh = bool(self.unread or self.read) or not all(row.written for row in self.rows)
        finished: list[Row] = []
        for _ in range(4 if crowded else 1 if fresh else server.rounds):
            finished += self._rounds(server.rounds if crowded else 1)
            if (self.called and not (crowded and self.many_wait)) or not self.present:
                break
        self.now += server.step_seconds
        self._hear(len(finished))
        for row in [*finished, *self.rows]:
            if not row.written:
                row.written, self.first[row.number] = True, self.now
        for row in finished:
            self.whole[row.number] = self.now
            if self.pauses is not None and self.sent < len(self.rounds):
                soon = float(np.nextafter(self.now, np.inf))  # by then the next step has begun
                heapq.heappush(self.due, soon + self.pauses[self.sent])
                self.sent += 1

    def _rounds(self, limit: int) -> list[Row]:
        """Simulates Continuous.run(): prompts are read into free rows, then up to `limit` rounds run, until
        as many rows are free as the waiting requests need. Returns the finished rows."""
        share = max(self.server.rows // 4, 1) if self.many_wait else 1
        self._place()
        enough = share if self.unread else self.server.rows
        finished = list[Row]()
        for _ in range(limit):
            if not self.rows or self.server.rows - len(self.rows) >= enough:
                break
            self.now += self.server.round_seconds
            self.all_rounds += 1
            self.row_rounds += len(self.rows)
            for row in self.rows:
                row.left -= 1
            finished += [row for row in self.rows if row.left == 0]
            self.rows = [row for row in self.rows if row.left > 0]
        return finished

    def _place(self) -> None:
        """Simulates Continuous._place_one_by_one(): gives idle rows to requests whose prompts have been read,
        then reads more."""
        while len(self.rows) < self.server.rows and (self.read or self.unread):
            if not self.read:
                self._read()
            number = self.read.popleft()
            self.rows.append(Row(number, int(self.rounds[number])))

    def _read(self) -> None:
        """Simulates Continuous._call_up(): if enough prompts wait, those as wide as the first are read
        together."""
        server = self.server
        count = server.ahead if self.many_wait else 1
        width = self._next_width()
        for _ in range(count):
            width = width if self.waiting[width] else self._next_width()
            self.read.append(self.waiting[width].popleft())
        self.now += server.reading_seconds(count) + count * server.request_seconds

    def _next_width(self) -> Any:
        """The width of the request that has waited longest."""
        return min((queue[0], width) for width, queue in self.waiting.items() if queue)[1]


def poisson_arrivals(requests_per_second: float, count: int, seed: int = 0) -> Float[np.ndarray, " N"]:
    """The times in seconds at which `count` requests arrive independently of each other.

    Raises FieldError for a rate that is not positive.
    """
    if not 0 < requests_per_second < np.inf:
        raise FieldError("requests_per_second", requests_per_second, "it must be above 0.")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / requests_per_second, count))


def simulate(
    server: SimulatedServer,
    arrivals: Float[np.ndarray, " N"],
    tokens: Int[np.ndarray, " N"],
    rounds: Int[np.ndarray, " N"],
    widths: Int[np.ndarray, " N"] | None = None,
) -> Served:
    """Simulates N requests. The n-th arrives after arrivals[n] seconds, which must not decrease, and writes
    tokens[n] tokens in rounds[n] rounds. Its prompt is padded to widths[n] tokens; by default all have one
    width.

    Raises FieldError for different shapes, texts without a round, and arrivals that are not in order.
    """
    arrivals, tokens, rounds = np.asarray(arrivals, float), np.asarray(tokens), np.asarray(rounds)
    widths = np.zeros(tokens.shape, int) if widths is None else np.asarray(widths)
    for name, values in (("arrivals", arrivals), ("rounds", rounds), ("widths", widths)):
        if tokens.shape != values.shape or tokens.ndim != 1 or not tokens.size:
            raise FieldError(name, values.shape, f"each request needs one value: {tokens.shape} has them.")
    if rounds.min() < 1:
        raise FieldError("rounds", int(rounds.min()), "a text takes at least one round.")
    if not (np.isfinite(arrivals).all() and (np.diff(arrivals, prepend=0.0) >= 0).all()):
        raise FieldError("arrivals", arrivals, "they must be seconds from 0 on, in order.")
    simulation = Simulation(server, arrivals, rounds, widths)
    simulation.run()
    return Served(
        simulation.first - arrivals,
        simulation.whole - arrivals,
        tokens,
        float(simulation.now - arrivals[0]),
        simulation.row_rounds / max(simulation.all_rounds * server.rows, 1),
    )


def in_closed_loop(
    server: SimulatedServer,
    rounds: Int[np.ndarray, " N"],
    clients: int,
    widths: Int[np.ndarray, " N"],
    pause: float = 0.0,
) -> float:
    """Simulates clients each of which pauses, sends a request and waits for the answer, again and again. The
    server must have room for all of them. Returns closed_loop_rate()."""
    pauses = random_pauses(len(rounds), pause)
    simulation = Simulation(server, pauses[:clients], rounds, widths, pauses)
    simulation.run()
    seconds = simulation.whole - simulation.arrivals
    return closed_loop_rate(seconds[np.argsort(simulation.whole, kind="stable")], clients, pause)


def random_pauses(count: int, mean: float) -> Float[np.ndarray, " N"]:
    """The pauses in seconds before the requests of a closed loop: exponential, the same in every loop, and
    with exactly this mean."""
    draws = np.random.default_rng(0).exponential(size=count)
    return mean * draws / np.mean(draws)


def closed_loop_rate(seconds: Float[np.ndarray, " N"], clients: int, pause: float = 0.0) -> float:
    """The requests per second of a closed loop by Little's law: the number of clients over the mean time from
    an answer to the next one. `seconds`: from requests to answers, in the order of the answers. `pause`: the
    mean of what clients wait before a request. The first and the last `clients` answers do not count, unless
    there are no others: they meet a server that fills or empties."""
    steady = seconds[clients:-clients] if len(seconds) > 2 * clients else seconds
    return min(clients, len(seconds)) / (float(np.mean(steady)) + pause)


class Loop(NamedTuple):
    """A closed loop, and the rate that its clients got."""

    clients: int
    pause: float  # the mean, in seconds, before each request
    rate: float  # requests per second


def fitted(
    server: SimulatedServer,
    rounds: Int[np.ndarray, " N"],
    measured: Mapping[str, Loop],
    widths: Int[np.ndarray, " N"],
) -> SimulatedServer:
    """The server with new values of some fields, each of which costs seconds. `measured` maps a field to a
    closed loop of the real server. Each field gets the value at which the simulated clients get as many
    requests per second, or 0 if they get fewer anyway."""
    for _ in range(FITS):
        for name, loop in measured.items():
            low, high = 0.0, 1 / loop.rate  # with `high`, a request alone would take too long
            while high - low > TOLERANCE:
                middle = (low + high) / 2
                served = in_closed_loop(server.by(name, middle), rounds, loop.clients, widths, loop.pause)
                low, high = (middle, high) if served >= loop.rate else (low, middle)
            server = server.by(name, low)
    return server


def rounds_of_texts(
    emitted: Float[np.ndarray, " L"], tokens: Int[np.ndarray, " N"], seed: int = 0
) -> Int[np.ndarray, " N"]:
    """Samples the number of rounds of texts with these numbers of tokens. emitted[x] is the probability that
    a round writes x tokens, independently of other rounds."""
    draw = np.random.default_rng(seed)
    left, rounds = np.array(tokens, np.int64), np.zeros(len(tokens), np.int64)
    while (unfinished := left > 0).any():
        rounds += unfinished
        left -= np.where(unfinished, draw.choice(len(emitted), size=len(left), p=emitted), 0)
    return rounds


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The number of servers that a load needs."""

    servers: int
    served: Served  # the requests of one of them


def fewest(
    server: SimulatedServer,
    tokens: Int[np.ndarray, " N"],
    rounds: Int[np.ndarray, " N"],
    requests_per_second: float,
    first_token_seconds: float,
    most_servers: int = 1 << 16,
) -> Fleet | None:
    """The smallest number of servers, each with an equal random share of the requests, whose load is at most
    BUSIEST, that refuse no request and give 99 % of clients their first tokens within `first_token_seconds`;
    None if `most_servers` are too few."""

    def tried(servers: int) -> Served | None:
        if server.load(rounds, requests_per_second / servers) > BUSIEST:
            return None
        arrivals = poisson_arrivals(requests_per_second / servers, len(tokens))
        served = simulate(server, arrivals, tokens, rounds)
        late = np.percentile(served.first, 99) if not served.refused else np.inf
        return served if late <= first_token_seconds else None

    low, high = 0, 1
    while (good := tried(high)) is None:
        if high >= most_servers:
            return None
        low, high = high, min(2 * high, most_servers)
    while high - low > 1:
        middle = (low + high) // 2
        if (served := tried(middle)) is not None:
            high, good = middle, served
        else:
            low = middle
    return Fleet(high, good)
