"""Serves a cascade over HTTP, in OpenAI's wire format.

Examples:

    python scripts/serve.py --config=demo --port=8000
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "Where is he?"}'
    python scripts/serve.py --config=demo --ray=local --replicas=1..2
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tyro

from speccascade_jax import config as configs
from speccascade_jax.checkpoints.files import checked_path, read, shown
from speccascade_jax.cluster import joined
from speccascade_jax.commands.commandline import (
    at_least,
    config_of,
    console,
    exit_code,
    flag_of,
    keep_compilations,
    parsed,
)
from speccascade_jax.commands.profiles import check_profile, profiled
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.ray_jobs import check_address
from speccascade_jax.inference.text import Cascade
from speccascade_jax.parallel import decoding_mesh
from speccascade_jax.serving.engine import MAX_QUEUE, ROUNDS
from speccascade_jax.settings import LOAD
from speccascade_jax.vocabularies import VOCABULARIES

if TYPE_CHECKING:
    from speccascade_jax.serving.models import ServedModel

KEY = "SPECCASCADE_API_KEY"
SERVED = ("speculative", "chow", "diff", "opt", "token_v3", "lossy", "verifier", "drafter")
SWITCH = 5e-4  # seconds that HTTP may keep the engine's thread waiting while the devices are idle
LARGEST_KEYS = 2**20  # the largest size of a file of keys, in bytes
BYTE_ORDER = "\ufeff"
CONTROL = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f]"
)  # HTTP headers must not contain them; UTF-16 leaves them in a text
INTERRUPTED = 130  # the exit code
MISSING = "to serve: pip install 'speccascade_jax[serve]'."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of the command."""

    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A config name or path. Its fields are the defaults of the other flags, and of fields that requests
    omit."""
    also: tuple[str, ...] = ()
    """Further configs to serve as separate models, with their own defaults."""
    host: str = "127.0.0.1"
    """The address to listen on. 0.0.0.0 listens on all addresses."""
    port: int = 8000
    """The port to listen on. 0 chooses a free port. The URL is printed on a line of its own."""
    rows: int = 8
    """The number of requests decoded together, per device."""
    max_queue: int = MAX_QUEUE
    """The most requests that wait for a row. Further requests are answered with status 429."""
    methods: tuple[str, ...] = SERVED
    """The methods that requests may choose. Each method is compiled and adds a little time to every round."""
    rounds: int = ROUNDS
    """Rounds between two deliveries of tokens. While requests wait, up to four times this number."""
    chunk: int = 128
    """Tokens of a prompt to read between two rounds (decoder-only models)."""
    timeout: float = 120.0
    """The most seconds that a request may take."""
    max_body: int = 2**20
    """The largest size of a request's body, in bytes."""
    api_key_file: str | None = None
    """A file with one API key per line. Requests must send one of these keys, or $SPECCASCADE_API_KEY."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may send requests, such as https://example.org."""
    page: Literal["on", "off"] = "on"
    """Whether to serve a page for trying the model at /."""
    log_texts: bool = False
    """Write prompts and answers to the log."""
    drain_seconds: float = 60.0
    """The most seconds that running requests may take after SIGTERM."""
    ray: str | None = None
    """Serve with replicas on the Ray cluster at this address, or `local` for a cluster on this machine."""
    replicas: str | None = None
    """With --ray: the number of replicas, or MIN..MAX to let Ray scale it with the load. Default: 1."""
    cluster: str | None = None
    """Serve on the devices of several processes: `auto` on TPU pods and Slurm, otherwise
    HOST:PORT,PROCESSES,NUMBER in each process. The first process listens and answers."""
    profile: str | None = None
    """A new folder for a trace of the run, which XProf, TensorBoard and Perfetto can open."""


def keys(arguments: Arguments) -> tuple[str, ...]:
    """The API keys. Raises FieldError for a key that no client could send, and for a file that cannot be read
    or has no keys."""
    variable = os.environ.get(KEY, "")
    if problem := _unusable_key(variable):
        raise FieldError(
            KEY,
            None,
            "choose another key, or unset the variable to serve without a key.",
            f"${KEY} {problem}",
        )
    listed = [] if arguments.api_key_file is None else keys_in(arguments.api_key_file)
    return (*([variable.strip()] if variable else []), *listed)


def _unusable_key(key: str) -> str:
    """Describes what is wrong with the value of $SPECCASCADE_API_KEY; empty if it is unset or usable."""
    if key and not key.strip():
        return "is blank"
    if CONTROL.search(key.strip()):
        return "contains a control character, which no client could send"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "is not UTF-8, which no client could send"
    return ""


def keys_in(path: str) -> list[str]:
    """The keys in a file, one per line. Raises FieldError."""

    def refused(problem: str, remedy: str) -> FieldError:
        return FieldError("api_key_file", path, remedy, f"--api-key-file {problem}")

    if os.path.exists(path) and not os.path.isfile(path):
        raise refused(f"is {path}, which is not a regular file", "choose a regular file.")
    try:
        text = read(checked_path(path), LARGEST_KEYS).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise refused(f"{path} is not UTF-8", "convert it first (iconv -f latin1 -t utf-8).") from None
    except ValueError as error:
        raise refused(f"cannot be used: {str(error).rstrip('.')}", "choose another file.") from None
    # Concatenated files have byte-order marks in the middle, too.
    keys = [key for line in text.replace(BYTE_ORDER, "").splitlines() if (key := line.strip())]
    if any(CONTROL.search(key) for key in keys):
        raise refused(
            f"{path} has a key with a control character, which no client could send",
            "save the file as UTF-8, with keys of printable characters.",
        )
    if not keys:
        raise refused(f"{path} has no keys", "write one key per line.")
    return keys


def bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises FieldError if the address is not available."""
    if not 0 <= port < 2**16:
        raise FieldError("port", port, "it must be in [0, 65535].", f"--port is {shown(port)}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()  # until then another server may bind the same address
    except (OSError, UnicodeError) as error:
        raise FieldError(
            "port", port, "give another --host or --port.", f"cannot listen at {host}, port {port}: {error}"
        ) from None
    return listening


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("speccascade_jax.serving", logging.INFO), ("uvicorn", logging.CRITICAL)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class Served(NamedTuple):
    """A served config, and whether its block size is an upper bound that adapts to the load."""

    run: DecodeConfig
    by_load: bool


def fixed(run: DecodeConfig, path: str) -> DecodeConfig:
    """A config that adapts to the load, with a number as its block size: its file's, or the usual one."""
    sizes = (configs.load(path, DecodeConfig).block_size, DecodeConfig.block_size)
    return dataclasses.replace(run, block_size=next(size for size in sizes if not isinstance(size, str)))


def served_configs(arguments: Arguments) -> dict[str, Served]:
    """The served configs by name. Raises ValueError for what cannot be served."""
    paths = {Path(path).stem: path for path in (arguments.config, *arguments.also)}
    named = {Path(arguments.config).stem: arguments.run}
    for other in arguments.also:
        name = Path(other).stem
        if name in named:
            raise FieldError("also", other, "list each config once.", f"--also gives {name} twice")
        named[name] = configs.load(other, DecodeConfig)
    by_load = {name for name, run in named.items() if run.block_size == LOAD}
    named |= {name: fixed(named[name], paths[name]) for name in by_load}
    for run in named.values():
        run.check()
        if VOCABULARIES[run.vocabulary].drafts is not None:
            raise FieldError(
                "vocabulary",
                run.vocabulary,
                "serve with --vocabulary=tli.",
                f"{run.vocabulary} drafts on the host between rounds, which servers do not support",
            )
    if by_load and arguments.cluster is not None:
        raise FieldError(
            "block_size",
            LOAD,
            "give a number.",
            f"--block-size={LOAD} depends on measured times, which differ between the processes of a cluster",
        )
    return {name: Served(run, name in by_load) for name, run in named.items()}


def check(arguments: Arguments) -> None:
    """Raises FieldError for invalid values."""
    at_least(
        1, rows=arguments.rows, rounds=arguments.rounds, chunk=arguments.chunk, max_body=arguments.max_body
    )
    at_least(0, max_queue=arguments.max_queue)
    for name in ("timeout", "drain_seconds"):
        seconds = getattr(arguments, name)
        if not 0 < seconds < 1e9:
            raise FieldError(name, seconds, "it must be above 0.", f"{flag_of(name)} is {seconds}")
    if arguments.replicas is not None and arguments.ray is None:
        raise FieldError(
            "replicas",
            arguments.replicas,
            "give --ray=local or the address of a cluster.",
            "--replicas needs --ray",
        )
    for name in ("profile", "cluster"):
        value = getattr(arguments, name)
        if value is not None and arguments.ray is not None:
            raise FieldError(name, value, "give one.", f"--ray and {flag_of(name)} exclude each other")
    check_profile(arguments.profile)


def serve(arguments: Arguments) -> None:
    check(arguments)
    try:
        from speccascade_jax.serving.app import Limits
    except ImportError as error:
        raise ValueError(f"{error.name} is missing; {MISSING}") from None
    limits = Limits(
        seconds=arguments.timeout,
        body_bytes=arguments.max_body,
        keys=keys(arguments),
        origins=arguments.cors,
        page=arguments.page == "on",
        log_texts=arguments.log_texts,
    )
    if arguments.ray is not None:
        serve_replicas(arguments.ray, arguments, limits)
    else:
        serve_here(arguments, limits)


def serve_here(arguments: Arguments, limits: Any) -> None:
    """Serves on the devices of all processes of a job. The first process answers; the others follow its
    engine."""
    from speccascade_jax.serving.followers import END, follow, lead

    with joined(arguments.cluster) as job:
        job.agree(
            {**arguments.run.on_this_machine().record(), "also": arguments.also, "methods": arguments.methods}
            | {"rows": arguments.rows, "chunk": arguments.chunk}
        )
        listening = job.first and bound(arguments.host, arguments.port)
        log_to_stderr()
        models = served_models(arguments)
        lanes = [lane for model in models for lane in model.lanes.values()]
        if listening:
            lead(job, lanes)
            answer(arguments, limits, listening, models)
            job.tell(END)
            return
        for lane in lanes:
            lane.precompile()
        spare_long_lived_objects()
        follow(iter(job.hear, END), lanes)


def answer(
    arguments: Arguments, limits: Any, listening: socket.socket, models: Sequence["ServedModel"]
) -> None:
    """Answers requests until the process is stopped."""
    app, engine = application(arguments, limits, models)
    tell_address(listening)
    sys.setswitchinterval(SWITCH)
    server = server_of(app, engine, arguments.drain_seconds)
    try:
        with profiled(arguments.profile):
            server.run(sockets=[listening])
    finally:
        if engine.running:  # exiting normally while a thread is within XLA would abort
            sys.stdout.flush()
            logging.shutdown()
            os._exit(INTERRUPTED if server.force_exit else 0)
    if engine.failed is not None:
        raise engine.failed


def served_models(arguments: Arguments) -> list["ServedModel"]:
    """The served configs with their models loaded."""
    from speccascade_jax.serving.models import ServedModel

    return [
        ServedModel(
            name,
            run,
            Cascade.from_config(run, decoding_mesh(run.tensor_parallel)),
            arguments.methods,
            arguments.rows,
            arguments.chunk,
            by_load,
        )
        for name, (run, by_load) in served_configs(arguments).items()
    ]


def application(arguments: Arguments, limits: Any, models: Sequence["ServedModel"]) -> tuple[Any, Any]:
    """The application, and the engine that decodes for it."""
    from speccascade_jax.serving.app import create_app
    from speccascade_jax.serving.engine import Engine
    from speccascade_jax.serving.metrics import Metrics

    metrics = Metrics()
    engine = Engine(
        [lane for model in models for lane in model.lanes.values()],
        arguments.max_queue,
        arguments.rounds,
        metrics.heard,
        spare_long_lived_objects,
    )
    return create_app(models, engine, metrics, limits), engine


def spare_long_lived_objects() -> None:
    """Keeps the garbage collector from examining what exists now: models, programs, modules. That would take
    half a second, during which no request advances."""
    gc.collect()
    gc.freeze()


def serve_replicas(address: str, arguments: Arguments, limits: Any) -> None:
    """Serves from replicas on the Ray cluster at `address`. This process is the front, and the replicas end
    with it. SIGHUP replaces them by new ones, a few at a time. Raises ValueError if they do not start."""
    from speccascade_jax.serving.front import Front, create_front
    from speccascade_jax.serving.replicas import bounds, replicas_on, watched

    count = bounds(arguments.replicas or "1")
    served_configs(arguments)
    if address.startswith("ray://"):  # Ray's client does not support streams
        raise FieldError(
            "ray",
            address,
            "run serve.py on a machine of the cluster, with --ray=auto.",
            "Ray clients (ray://) cannot serve",
        )
    check_address(address)
    listening = bound(arguments.host, arguments.port)
    log_to_stderr()
    # The front handles other origins.
    build = functools.partial(in_replica, arguments, dataclasses.replace(limits, origins=()))
    replicas = replicas_on(
        address,
        f"speccascade-{socket.gethostname()}-{listening.getsockname()[1]}",
        count,
        build,
        arguments.rows,
        arguments.max_queue,
        arguments.drain_seconds,
    )
    front = Front(replicas, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        redeploy = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, redeploy.set)
        async with watched(replicas, front.fail, redeploy):
            yield

    tell_address(listening)
    try:
        server_of(create_front(front, lifespan), front, arguments.drain_seconds).run(sockets=[listening])
    finally:
        replicas.remove()
    if front.failed is not None:
        raise front.failed


def in_replica(arguments: Arguments, limits: Any) -> Any:
    """The application and its engine in a replica's process. The replicas of a machine share compiled
    programs."""
    keep_compilations()
    log_to_stderr()
    sys.setswitchinterval(SWITCH)
    return application(arguments, limits, served_models(arguments))


def tell_address(listening: socket.socket) -> None:
    """Prints the URL on a line of its own."""
    host, port = listening.getsockname()[:2]
    console().print(f"http://{f'[{host}]' if ':' in host else host}:{port}", soft_wrap=True)
    sys.stdout.flush()


def server_of(app: Any, engine: Any, drain_seconds: float) -> Any:
    """A server that runs until a signal arrives or the engine fails (`engine.failed`). After the first
    signal, `engine.draining` is true, and the server exits once the engine is idle."""
    import uvicorn

    drained: dict[str, float] = {}

    class Server(uvicorn.Server):
        """Stops once the engine is idle, or immediately at the second signal."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if engine.draining:
                super().handle_exit(signal.SIGINT, frame)
                self.force_exit = True
            engine.draining = True

        async def on_tick(self, counter: int) -> bool:
            if engine.failed is not None:
                return True
            if engine.draining:
                drained.setdefault("since", time.monotonic())
                over = time.monotonic() - drained["since"] > drain_seconds
                self.should_exit |= engine.idle or over
            return await super().on_tick(counter)

    return Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            http="h11",  # httptools, which Ray installs and uvicorn prefers, reads headers of any size
            h11_max_incomplete_event_size=2**16,
        )
    )


def parse(argv: list[str]) -> Arguments:
    """The arguments; the fields of --config are their defaults."""
    name, run = config_of(argv, DecodeConfig, "demo")
    return parsed(Arguments, argv, "serve", __doc__, Arguments(run, config=name))


def main(argv: list[str]) -> int:
    return exit_code(lambda: serve(parse(argv)))
