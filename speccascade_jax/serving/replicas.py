"""Replicas of a server on a Ray cluster. Ray Serve places them, counts their requests, scales their number,
restarts lost ones, and chooses the replica for each request."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.types import Message, Scope

from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.ray_jobs import connect, devices_of_machines
from speccascade_jax.serving.engine import Engine, Full
from speccascade_jax.serving.front import Lost, answered

DEPLOYMENT = "Replica"  # the name in Ray Serve, and of the class
LOCAL = "local"  # the address that means a cluster of only this machine
SECONDS = 1.0  # between two counts of running replicas
PATIENCE = 5.0  # timeout for replicas' metrics
METRICS: Scope = {
    "type": "http",
    "http_version": "1.1",
    "method": "GET",
    "path": "/metrics",
    "query_string": b"",
    "headers": [],
}
log = logging.getLogger("speccascade_jax.serving")


class Bounds(NamedTuple):
    """The smallest and largest number of replicas."""

    low: int
    high: int


def bounds(text: str) -> Bounds:
    """Parses MIN..MAX, or one number for both. Raises FieldError."""
    low, dots, high = text.partition("..")
    ends = [low, high if dots else low]
    if all(end.isascii() and end.isdecimal() and len(end) < 5 for end in ends):
        range_ = Bounds(*map(int, ends))
        if 1 <= range_.low <= range_.high:
            return range_
    raise FieldError("replicas", text, "give MIN..MAX, such as 1..4, or a number above 0.")


Served = tuple[Starlette, Engine]  # an application and its engine


class Replica:
    """The code of an actor: a server without a socket, which is available once all programs are compiled."""

    async def __init__(self, build: Callable[[], Served]):  # type: ignore[misc]  # Ray awaits it
        self.app, self.engine = await asyncio.to_thread(build)
        self.engine.start(asyncio.get_running_loop())
        while not self.engine.ready:
            if self.engine.failed is not None:
                raise self.engine.failed
            await asyncio.sleep(0.1)

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        async with contextlib.aclosing(answered(self.app, scope, body)) as answer:
            async for messages in answer:
                yield messages

    async def metrics(self) -> tuple[str, str]:
        """The replica's name and the text of its /metrics."""
        from ray import serve

        parts = [message async for messages in self.answer(METRICS, b"") for message in messages]
        text = b"".join(message.get("body", b"") for message in parts).decode()
        return serve.get_replica_context().replica_id.unique_id, text

    def check_health(self) -> None:
        """Raises RuntimeError if the replica must be replaced."""
        if not self.engine.healthy:
            raise RuntimeError("three rounds in a row have failed")

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.stop()


class RayReplicas:
    """Implements front.Replicas. Call deploy() first."""

    def __init__(self, name: str, target: Any, shared: bool):
        from ray import exceptions
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        self.name, self.target, self.shared, self.running = name, target, shared, 0
        self.lost: Any = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.ObjectLostError,
            DeploymentUnavailableError,
        )
        self.full: Any = BackPressureError
        self.handle: Any = None

    def deploy(self) -> None:
        """Deploys the replicas and returns when they are ready. New ones replace existing ones a few at a
        time. Raises RuntimeError if they do not start."""
        from ray import serve

        self.handle = serve.run(self.target, name=self.name, route_prefix=None)

    def look(self) -> int:
        """The number of replicas that accept requests."""
        from ray import serve

        application = serve.status().applications.get(self.name)
        deployment = application and application.deployments.get(DEPLOYMENT)
        states = deployment.replica_states if deployment and self.handle else {}
        self.running = sum(count for state, count in states.items() if state == "RUNNING")
        return self.running

    def remove(self) -> None:
        """Ends the replicas, but not a cluster that is shared with others."""
        import ray
        from ray import serve

        if self.shared:
            serve.delete(self.name)
        ray.shutdown()

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        response = self.handle.options(stream=True).answer.remote(scope, body)
        try:
            async for messages in response:
                yield messages
        except self.lost as error:
            raise Lost(str(error)) from error
        except self.full:
            raise Full(1) from None
        except (asyncio.CancelledError, GeneratorExit):  # the client has disconnected
            response.cancel()
            raise

    async def metrics(self) -> dict[str, str]:
        """Replica name -> metrics, without the replicas that do not answer in time."""
        try:
            told = await self.handle.broadcast("metrics").results_async(
                timeout_s=PATIENCE, return_exceptions=True
            )
        except (TimeoutError, self.lost):
            return {}
        return dict(pair for pair in told if not isinstance(pair, BaseException))


def replicas_on(
    address: str, name: str, count: Bounds, build: Callable[[], Served], rows: int, queue: int, drain: float
) -> RayReplicas:
    """Connects to the Ray cluster at `address` and returns replicas to deploy there. Each decodes `rows`
    requests at once per device, lets `queue` requests wait, and has `drain` seconds to finish when it is
    stopped. On machines with GPUs or TPUs, a replica takes all of those of one machine.

    Raises ValueError if Ray is missing, if no cluster answers, and if one machine would need more replicas
    than it can hold.
    """
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError(
            f"{error.name} is missing; --replicas needs Ray: pip install 'speccascade_jax[ray,serve]'."
        ) from None
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    connect(address, cores=count.high)
    devices = devices_of_machines(ray.nodes())
    if address == LOCAL and count.low > 1 and devices:
        ray.shutdown()
        raise FieldError(
            "replicas",
            count.low,
            "use 1 replica, which decodes on all of them, or give the address of a cluster.",
            "this machine's accelerators all belong to one replica",
        )
    serve.start(proxy_location="Disabled")
    deployed = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": 1, **devices},
        max_ongoing_requests=rows + queue,
        max_queued_requests=count.high * (rows + queue),
        autoscaling_config={
            "min_replicas": count.low,
            "max_replicas": count.high,
            "target_ongoing_requests": rows,
        },
        graceful_shutdown_timeout_s=drain,
        graceful_shutdown_wait_loop_s=0.5,
    )(Replica)
    return RayReplicas(name, deployed.bind(build), shared=address != LOCAL)


async def aside(work: Callable[[], Any]) -> Any:
    """Runs work() in a thread that does not keep the process alive, and returns its value."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(settle: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(lambda: None if done.done() else settle(value))

    def run() -> None:
        try:
            value = work()
        except Exception as error:
            tell(done.set_exception, error)
        else:
            tell(done.set_result, value)

    threading.Thread(target=run, daemon=True).start()
    return await done


@contextlib.asynccontextmanager
async def watched(
    replicas: RayReplicas, fail: Callable[[BaseException], None], redeploy: asyncio.Event
) -> AsyncGenerator[None, None]:
    """A context in which the replicas are deployed, counted, and redeployed whenever `redeploy` is set. If
    the first deployment fails, `fail` receives the error; if a later one fails, the remaining old replicas
    continue."""

    async def deploying() -> None:
        first = True
        while True:
            began = time.monotonic()
            redeploy.clear()
            try:
                await aside(replicas.deploy)
                log.info("replicas are ready after %.1f s", time.monotonic() - began)
            except Exception as error:
                if first:
                    fail(ValueError(f"the replicas do not start: {str(error).strip()[:2000]}"))
                    return
                log.error("the new replicas do not start", exc_info=error)
            first = False
            await redeploy.wait()
            log.info("rolling restart")

    async def looking() -> None:
        answers = True
        while True:
            try:
                await aside(replicas.look)
                answers = True
            except Exception as error:
                if answers:  # logged once, not every second
                    log.error("the cluster does not answer", exc_info=error)
                answers = False
            await asyncio.sleep(SECONDS)

    tasks = [asyncio.ensure_future(work()) for work in (deploying, looking)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
