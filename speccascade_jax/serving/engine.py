"""The engine: one thread that runs the schedulers of all served models and talks to asyncio through queues.

In use:

    engine = Engine([model])
    engine.start(loop)                      # compiles, then decodes requests as they arrive
    jobs, updates = engine.submit(lane, requests)  # in the event loop
    while not all ended:
        job, update = await updates.get()
    engine.cancel(job)                      # at any time
"""

import asyncio
import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from speccascade_jax.core.protocols import states_law
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.inference.scoring import Scorer, TokenScores
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.continuous import Continuous
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import Lane, LogitsError, Result
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import up_to_stop

log = logging.getLogger("speccascade_jax.serving")
MAX_QUEUE = 64  # default number of requests that may wait for a row
ROUNDS = 2  # default number of rounds between two checks for new requests
FAILURES = 3  # consecutive failed rounds after which the engine is unhealthy


class Full(Exception):
    """The queue is full; there may be room in `seconds`."""

    def __init__(self, seconds: int):
        super().__init__(seconds)
        self.seconds = seconds


class Update(NamedTuple):
    """The tokens that a job has written so far, and their `scores` if requested."""

    result: Result | None  # None after an `error`
    finished: bool
    error: str = ""
    scores: TokenScores | None = None
    fresh: int = 0  # number of new tokens
    gap: float = 0.0  # seconds since the previous tokens or, for the first, since submission


@dataclasses.dataclass(eq=False)
class Job:
    """A request in the engine: it has one row and becomes one choice of an answer."""

    lane: "ServedLane"
    request: Request
    scored: bool  # whether log probabilities are requested
    updates: "Updates"
    came: float = dataclasses.field(default_factory=time.monotonic)
    placed: float = 0.0  # when it got a row; 0: not yet
    number: int = -1  # its id in the scheduler
    cached: int = 0  # prompt tokens found in the prefix cache
    written: int = 0  # tokens so far
    latest: float = 0.0  # when the last tokens arrived
    ended: bool = False  # as the event loop sees it

    def reason(self, update: Update) -> str:
        """The finish reason of a finished update: stop, length or error."""
        if update.result is None:
            return "error"
        tokens, plan = update.result.tokens, self.lane.lane.plan
        if tokens[-1:] == [plan.eos_id] or up_to_stop(self.lane.cascade.tokenizer, tokens, self.request.stop):
            return "stop"
        return "length"


Updates = asyncio.Queue[tuple[Job, Update]]  # of all jobs of one answer


class Submitted(NamedTuple):
    """The jobs of an answer (None for a request that needs no decoding) and the queue of their updates."""

    jobs: list[Job | None]
    updates: Updates


class ServedLane:
    """The requests of one model that share a batch of rows."""

    def __init__(
        self,
        model: str,
        cascade: Cascade,
        lane: Lane,
        settings: Settings,
        rows: int,
        width: int,
        methods: Sequence[str] = (),
    ):
        self.model, self.cascade, self.lane, self.rows = model, cascade, lane, rows * cascade.devices
        self.settings = settings  # those of some request
        self.methods = methods or (settings.name,)  # names of the methods, for display
        self.per_device, self.width = rows, width
        self.scheduler = self._empty()
        self.scorer = (
            Scorer(lane.plan, lane.params, width, cascade.mesh)
            if any(states_law(lane.plan.sampler, rules) for rules in itertools.product(*lane.methods))
            else None
        )
        self.jobs: dict[int, Job] = {}  # by scheduler id
        self.live = 0  # unfinished jobs, counted by the event loop
        self.seconds_per_job = 1.0  # a running mean
        self.failures = 0
        self.called: Callable[[], Any] = lambda: False  # whether the engine has new messages
        self.tell: Callable[[str, Any], None] = lambda call, what: None  # to other processes: see followers

    def _empty(self) -> Continuous:
        return self.cascade.steady_scheduler(self.lane.plan, self.lane.params, self.per_device, self.width)

    def precompile(self) -> None:
        """Compiles all programs that requests may need, and decodes one request of each width."""
        widths = sorted({self.cascade.bucket(n) for n in range(1, self.width + 1)})
        self.scheduler.precompile(widths)
        if self.scorer is not None:
            self.scorer.precompile()
        settings = dataclasses.replace(self.settings, max_new_tokens=2)
        truncated: dict[str, Any] = {name: truncation.sweep[0] for name, truncation in TRUNCATIONS.items()}
        plain: dict[str, Any] = {}
        for width, truncations in [*((width, plain) for width in widths), (widths[0], truncated)]:
            eos = self.lane.plan.eos_id
            request = Request([eos] * width, dataclasses.replace(settings, **truncations), 0, stop=("\n",))
            self.scheduler.admit([request])
            while self.scheduler.busy:
                self.scheduler.run()
            for _, result in self.scheduler.finished():
                if isinstance(result, LogitsError):
                    raise result
                if self.scorer is not None:
                    self.scorer(request, result.tokens)
        if self.cascade.prefixes is not None:  # the prefixes of these requests are useless
            self.cascade.prefixes.clear()
        self.scheduler.measure(self.settings)

    def states_law(self, methods: Sequence[int]) -> bool:
        """Whether tokens decoded with these methods have log probabilities: see protocols.states_law."""
        rules = [known[number] for known, number in zip(self.lane.methods, methods, strict=True)]
        return states_law(self.lane.plan.sampler, rules)

    def admit(self, request: Request) -> int:
        """Queues a request in the scheduler and returns its id."""
        self.tell("admit", request)
        return self.scheduler.admit([request])[0]

    def cancel(self, number: int) -> None:
        self.tell("cancel", number)
        self.scheduler.cancel(number)

    def run(self, rounds: int) -> None:
        self.tell("run", rounds)
        self.scheduler.run(rounds)

    def score(self, request: Request, tokens: list[int]) -> TokenScores | None:
        """The log probabilities of a request's tokens; None if they cannot be computed."""
        if self.scorer is None:
            return None
        self.tell("score", (request, tokens))
        return self.scorer(request, tokens)

    def reset(self) -> None:
        self.tell("reset", None)
        blocks = self.scheduler.blocks
        self.scheduler, self.jobs = self._empty(), {}
        self.scheduler.blocks = blocks

    def step(self, rounds: int) -> list[tuple[Job, Update]]:
        """Runs rounds and returns the updates. While jobs wait, it runs up to 4 * `rounds` rounds, because
        there is no row for new jobs anyway and the host sends fewer events. Otherwise it runs up to `rounds`
        rounds, one if some job has no tokens yet. It stops once the engine is `called`, unless many jobs
        wait."""
        began, wait = time.monotonic(), len(self.jobs) > self.rows
        anew = any(not job.written for job in self.jobs.values())
        for _ in range(4 if wait else 1 if anew else rounds):
            self.run(rounds if wait else 1)
            if self.called() and not (wait and self.scheduler.many_wait):
                break
        done = dict(self.scheduler.finished())
        updates = []
        for number, job in [*self.jobs.items()]:
            result = done.get(number) or self.scheduler.partial(number)
            if result is None:
                continue
            job.placed = job.placed or began
            job.cached += self.scheduler.cached.pop(number, 0)
            if number in done:
                del self.jobs[number]
            if isinstance(result, LogitsError):
                updates.append((job, Update(None, True, str(result))))
            elif number in done or len(result.tokens) > job.written:
                updates.append((job, self._update(job, result, number in done)))
        return updates

    def _update(self, job: Job, result: Result, finished: bool) -> Update:
        """The new tokens of a job."""
        fresh = len(result.tokens) - job.written
        scores = self.score(job.request, result.tokens) if job.scored and result.tokens else None
        now = time.monotonic()
        gap, job.written, job.latest = now - (job.latest or job.came), len(result.tokens), now
        return Update(result, finished, "", scores, fresh, gap)


class Engine:
    """Runs the lanes in turn, `rounds` rounds each, in its own thread.

    The event loop calls submit() and cancel(). The thread's updates arrive in the jobs' queues, after `heard`
    is called with each of them. A round that raises ends the jobs of its lane with an error and resets the
    lane. `compiled` is called once, in the thread, before the engine is ready.
    """

    def __init__(
        self,
        lanes: Sequence[ServedLane],
        max_queue: int,
        rounds: int,
        heard: Callable[[Job, Update], None],
        compiled: Callable[[], None] = lambda: None,
    ):
        self.lanes, self.max_queue, self.rounds, self.heard = lanes, max_queue, rounds, heard
        self.compiled = compiled
        self.inbox: collections.deque[tuple[str, Job]] = collections.deque()
        for lane in lanes:
            lane.called = lambda: self.inbox
        self.wake = threading.Condition()
        self.thread: threading.Thread | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.ready = self.draining = self.stopping = False
        self.failed: BaseException | None = None  # the error of a failed compilation: nothing can be served

    # In the event loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.thread.start()

    @property
    def healthy(self) -> bool:
        return (
            self.failed is None
            and all(lane.failures < FAILURES for lane in self.lanes)
            and (self.thread is None or self.running)
        )

    @property
    def idle(self) -> bool:
        return not any(lane.live for lane in self.lanes)

    def capacity(self, lane: ServedLane) -> int:
        """The largest number of jobs that a lane's rows and queue can hold."""
        return lane.rows + self.max_queue

    def submit(self, lane: ServedLane, requests: Sequence[Request | None], scored: bool = False) -> Submitted:
        """Submits a job for each request that is not None. Raises Full if there is no room for all of
        them."""
        live = lane.live + sum(request is not None for request in requests)
        if live > self.capacity(lane):
            raise Full(max(round((live - self.max_queue) * lane.seconds_per_job / lane.rows), 1))
        updates: Updates = asyncio.Queue()
        jobs = [None if request is None else Job(lane, request, scored, updates) for request in requests]
        for job in filter(None, jobs):
            lane.live += 1
            self._post("admit", job)
        return Submitted(jobs, updates)

    def cancel(self, job: Job) -> None:
        """Cancels a job unless it has ended. Its row is free before the next round."""
        if not job.ended:
            self._end(job)
            self._post("cancel", job)

    def stop(self) -> None:
        """Ends the thread after the current round. Does not wait for a compilation, which may take
        minutes."""
        with self.wake:
            self.stopping = True
            self.wake.notify()
        if self.thread is not None and self.ready:
            self.thread.join(timeout=30)

    @property
    def running(self) -> bool:
        """Whether the thread is alive."""
        return self.thread is not None and self.thread.is_alive()

    def _post(self, what: str, job: Job) -> None:
        with self.wake:
            self.inbox.append((what, job))
            self.wake.notify()

    def _end(self, job: Job) -> None:
        job.ended = True
        job.lane.live -= 1

    def _hear(self, updates: list[tuple[Job, Update]]) -> None:
        for job, update in updates:
            if job.ended:
                continue
            if update.finished:
                self._end(job)
                took = time.monotonic() - (job.placed or job.came)
                job.lane.seconds_per_job += 0.1 * (took - job.lane.seconds_per_job)
            self.heard(job, update)
            job.updates.put_nowait((job, update))

    # In the thread

    def _work(self) -> None:
        began = time.monotonic()
        try:
            for number, lane in enumerate(self.lanes, 1):
                if self.stopping:
                    return
                names = ", ".join(lane.methods)
                log.info("compiling %d of %d: %s: %s", number, len(self.lanes), lane.model, names)
                lane.precompile()
            self.compiled()
        except BaseException as error:
            self.failed = error
            return
        self.ready = True
        log.info("ready after %.1f s of compiling", time.monotonic() - began)
        while True:
            with self.wake:
                while not (self.inbox or self.stopping or any(lane.jobs for lane in self.lanes)):
                    self.wake.wait()
                if self.stopping:
                    return
                letters = [self.inbox.popleft() for _ in range(len(self.inbox))]
            for what, job in letters:
                self._apply(what, job)
            for lane in self.lanes:
                if lane.jobs:
                    self._step(lane)

    def _apply(self, what: str, job: Job) -> None:
        lane = job.lane
        if what == "admit":
            job.number = lane.admit(job.request)
            lane.jobs[job.number] = job
        elif lane.jobs.get(job.number) is job:
            del lane.jobs[job.number]
            try:
                lane.cancel(job.number)
            except Exception as error:
                self._fail(lane, error)

    def _step(self, lane: ServedLane) -> None:
        try:
            updates = lane.step(self.rounds)
        except Exception as error:  # any error: later requests must still be served
            self._fail(lane, error)
            return
        lane.failures = 0
        self._tell(updates)

    def _fail(self, lane: ServedLane, error: Exception) -> None:
        log.error("a round failed", exc_info=error, extra={"fields": {"event": "round_failed"}})
        lane.failures += 1
        said = str(error) if isinstance(error, ValueError) else "the server failed in the middle of a text."
        lost = [*lane.jobs.values()]
        lane.reset()
        self._tell([(job, Update(None, True, said)) for job in lost])

    def _tell(self, updates: list[tuple[Job, Update]]) -> None:
        if updates and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hear, updates)
