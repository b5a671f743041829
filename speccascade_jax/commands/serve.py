"""Serve a cascade over HTTP, in OpenAI's wire format.

    python scripts/serve.py --config=demo --port=8000
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Where is he?"}'
"""

import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Literal

import tyro

from speccascade_jax import config as configs
from speccascade_jax.commands.commandline import at_least, config_of, console, exit_code
from speccascade_jax.config import DecodeConfig
from speccascade_jax.inference.text import Cascade
from speccascade_jax.parallel import local_mesh
from speccascade_jax.vocabularies import VOCABULARIES

KEY = "SPECCASCADE_API_KEY"
METHODS = ("speculative", "chow", "diff", "opt", "token_v3", "lossy", "verifier", "drafter")
SWITCH = 5e-4  # seconds that HTTP may keep the engine's thread waiting, while the devices have nothing to do
MISSING = "to serve: pip install 'speccascade_jax[serve]'."


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Serve a cascade over HTTP, in OpenAI's wire format."""

    run: tyro.conf.OmitArgPrefixes[DecodeConfig]
    config: str = "demo"
    """A name in configs/ or the path of such a file; its fields are the defaults of all other flags, and of
    what requests leave out."""
    also: tuple[str, ...] = ()
    """Configs served next to it, as models of their own, with the defaults of their files."""
    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 for all."""
    port: int = 8000
    """0 picks a free one. The URL is printed on a line of its own."""
    rows: int = 8
    """Requests of one kind decoded at once, on each device."""
    max_queue: int = 64
    """Requests that may wait for a row; more are answered with 429."""
    methods: tuple[str, ...] = METHODS
    """What requests may choose from; each is compiled, and costs a little in every round."""
    rounds: int = 2
    """Tokens go out every so many rounds, every twice as many while requests wait."""
    chunk: int = 128
    """Tokens of a prompt read between two rounds, by decoder-only models."""
    timeout: float = 120.0
    """Seconds that a request may take."""
    max_body: int = 2**20
    """Bytes of a request's body."""
    api_key_file: str | None = None
    """A file with a key on each line; requests must give one of them, or $SPECCASCADE_API_KEY."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may ask, such as https://example.org."""
    page: Literal["on", "off"] = "on"
    """Whether there is a page at /."""
    log_texts: bool = False
    """Write prompts and answers to the log."""
    drain_seconds: float = 60.0
    """How long requests may go on after SIGTERM."""


def keys(arguments: Arguments) -> tuple[str, ...]:
    """The API keys. Raises ValueError where the file cannot be read or holds none."""
    found = [os.environ[KEY]] if os.environ.get(KEY) else []
    if arguments.api_key_file is not None:
        try:
            lines = Path(arguments.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read --api-key-file {arguments.api_key_file}: {error}") from None
        own = [line.strip() for line in lines if line.strip()]
        if not own:
            raise ValueError(f"--api-key-file {arguments.api_key_file} holds no key.")
        found += own
    return tuple(found)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError where the address cannot be had."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port is {port}; it lies in [0, 65535].")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        own = socket.socket(family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, port))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot listen at {host}, port {port}: {error}; give another --host or "
                         "--port.") from None
    return own


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower(),
                                "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("speccascade_jax.serving", logging.INFO), ("uvicorn", logging.CRITICAL)):
        own = logging.getLogger(name)
        own.handlers, own.propagate = [handler], False
        own.setLevel(level)


def cascades(arguments: Arguments) -> dict[str, tuple[DecodeConfig, Cascade]]:
    """The served configs by name, loaded. Raises ValueError for what cannot be served."""
    named = {Path(arguments.config).stem: arguments.run}
    for other in arguments.also:
        name = Path(other).stem
        if name in named:
            raise ValueError(f"--also names {name} twice.")
        named[name] = configs.load(other, DecodeConfig)
    for run in named.values():
        run.check()
        if VOCABULARIES[run.vocabulary].drafts is not None:
            raise ValueError("slem drafts on the host, between rounds: serve with --vocabulary=tli.")
    mesh = local_mesh()
    return {name: (run, Cascade.from_config(run, mesh if run.tensor_parallel == 1 else None))
            for name, run in named.items()}


def serve(arguments: Arguments) -> None:
    at_least(1, rows=arguments.rows, rounds=arguments.rounds, chunk=arguments.chunk,
             max_body=arguments.max_body)
    at_least(0, max_queue=arguments.max_queue)
    for name, seconds in (("timeout", arguments.timeout), ("drain-seconds", arguments.drain_seconds)):
        if not 0 < seconds < 1e9:
            raise ValueError(f"--{name} is {seconds}; it must be above 0.")
    try:
        import uvicorn

        from speccascade_jax.serving.app import Limits, create_app
        from speccascade_jax.serving.engine import Engine
        from speccascade_jax.serving.metrics import Metrics
        from speccascade_jax.serving.models import ServedModel
    except ImportError as error:
        raise ValueError(f"{error.name} is missing; {MISSING}") from None
    limits = Limits(seconds=arguments.timeout, body_bytes=arguments.max_body, keys=keys(arguments),
                    origins=arguments.cors, page=arguments.page == "on", log_texts=arguments.log_texts)
    listening = bound(arguments.host, arguments.port)
    log_to_stderr()
    models = [ServedModel(name, run, cascade, arguments.methods, arguments.rows, arguments.chunk)
              for name, (run, cascade) in cascades(arguments).items()]
    metrics = Metrics()
    engine = Engine([lane for model in models for lane in model.lanes.values()], arguments.max_queue,
                    arguments.rounds, metrics.heard)

    class Server(uvicorn.Server):
        """Stops when nothing runs any more; at once at the second signal."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if engine.draining or not engine.ready:
                super().handle_exit(signal.SIGINT, frame)
                self.force_exit = True
            engine.draining = True

        async def on_tick(self, counter: int) -> bool:
            if engine.failed is not None:
                return True
            if engine.draining:
                drained.setdefault("since", time.monotonic())
                over = time.monotonic() - drained["since"] > arguments.drain_seconds
                self.should_exit |= engine.idle or over
            return await super().on_tick(counter)

    drained: dict[str, float] = {}
    host, port = listening.getsockname()[:2]
    console().print(f"http://{f'[{host}]' if ':' in host else host}:{port}", soft_wrap=True)
    sys.stdout.flush()
    app = create_app(models, engine, metrics, limits)
    sys.setswitchinterval(SWITCH)
    server = Server(uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=5, h11_max_incomplete_event_size=2**16))
    server.run(sockets=[listening])
    if engine.failed is not None:
        raise engine.failed


def parse(argv: list[str]) -> Arguments:
    """The command line over the fields of its --config."""
    name, run = config_of(argv, DecodeConfig, "demo")
    return tyro.cli(Arguments, default=Arguments(run, config=name), args=argv, prog="serve.py",
                    description=__doc__)


def main(argv: list[str]) -> int:
    return exit_code(lambda: serve(parse(argv)))
