"""The front of several replicas: one address whose requests any replica can answer.

    client -> front -> a replica's application (app.py), as messages of ASGI

The front reads a request, sends it to a replica, and forwards the response. It sends nothing to the client
before the first tokens arrive, so if a replica is lost before that, another replica takes the request without
the client noticing. A stream that is lost later ends with an error event. Tokens depend only on the request,
so any replica writes the same ones.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from speccascade_jax.serving.app import (
    GRACE,
    Errors,
    Limits,
    body_of,
    check_key,
    encoded,
    left,
    middleware,
    unavailable,
)
from speccascade_jax.serving.metrics import CONTENT_TYPE
from speccascade_jax.serving.protocol import Refused

TRIES = 2  # replicas that a request may be sent to: one that crashes replicas must not crash all of them
LATER = 5  # seconds after which a client may retry
VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
PARTS = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)  # the parts of a scope that describe a request
log = logging.getLogger("speccascade_jax.serving")


class Lost(Exception):
    """The replica that was answering a request is gone."""


class Replicas(Protocol):
    """The replicas that answer requests."""

    running: int  # number of replicas

    def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yields the ASGI messages of the response to a request. Raises Lost, or Full if no replica has
        room."""
        ...

    async def metrics(self) -> dict[str, str]:
        """Replica name -> text of its /metrics."""
        ...


class Front:
    """The front's handlers and its own counters."""

    def __init__(self, replicas: Replicas, limits: Limits):
        self.replicas, self.limits = replicas, limits
        self.draining, self.live = False, 0
        self.failed: BaseException | None = None  # why no replica will become available
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.refused = Counter(
            "speccascade:requests_refused",
            "Requests answered by an error, by status.",
            ("status",),
            registry=self.registry,
        )
        self.moved = Counter(
            "speccascade:requests_moved",
            "Requests whose replica was lost before their first tokens, and that another one took.",
            registry=self.registry,
        )
        self.cut = Counter(
            "speccascade:streams_cut", "Streams whose replica was lost.", registry=self.registry
        )
        self.count = Gauge("speccascade:replicas", "Replicas that take requests.", registry=self.registry)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.live == 0

    def fail(self, error: BaseException) -> None:
        """Reports that no replica will become available."""
        self.failed = error

    async def forward(self, request: Request) -> Response:
        if request.url.path.startswith("/v1/"):
            check_key(request, self.limits.keys)
        if self.draining:
            raise unavailable("the server is shutting down.", "draining", LATER)
        if not self.replicas.running:
            raise unavailable("no replica is ready: see /ready.", "not_ready", 2 * LATER)
        return Forwarded(self, await body_of(request, self.limits))

    async def health(self, request: Request) -> Response:
        alive = self.failed is None
        return JSONResponse({"status": "alive" if alive else "failing"}, 200 if alive else 503)

    async def ready(self, request: Request) -> Response:
        serving = bool(self.replicas.running) and not self.draining
        said = "ready" if serving else "draining" if self.draining else "compiling"
        return JSONResponse({"status": said, "replicas": self.replicas.running}, 200 if serving else 503)

    async def metric_text(self, request: Request) -> Response:
        self.count.set(self.replicas.running)
        texts = await self.replicas.metrics() if self.replicas.running else {}
        texts["front"] = generate_latest(self.registry).decode()
        return Response(merged(texts), media_type=CONTENT_TYPE)


class Forwarded(Response):
    """A replica's response to a request whose body has been read. It ends when the client disconnects."""

    def __init__(self, front: Front, body: bytes):
        self.front, self.sent, self.background = front, body, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = {part: scope[part] for part in PARTS if part in scope}
        passing = Passing(send)
        writing = asyncio.ensure_future(self._write(request, passing))
        leaving = asyncio.ensure_future(left(receive))
        self.front.live += 1
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except Refused as refused:
            await self._refuse(passing, refused)
        finally:
            self.front.live -= 1
            for task in (writing, leaving):
                task.cancel()

    async def _write(self, request: Scope, passing: "Passing") -> None:
        """Forwards the response of the first replica that gives one. Raises Refused if none does."""
        seconds = self.front.limits.seconds + 2 * GRACE  # a replica's own limit takes effect first
        try:
            async with asyncio.timeout(seconds):
                for number in range(1, TRIES + 1):
                    try:
                        async with contextlib.aclosing(
                            self.front.replicas.answer(request, self.sent)
                        ) as answer:
                            async for messages in answer:
                                for message in messages:
                                    await passing(message)
                        return
                    except Exception as error:
                        if passing.ended:  # ignores messages after the response
                            return
                        if not isinstance(error, Lost):
                            raise
                        fields = {"event": "replica_lost", "path": request["path"], "begun": passing.begun}
                        log.warning("a replica was lost", extra={"fields": fields})
                        if passing.begun:
                            self.front.cut.inc()
                            break
                        if number < TRIES:
                            self.front.moved.inc()
                            passing.forget()
        except TimeoutError:
            raise unavailable(f"no replica has answered within {seconds:g} s.", "timeout", LATER) from None
        raise unavailable("the replica that was writing this answer was lost.", "replica_lost", LATER)

    async def _refuse(self, passing: "Passing", refused: Refused) -> None:
        """Ends a response with an error. A stream gets an event, since its status has been sent. Any other
        response that has begun is aborted, and the client sees that it is incomplete."""
        if not passing.begun:
            raise refused
        if not passing.streams:
            raise ConnectionAbortedError(str(refused))
        text = b"data: " + encoded(refused.body) + b"\n\ndata: [DONE]\n\n"
        await passing.send({"type": "http.response.body", "body": text, "more_body": False})


class Passing:
    """Forwards messages, starting once a part of the body arrives."""

    def __init__(self, send: Send):
        self.send, self.held = send, list[Message]()
        self.begun = self.ended = self.streams = False

    async def __call__(self, message: Message) -> None:
        self.held.append(message)
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.streams = kind.startswith(b"text/event-stream")
        elif message.get("body") or not message.get("more_body"):
            self.begun, self.ended = True, not message.get("more_body")
            for waiting in self.held:
                await self.send(waiting)
            self.held = []

    def forget(self) -> None:
        """Drops the messages of a lost replica, none of which has been forwarded."""
        self.held = []


def merged(texts: dict[str, str]) -> bytes:
    """Merges the metrics of several sources into one text. The label `replica` names a sample's source."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))

    class Families:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Families())
    return generate_latest(registry)


def create_front(front: Front, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
    """The front's application."""
    return Starlette(
        routes=[
            Route("/health", front.health),
            Route("/ready", front.ready),
            Route("/metrics", front.metric_text),
            Route("/{path:path}", front.forward, methods=list(VERBS)),
        ],
        middleware=middleware(front.limits),
        lifespan=lifespan,
        exception_handlers=Errors(front.refused).handlers,
    )


async def answered(
    app: Callable[[Scope, Receive, Send], Any], scope: Scope, body: bytes
) -> AsyncGenerator[list[Message], None]:
    """Yields an application's response to a request, in lists of the messages available at a time. If the
    caller closes this iterator or is cancelled, the application sees the client disconnect."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    unread, gone = [body], asyncio.Event()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(app(dict(scope), receive, messages.put))
    running.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            several = [message, *drained(messages)]
            if ended := several[-1] is None:
                several.pop()
            yield [message for message in several if message is not None]
            if ended:
                break
        await running  # raises the application's exception, if any
    finally:
        gone.set()


def drained(queue: asyncio.Queue[Any]) -> Iterator[Any]:
    """The current items of a queue."""
    while not queue.empty():
        yield queue.get_nowait()
