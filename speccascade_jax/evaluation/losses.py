"""Measures what clients see while replicas of a server are killed: every request is answered once, or
refused."""

import asyncio
import collections
import contextlib
import itertools
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from speccascade_jax.evaluation.load import Body, text_of

PAUSE = 1.0  # seconds that a client waits after a refusal
BETWEEN = 10.0  # seconds without a kill once all replicas run


class Outcome(NamedTuple):
    """The outcome for a client: `answered`, `refused` with a status, `interrupted` by an error event, or
    `lost`."""

    kind: str
    status: int
    text: str


async def outcome(url: str, body: Body) -> Outcome:
    """Sends a request over its own connection and reads the whole answer."""
    place = urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        with contextlib.closing(writer):
            writer.write(head.encode() + data)
            whole = await reader.read()
        status = int(whole.split(maxsplit=2)[1])
        return judged(status, whole.partition(b"\r\n\r\n")[2], body.get("stream", False))
    except (OSError, ValueError, IndexError):
        return Outcome("lost", 0, "")


def judged(status: int, answer: bytes, stream: bool) -> Outcome:
    """The outcome of an answer with this status and body. Raises ValueError if the body is incomplete."""
    if status != 200:
        return Outcome("refused", status, json.loads(answer)["error"]["message"])
    if not stream:
        return Outcome("answered", status, json.loads(answer)["choices"][0]["text"])
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    *events, done = lines or [b""]
    objects = [json.loads(event) for event in events]
    text = text_of(objects)
    if done != b"[DONE]":
        return Outcome("lost", status, text)
    return Outcome("interrupted" if objects and "error" in objects[-1] else "answered", status, text)


async def texts_of(url: str, bodies: Sequence[Body], clients: int) -> list[str]:
    """The answers to all bodies without kills. Raises ValueError if one is not answered."""
    waiting, texts = iter(enumerate(bodies)), [""] * len(bodies)

    async def client() -> None:
        for number, body in waiting:
            seen = await outcome(url, body)
            if seen.kind != "answered":
                raise ValueError(f"a request was {seen.kind} before anything was killed: {seen.text}")
            texts[number] = seen.text

    await asyncio.gather(*(client() for _ in range(clients)))
    return texts


async def under_kills(
    url: str,
    bodies: Sequence[Body],
    texts: Sequence[str],
    clients: int,
    seconds: float,
    kill: Callable[[], bool],
) -> dict[str, Any]:
    """Counts the outcomes for clients that send the bodies repeatedly, every other time as a stream, while
    `kill` is called every second and returns whether it has killed a replica.

    `wrong` counts answers, complete or interrupted, that differ from `texts`: doubled, mixed or truncated.
    """
    counts: collections.Counter[str] = collections.Counter()
    began, numbers = time.monotonic(), itertools.count()

    async def client() -> None:
        while time.monotonic() < began + seconds:
            number = next(numbers)
            place = number // 2 % len(bodies)
            seen = await outcome(url, {**bodies[place], "stream": number % 2 == 1})
            counts["requests"] += 1
            counts[f"refused_{seen.status}" if seen.kind == "refused" else seen.kind] += 1
            wanted = texts[place]
            whole = seen.kind != "answered" or seen.text == wanted
            begun = seen.kind != "interrupted" or wanted.startswith(seen.text)
            counts["wrong"] += not (whole and begun)
            if seen.kind == "refused":
                await asyncio.sleep(PAUSE)

    async def killer() -> None:
        while True:
            await asyncio.sleep(1)
            counts["killed"] += await asyncio.to_thread(kill)

    killing = asyncio.ensure_future(killer())
    await asyncio.gather(*(client() for _ in range(clients)))
    killing.cancel()
    kinds = ("requests", "answered", "refused_503", "interrupted", "lost", "wrong", "killed")
    return {**{kind: counts[kind] for kind in kinds}, **counts, "seconds": time.monotonic() - began}


class Killer:
    """Kills one replica (a process) of a server's local cluster whenever all `count` replicas have accepted
    requests for a while."""

    def __init__(self, server: int, url: str, count: int, between: float = BETWEEN):
        self.server, self.url, self.count, self.between = server, url, count, between
        self.since: float | None = None
        self.killed: set[int] = set()

    def __call__(self) -> bool:
        running = [pid for pid in replica_processes(self.server) if pid not in self.killed]
        if len(running) < self.count or replicas_ready(self.url) < self.count:
            self.since = None
            return False
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since < self.between:
            return False
        os.kill(running[0], signal.SIGKILL)
        self.killed.add(running[0])
        self.since = None
        return True


def replicas_ready(url: str) -> int:
    """The number of replicas that accept requests, according to the front."""
    try:
        with urllib.request.urlopen(url + "/ready") as answer:
            return int(json.load(answer)["replicas"])
    except urllib.error.HTTPError:
        return 0


def replica_processes(server: int) -> list[int]:
    """The ids of the replicas' processes among the descendants of a server with a local cluster."""
    parents, names = dict[int, int](), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")

    def below(pid: int) -> bool:
        return pid == server or (pid in parents and below(parents[pid]))

    return sorted(pid for pid, name in names.items() if name.startswith("ray::ServeReplica") and below(pid))
