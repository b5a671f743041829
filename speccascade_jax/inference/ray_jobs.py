"""Decodes files on many machines: inputs are split into shards, each machine has an actor, and each shard a
file.

Ray Data places the actors, assigns the shards, and reassigns those of a lost worker. A shard's file is
written once it is complete, and its contents depend only on the inputs and settings. So a job that lost its
driver resumes with the missing shards.
"""

import dataclasses
import glob
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.inputs import read_texts
from speccascade_jax.inference.outputs import open_output, settings_file, write_whole
from speccascade_jax.inference.text import Cascade, Output

PATIENCE = 5.0  # seconds to wait for a cluster's answer
SETTINGS = 4  # the type of HTTP/2's first frame


class Shard(NamedTuple):
    """Consecutive inputs of a job; `first` is the index of the first one over all files."""

    file: str
    first: int
    texts: list[str]


def read_shards(pattern: str, limit: int | None = None) -> list[str]:
    """The texts of one file, or of all files that match a pattern such as "news-*.txt", in the order of their
    names. Only the first `limit` texts are read.

    Raises ValueError if no file matches.
    """
    names = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    if not names:
        raise FieldError("input", pattern, "give an existing one.", f"no file is called {pattern}")
    texts: list[str] = []
    for name in names:
        texts += read_texts(name, None if limit is None else limit - len(texts))
    return texts


def check_address(address: str) -> None:
    """Raises FieldError if no cluster answers at HOST:PORT or ray://HOST:PORT, because Ray itself would retry
    for minutes. `local` and `auto` are not checked."""
    if address in ("local", "auto"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 2**16):
        raise FieldError("ray", address, "give HOST:PORT, ray://HOST:PORT, auto or local.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE) as connection:
            connection.settimeout(PATIENCE)
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                _check_http2(connection)
    except (OSError, UnicodeError) as error:
        raise FieldError(
            "ray",
            address,
            "start one there (ray start --head), or give --ray local.",
            f"no Ray cluster answers at {address} within {PATIENCE:g} s ({error})",
        ) from None


def _check_http2(connection: socket.socket) -> None:
    """Raises OSError unless the server sends HTTP/2 settings first, as gRPC servers such as Ray's do."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]))
    header = connection.recv(9, socket.MSG_WAITALL)
    if len(header) < 9 or header[3] != SETTINGS:
        raise OSError("another service is listening there")


def cut(texts: Sequence[str], size: int, folder: str | Path) -> list[Shard]:
    """Splits the texts into shards of `size` texts, with files in `folder`."""
    return [
        Shard(str(Path(folder) / f"part-{number:05}.jsonl"), first, list(texts[first : first + size]))
        for number, first in enumerate(range(0, len(texts), size))
    ]


def finished(shard: Shard, settings: dict[str, Any]) -> list[Output] | None:
    """A shard's outputs if its file is complete, else None. Raises ValueError if the file has other
    settings."""
    file, done = open_output(shard.file, settings, shard.texts, shard.first)
    file.close()
    return done if len(done) == len(shard.texts) else None


class Worker:
    """The code of an actor: a cascade that decodes one shard after another."""

    def __init__(self, run: DecodeConfig, settings: dict[str, Any]):
        self.run, self.settings = run, settings
        self.cascade = Cascade.from_config(run)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Decodes the shards of a batch and writes each file atomically."""
        for shard in (Shard(**json.loads(text)) for text in batch["shard"]):
            outputs = self.cascade.generate(
                shard.texts,
                self.run.settings,
                truncate=self.run.truncate,
                first_index=shard.first,
                batch_size=self.run.batch_size,
            )
            lines = [json.dumps(dataclasses.asdict(output), ensure_ascii=False) + "\n" for output in outputs]
            write_whole(settings_file(shard.file), json.dumps(self.settings, indent=1) + "\n")
            write_whole(shard.file, "".join(lines))
        return {"first": [json.loads(text)["first"] for text in batch["shard"]]}


def connect(address: str, cores: int = 0) -> None:
    """Connects to the Ray cluster at `address`. `local` starts one on this machine with at least `cores`
    process slots, and at least one per core. Raises FieldError if no cluster answers."""
    import ray

    options: dict[str, Any] = {}
    if address == "local" and cores:
        options["num_cpus"] = max(cores, os.cpu_count() or 1)
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 yields to everything else
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise FieldError(
            "ray",
            address,
            "start one there (ray start --head), or give --ray local.",
            f"no Ray cluster answers at {address}: {error}",
        ) from None


def devices_of_machines(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Options of an actor that takes all accelerators of a machine. `nodes` is the result of ray.nodes()."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    gpus, tpus = (min(resources.get(kind, 0) for resources in alive) for kind in ("GPU", "TPU"))
    options: dict[str, Any] = {"num_gpus": gpus} if gpus else {}
    return {**options, "resources": {"TPU": tpus}} if tpus else options


def decode(
    address: str, workers: int | None, run: DecodeConfig, settings: dict[str, Any], shards: Sequence[Shard]
) -> Iterator[int]:
    """Decodes the shards on the Ray cluster at `address` (`local`: one on this machine) with this many
    workers (None: one per machine), and yields the first index of each shard once it is done.

    Raises FieldError if Ray is missing or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise FieldError(
            "ray", address, "pip install 'speccascade_jax[ray]'.", "--ray needs Ray, which is missing"
        ) from None
    connect(address)
    try:
        nodes = ray.nodes()
        data = ray.data.from_items(
            [{"shard": json.dumps(shard._asdict())} for shard in shards], override_num_blocks=len(shards)
        )
        size = min(workers or sum(node["Alive"] for node in nodes), len(shards))
        done = data.map_batches(
            Worker,
            fn_constructor_args=(run, settings),
            batch_size=1,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=size),
            scheduling_strategy="SPREAD",
            **devices_of_machines(nodes),
        )
        for row in done.iter_rows():
            yield int(row["first"])
    finally:
        ray.shutdown()
