"""The HTTP application: routes, limits, keys and logs over the engine."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from speccascade_jax.core.errors import FieldError
from speccascade_jax.serving.answers import Answer
from speccascade_jax.serving.engine import Engine, Full
from speccascade_jax.serving.metrics import CONTENT_TYPE, Load, Metrics
from speccascade_jax.serving.models import Decoding, ServedModel
from speccascade_jax.serving.openapi import description
from speccascade_jax.serving.protocol import ParsedRequest, Refused, parse

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}
UNREAD = 32  # multiple of body_bytes that is read and dropped: few clients read while they send
GRACE = 5.0  # seconds for a client to read the rest after the deadline
log = logging.getLogger("speccascade_jax.serving")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits and permissions of a server."""

    seconds: float = 120.0  # from a request's body to its last token
    body_bytes: int = 2**20
    body_seconds: float = 15.0  # until the body has arrived
    keys: tuple[str, ...] = ()  # API keys; none: requests need none
    origins: tuple[str, ...] = ()  # origins whose pages may send requests (CORS)
    page: bool = True
    log_texts: bool = False


class Service:
    """The handlers and what they share."""

    def __init__(self, models: Sequence[ServedModel], engine: Engine, metrics: Metrics, limits: Limits):
        self.models = {model.name: model for model in models}
        self.engine, self.metrics, self.limits = engine, metrics, limits

    # The stages of a request: body, parsed request, decoding, jobs, answer

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, "completion")

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, "chat")

    async def _answered(self, request: Request, kind: str) -> Response:
        check_key(request, self.limits.keys)
        self._check_serving()
        check_json(request)
        parsed = parse(await body_of(request, self.limits), kind)
        model = self._model(parsed.model)
        answer = self._submitted(model, parsed, await model.decoding(parsed))
        return Events(answer, self) if parsed.stream else await self._whole(request, answer)

    def _submitted(self, model: ServedModel, parsed: ParsedRequest, decoding: Decoding) -> Answer:
        """Submits a request's jobs. Raises FieldError for more choices than the server has room for, and Full
        if it has no room now."""
        capacity = self.engine.capacity(decoding.lane)
        if len(decoding.requests) > capacity:
            raise FieldError(
                "n",
                parsed.n,
                f"this server takes at most {capacity} at once.",
                f"n times the prompts is {len(decoding.requests)}",
            )
        submitted = self.engine.submit(decoding.lane, decoding.requests, parsed.logprobs is not None)
        return Answer(model, parsed, decoding, submitted, self.limits.seconds)

    async def _whole(self, request: Request, answer: Answer) -> Response:
        """The response with the whole answer; status 499 if the client disconnects first."""
        status, said = 500, "error"
        writing = asyncio.ensure_future(answer.whole())
        leaving = asyncio.ensure_future(left(request.receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                status, said = 499, "left"
                return Response(status_code=499)
            whole = await writing
            status, said = 200, "done"
            return JSONResponse(whole)
        except Refused as refused:
            status, said = refused.status, "refused"
            raise
        finally:
            for task in (writing, leaving):
                task.cancel()
            self.closed(answer, status, said)

    def closed(self, answer: Answer, status: int, said: str) -> None:
        """Frees the rows of an answer that has ended in any way, and logs it."""
        running = answer.running
        for job in running:
            self.engine.cancel(job)
        self.metrics.cancelled.labels(answer.model.name).inc(len(running))
        usage, settings, request = answer.usage(), answer.decoding.settings, answer.request
        line: dict[str, Any] = {
            "event": said,
            "id": answer.id,
            "model": answer.model.name,
            "status": status,
            "method": settings.name,
            "alpha": settings.alpha,
            "temperature": settings.temperature,
            "stream": request.stream,
            "n": request.n,
            "seconds": round(time.monotonic() - answer.came, 4),
            "first_token_seconds": None if answer.first is None else round(answer.first, 4),
            **{name: value for name, value in usage.items() if isinstance(value, int)},
        }
        if self.limits.log_texts:
            line |= {
                "prompts": request.prompts or request.messages,
                "texts": [
                    answer.model.cascade.tokenizer.decode(result.tokens) for result in answer.results.values()
                ],
            }
        log.info("request", extra={"fields": line})

    def _check_serving(self) -> None:
        if self.engine.draining:
            raise unavailable("the server is shutting down.", "draining", 5)
        if not self.engine.ready:
            raise unavailable("the server is still compiling: see /ready.", "not_ready", 10)

    def _model(self, name: str | None) -> ServedModel:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refused(
                FieldError(
                    "model",
                    name,
                    f"known: {', '.join(self.models)}.",
                    f"there is no model {json.dumps(name)[:100]}",
                ),
                status=404,
                code="model_not_found",
            )
        return self.models[name]

    # Information about the server

    async def health(self, request: Request) -> Response:
        alive = self.engine.healthy
        return JSONResponse({"status": "alive" if alive else "failing"}, 200 if alive else 503)

    async def ready(self, request: Request) -> Response:
        serving = self.engine.ready and not self.engine.draining
        said = "ready" if serving else "draining" if self.engine.draining else "compiling"
        return JSONResponse({"status": said}, 200 if serving else 503)

    async def metric_text(self, request: Request) -> Response:
        loads = []
        for model in self.models.values():
            running = sum(min(len(lane.scheduler.running), lane.live) for lane in model.lanes.values())
            live = sum(lane.live for lane in model.lanes.values())
            blocks = [lane.scheduler.blocks for lane in model.lanes.values() if lane.scheduler.blocks]
            loads.append(Load(model.name, running, live - running, model.cascade.prefixes, blocks))
        return Response(self.metrics.text(loads), media_type=CONTENT_TYPE)

    async def list_models(self, request: Request) -> Response:
        check_key(request, self.limits.keys)
        return JSONResponse({"object": "list", "data": [described(model) for model in self.models.values()]})

    async def one_model(self, request: Request) -> Response:
        check_key(request, self.limits.keys)
        return JSONResponse(described(self._model(request.path_params["name"])))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description())


class Events(Response):
    """A stream of server-sent events that ends with [DONE], or when the client disconnects or stops
    reading."""

    def __init__(self, answer: Answer, service: Service):
        self.answer, self.service, self.background = answer, service, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end, said = self.answer.deadline - time.monotonic() + GRACE, "done"
        writing, leaving = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({writing, leaving}, timeout=max(end, 0), return_when=asyncio.FIRST_COMPLETED)
            said = writing.result() if writing.done() else "left" if leaving.done() else "not read"
        except OSError:  # the client has disconnected
            said = "left"
        except Exception as error:
            said = "failed"
            log.error("a stream failed", exc_info=error, extra={"fields": {"event": "stream_failed"}})
        finally:
            for task in (writing, leaving):
                task.cancel()
            self.service.closed(self.answer, 200, said)

    async def _write(self, send: Send) -> str:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        said, text = "done", b""
        async for event in self._events():
            if isinstance(event, Refused):
                said, event = "refused", event.body
            text += b"data: " + encoded(event) + b"\n\n"
            # A chat's role is sent with the first tokens, because before those another replica may take over.
            # The last events are sent together with the end, because packets cost more than text.
            if self.answer.first is not None and not self.answer.over:
                await send({"type": "http.response.body", "body": text, "more_body": True})
                text = b""
        await send({"type": "http.response.body", "body": text + b"data: [DONE]\n\n", "more_body": False})
        return said

    async def _events(self) -> AsyncIterator[dict[str, Any] | Refused]:
        try:
            async for event in self.answer.stream():
                yield event
        except Refused as refused:
            yield refused


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def check_key(request: Request, keys: Sequence[str]) -> None:
    """Raises Refused if keys are configured and the request has none of them."""
    if not keys:
        return
    header = request.headers.get("authorization", "").encode("latin-1")  # the raw bytes
    scheme, _, offered = header.partition(b" ")
    known = [hmac.compare_digest(offered.strip(), key.encode()) for key in keys]
    if scheme.lower() != b"bearer" or not any(known):
        raise Refused(
            "send one of this server's keys: Authorization: Bearer KEY.",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def check_json(request: Request) -> None:
    """Raises Refused if the content type is not JSON."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused("send JSON with Content-Type: application/json.", status=415)


async def body_of(request: Request, limits: Limits) -> bytes:
    """Reads a request's body. Raises Refused if it is too long, late or incomplete."""
    limit = limits.body_bytes
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                elif size > UNREAD * limit:
                    break
    except TimeoutError:
        raise Refused(f"the body did not arrive within {limits.body_seconds:g} s.", status=408) from None
    except ClientDisconnect:
        raise Refused("the body is incomplete.", status=400) from None
    if size > limit:
        raise Refused(f"the body has more than {limit} bytes.", status=413)
    return bytes(body)


def unavailable(reason: str, code: str, seconds: int) -> Refused:
    """The refusal of a request that may be retried after so many seconds."""
    return Refused(reason, status=503, kind="server_error", code=code, headers={"Retry-After": str(seconds)})


class Errors:
    """Turns exceptions into answers in the wire format, and counts them by status."""

    def __init__(self, refused: Counter):
        self.refused = refused

    @property
    def handlers(self) -> dict[Any, Any]:
        """Exception type -> handler, in Starlette's form."""
        return {
            Refused: self.on_refused,
            FieldError: self.on_field,
            Full: self.on_full,
            HTTPException: self.on_http,
            Exception: self.on_fault,
        }

    async def on_refused(self, request: Request, error: Any) -> Response:
        self.refused.labels(str(error.status)).inc()
        if error.status >= 500:
            log.warning(
                "refused",
                extra={"fields": {"event": "refused", "status": error.status, "path": request.url.path}},
            )
        return JSONResponse(error.body, error.status, headers=error.headers)

    async def on_field(self, request: Request, error: Any) -> Response:
        return await self.on_refused(request, Refused(error))

    async def on_full(self, request: Request, error: Any) -> Response:
        return await self.on_refused(
            request,
            Refused(
                "all rows and the queue are full; try again later.",
                status=429,
                code="queue_full",
                kind="server_error",
                headers={"Retry-After": str(error.seconds)},
            ),
        )

    async def on_http(self, request: Request, error: Any) -> Response:
        said = Refused(
            f"{request.method} {request.url.path[:200]}: {error.detail}.",
            status=error.status_code,
            headers=dict(error.headers or {}),
        )
        return await self.on_refused(request, said)

    async def on_fault(self, request: Request, error: Exception) -> Response:
        log.error("a handler failed", exc_info=error, extra={"fields": {"event": "handler_failed"}})
        return await self.on_refused(request, Refused("the server failed.", status=500, kind="server_error"))


async def left(receive: Receive) -> None:
    """Returns once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def described(model: ServedModel) -> dict[str, Any]:
    """A model's entry in /v1/models, with the options of its requests."""
    settings = model.defaults
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "speccascade_jax",
        "methods": model.methods,
        "method": settings.name,
        "alpha": settings.alpha,
        "block_size": settings.block_size,
        "max_block_size": settings.max_block_size,
        "temperature": settings.temperature,
        "max_tokens": model.cascade.max_new_tokens,
        "max_prompt_tokens": model.cascade.max_source_length,
        **{f"max_{name}": bound for name, bound in model.bounds.items()},
        "chat": model.chats,
        "examples": model.examples,
    }


def middleware(limits: Limits) -> list[Middleware]:
    """The middleware that admits requests from pages of other origins, if any are allowed."""
    if not limits.origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(limits.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    ]


def create_app(models: Sequence[ServedModel], engine: Engine, metrics: Metrics, limits: Limits) -> Starlette:
    """The application, which starts and stops its engine."""
    service = Service(models, engine, metrics, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(engine.stop)

    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.list_models),
        Route("/v1/models/{name:path}", service.one_model),
        Route("/health", service.health),
        Route("/ready", service.ready),
        Route("/metrics", service.metric_text),
        Route("/openapi.json", service.openapi),
    ]
    if limits.page:

        def page(name: str) -> Callable[[Request], Awaitable[Response]]:
            async def send(request: Request) -> Response:
                return FileResponse(PAGE / name, headers=HEADERS)

            return send

        routes += [
            Route("/" if name == "index.html" else f"/{name}", page(name))
            for name in ("index.html", "page.css", "page.js")
        ]
    return Starlette(
        routes=routes,
        middleware=middleware(limits),
        lifespan=lifespan,
        exception_handlers=Errors(metrics.refused).handlers,
    )
