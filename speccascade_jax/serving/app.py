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

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from speccascade_jax.serving.answers import Answer
from speccascade_jax.serving.engine import Engine, Full
from speccascade_jax.serving.metrics import CONTENT_TYPE, Metrics
from speccascade_jax.serving.models import ServedModel
from speccascade_jax.serving.openapi import description
from speccascade_jax.serving.protocol import Refused, parse

PAGE = Path(__file__).parent / "page"
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
          "form-action 'none'")
HEADERS = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache",
           "X-Content-Type-Options": "nosniff"}
UNREAD = 32  # times the largest body: so much is read and dropped, since few clients listen while they send
GRACE = 5.0  # seconds that a reader has for the rest, once a request's time is up
log = logging.getLogger("speccascade_jax.serving")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server allows, and to whom."""

    seconds: float = 120.0           # a request, from its body to its last token
    body_bytes: int = 2**20
    body_seconds: float = 15.0       # until the body is there
    keys: tuple[str, ...] = ()       # API keys; none: everybody may ask
    origins: tuple[str, ...] = ()    # whose pages may ask (CORS)
    page: bool = True
    log_texts: bool = False


class Service:
    """The handlers and what they share."""

    def __init__(self, models: Sequence[ServedModel], engine: Engine, metrics: Metrics, limits: Limits):
        self.models = {model.name: model for model in models}
        self.engine, self.metrics, self.limits = engine, metrics, limits

    # What is asked for

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, "completion")

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, "chat")

    async def _answered(self, request: Request, kind: str) -> Response:
        self._check_key(request)
        self._check_serving()
        asked = parse(await self._body(request), kind)
        model = self._model(asked.model)
        try:
            answer = Answer(self.engine, model, asked, self.limits.seconds)
        except Full as full:
            raise Refused("all rows and the queue are full; try again later.", status=429, code="queue_full",
                          kind="server_error", headers={"Retry-After": str(full.seconds)}) from None
        if asked.stream:
            return Events(answer, self)
        return await self._whole(request, answer)

    async def _whole(self, request: Request, answer: Answer) -> Response:
        """The answer, unless its client leaves before it is written."""
        status, said = 500, "error"
        writing = asyncio.ensure_future(answer.whole())
        leaving = asyncio.ensure_future(left(request.receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                status, said = 499, "left"
                return Response(status_code=499)
            found = await writing
            status, said = 200, "done"
            return JSONResponse(found)
        except Refused as refused:
            status, said = refused.status, "refused"
            raise
        finally:
            for task in (writing, leaving):
                task.cancel()
            self.closed(answer, status, said)

    def closed(self, answer: Answer, status: int, said: str) -> None:
        """The end of an answer, however it came: rows are freed, and a line is logged."""
        running = answer.close()
        self.metrics.cancelled.labels(answer.model.name).inc(running)
        usage, settings = answer.usage(), answer.settings
        line: dict[str, Any] = {
            "event": said, "id": answer.id, "model": answer.model.name, "status": status,
            "method": settings.name, "alpha": settings.alpha, "temperature": settings.temperature,
            "stream": answer.asked.stream, "n": answer.asked.n,
            "seconds": round(time.monotonic() - answer.came, 4),
            "first_token_seconds": None if answer.first is None else round(answer.first, 4),
            **{name: value for name, value in usage.items() if isinstance(value, int)}}
        if self.limits.log_texts:
            line |= {"prompts": answer.asked.prompts or answer.asked.messages,
                     "texts": [answer.model.cascade.tokenizer.decode(result.tokens)
                               for result in answer.results.values()]}
        log.info("request", extra={"fields": line})

    def _check_key(self, request: Request) -> None:
        if not self.limits.keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in self.limits.keys]
        if scheme.lower() != "bearer" or not any(known):
            raise Refused("give a key of this server's: Authorization: Bearer KEY.", status=401,
                          code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_serving(self) -> None:
        if self.engine.draining:
            raise Refused("the server is about to stop.", status=503, kind="server_error", code="draining",
                          headers={"Retry-After": "5"})
        if not self.engine.ready:
            raise Refused("the server is still compiling: see /ready.", status=503, kind="server_error",
                          code="not_ready", headers={"Retry-After": "10"})

    def _model(self, name: str | None) -> ServedModel:
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refused(f"there is no model {json.dumps(name)[:100]}; known: {', '.join(self.models)}.",
                          "model", status=404, code="model_not_found")
        return self.models[name]

    async def _body(self, request: Request) -> bytes:
        most = self.limits.body_bytes
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused("send JSON, and say so: Content-Type: application/json.", status=415)
        found, size = bytearray(), 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        found += chunk
                    elif size > UNREAD * most:
                        break
        except TimeoutError:
            raise Refused(f"the body did not come within {self.limits.body_seconds:g} s.",
                          status=408) from None
        except ClientDisconnect:
            raise Refused("the body is cut off.", status=400) from None
        if size > most:
            raise Refused(f"the body has more than {most} bytes.", status=413)
        return bytes(found)

    # What the server says of itself

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
            loads.append((model.name, running, live - running))
        return Response(self.metrics.text(loads), media_type=CONTENT_TYPE)

    async def list_models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [described(model) for model in self.models.values()]})

    async def one_model(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse(described(self._model(request.path_params["name"])))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description())

    # Errors

    async def on_refused(self, request: Request, error: Any) -> Response:
        self.metrics.refused.labels(str(error.status)).inc()
        if error.status >= 500:
            log.warning("refused", extra={"fields": {"event": "refused", "status": error.status,
                                                     "path": request.url.path}})
        return JSONResponse(error.body, error.status, headers=error.headers)

    async def on_http(self, request: Request, error: Any) -> Response:
        said = Refused(f"{request.method} {request.url.path[:200]}: {error.detail}.",
                       status=error.status_code, headers=dict(error.headers or {}))
        return await self.on_refused(request, said)

    async def on_fault(self, request: Request, error: Exception) -> Response:
        log.error("a handler failed", exc_info=error, extra={"fields": {"event": "handler_failed"}})
        return await self.on_refused(request, Refused("the server failed.", status=500, kind="server_error"))


class Events(Response):
    """A stream of server-sent events, ended by [DONE]. Ends when its client leaves, or does not read."""

    def __init__(self, answer: Answer, service: Service):
        self.answer, self.service, self.background = answer, service, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end, said = self.answer.deadline - time.monotonic() + GRACE, "done"
        writing, leaving = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({writing, leaving}, timeout=max(end, 0), return_when=asyncio.FIRST_COMPLETED)
            said = writing.result() if writing.done() else "left" if leaving.done() else "not read"
        except OSError:  # the client is gone
            said = "left"
        except Exception as error:
            said = "failed"
            log.error("a stream failed", exc_info=error, extra={"fields": {"event": "stream_failed"}})
        finally:
            for task in (writing, leaving):
                task.cancel()
            self.service.closed(self.answer, 200, said)

    async def _write(self, send: Send) -> str:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        said, text = "done", b""
        async for event in self._events():
            if isinstance(event, Refused):
                said, event = "refused", event.body
            text += b"data: " + encoded(event) + b"\n\n"
            if not self.answer.over:  # the last events and the end go out as one: packets cost more than text
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


async def left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def described(model: ServedModel) -> dict[str, Any]:
    """A model as /v1/models lists it, and what its requests may ask for."""
    own = model.defaults
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "speccascade_jax",
            "methods": model.methods, "method": own.name, "alpha": own.alpha,
            "block_size": own.block_size, "max_block_size": own.max_block_size,
            "temperature": own.temperature, "max_tokens": model.cascade.max_new_tokens,
            "max_prompt_tokens": model.cascade.max_source_length, "max_top_k": model.max_top_k,
            "chat": model.cascade.tokenizer.chat is not None, "examples": model.examples}


def create_app(models: Sequence[ServedModel], engine: Engine, metrics: Metrics, limits: Limits,
               started: Callable[[], Awaitable[None]] | None = None) -> Starlette:
    """The application; `started` is awaited when the server begins."""
    service = Service(models, engine, metrics, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop())
        if started is not None:
            await started()
        yield
        await asyncio.to_thread(engine.stop)

    routes = [Route("/v1/completions", service.completions, methods=["POST"]),
              Route("/v1/chat/completions", service.chat, methods=["POST"]),
              Route("/v1/models", service.list_models), Route("/v1/models/{name:path}", service.one_model),
              Route("/health", service.health), Route("/ready", service.ready),
              Route("/metrics", service.metric_text), Route("/openapi.json", service.openapi)]
    if limits.page:
        def page(name: str) -> Callable[[Request], Awaitable[Response]]:
            async def send(request: Request) -> Response:
                return FileResponse(PAGE / name, headers=HEADERS)

            return send

        routes += [Route("/" if name == "index.html" else f"/{name}", page(name))
                   for name in ("index.html", "page.css", "page.js")]
    cross = [Middleware(CORSMiddleware, allow_origins=list(limits.origins), allow_methods=["GET", "POST"],
                        allow_headers=["authorization", "content-type"])] if limits.origins else []
    return Starlette(routes=routes, middleware=cross, lifespan=lifespan, exception_handlers={
        Refused: service.on_refused, HTTPException: service.on_http, Exception: service.on_fault})
