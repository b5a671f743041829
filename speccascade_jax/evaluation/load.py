"""Generates load for a server in OpenAI's wire format, in closed and open loops, and measures what clients
see."""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from speccascade_jax.planning.simulation import closed_loop_rate, random_pauses

Body = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Reply:
    """The reply to one client. Status 0: the connection broke, or the stream ended early."""

    status: int
    first: float  # seconds to the first tokens; 0: none arrived
    seconds: float
    tokens: int
    events: tuple[bytes, ...] = ()  # of the stream, in JSON

    @property
    def text(self) -> str:
        """The answer. Parsed late, to leave the cores to the server."""
        return text_of(map(json.loads, self.events))


def text_of(events: Iterable[dict[str, Any]]) -> str:
    """The text of a streamed answer."""
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


@dataclasses.dataclass(frozen=True)
class Load:
    """The replies to all clients of a loop, and its duration."""

    replies: list[Reply]
    seconds: float

    @property
    def accepted(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.status == 200]

    @property
    def tokens_per_second(self) -> float:
        return sum(reply.tokens for reply in self.accepted) / self.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.accepted) / self.seconds

    def rate_of(self, clients: int, pause: float = 0.0) -> float:
        """The requests per second of a closed loop of this many clients, while all of them are active."""
        return closed_loop_rate(np.array([reply.seconds for reply in self.accepted]), clients, pause)

    def summary(self) -> dict[str, Any]:
        """Counts, throughput, and the median and 99th percentile of the times of accepted requests, in ms."""
        kept = self.accepted
        figures: dict[str, Any] = {
            "requests": len(self.replies),
            "accepted": len(kept),
            "refused_429": sum(reply.status == 429 for reply in self.replies),
            "lost": sum(reply.status not in (200, 429) for reply in self.replies),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "requests_per_second": self.requests_per_second,
        }
        for name in ("first", "seconds"):
            times = [1000 * getattr(reply, name) for reply in kept]
            key = {"first": "first_token_ms", "seconds": "whole_ms"}[name]
            figures |= {f"{key}_p{p}": float(np.percentile(times, p)) if times else None for p in (50, 99)}
        return figures


def merged(loads: Sequence[Load]) -> Load:
    """Merges consecutive loops into one."""
    return Load([reply for load in loads for reply in load.replies], sum(load.seconds for load in loads))


async def ask(url: str, body: Body, key: str = "") -> Reply:
    """Sends a streamed request over its own connection."""
    place, began = urlsplit(url), time.perf_counter()
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        + (f"Authorization: Bearer {key}\r\n" if key else "")
        + "\r\n"
    )
    status, first, tokens, ended, writer, events = 0, 0.0, 0, False, None, list[bytes]()
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(head.encode() + data)
        status = int((await reader.readline()).split()[1])
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                ended = True
            elif line.startswith(b"data: "):
                first = first or time.perf_counter() - began
                events.append(line[6:])
                if b"completion_tokens" in line:  # parses few events, to leave the cores to the server
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                status = 0 if line.startswith(b'data: {"error"') else status
    except (OSError, ValueError, IndexError, asyncio.IncompleteReadError):
        status = 0
    finally:
        if writer is not None:
            writer.close()
    kept = status if status != 200 or ended else 0
    return Reply(kept, first, time.perf_counter() - began, tokens, tuple(events))


async def closed_loop(
    url: str, bodies: Sequence[Body], clients: int, key: str = "", pause: float = 0.0
) -> Load:
    """A closed loop: each of `clients` sends the next body when its last one is answered, after a random
    pause of `pause` seconds on average."""
    waiting = iter(zip(bodies, random_pauses(len(bodies), pause), strict=True))
    replies: list[Reply] = []

    async def client() -> None:
        for body, seconds in waiting:
            await asyncio.sleep(seconds)
            replies.append(await ask(url, body, key))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(replies, time.perf_counter() - began)


async def open_loop(
    url: str,
    body_of: Callable[[int], Body],
    arrivals: Sequence[float],
    *,
    key: str = "",
    watch: Callable[[], None] = lambda: None,
) -> Load:
    """An open loop: a request at each of these times in seconds, independently of earlier replies. `watch` is
    called ten times during the loop."""
    tasks, began, watched = list[asyncio.Task[Reply]](), time.perf_counter(), 0
    for number, due in enumerate(arrivals):
        await asyncio.sleep(max(began + due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(ask(url, body_of(number), key)))
        if number >= len(arrivals) * watched / 10:
            watched += 1
            watch()
    replies = await asyncio.gather(*tasks)
    return Load(list(replies), time.perf_counter() - began)


async def conversations(
    url: str, opening: str, questions: Sequence[Sequence[str]], suffix: str, fields: Body
) -> list[list[Reply]]:
    """A conversation for each sequence of questions, all at once: the replies to each question.

    A prompt is all that has been said: `opening`, then the earlier questions with their answers, each after
    `suffix` (which the server appends to prompts itself). Raises ValueError if a request is not answered.
    """

    async def converse(turns: Sequence[str]) -> list[Reply]:
        said, replies = opening, list[Reply]()
        for question in turns:
            said += question
            replies.append(reply := await ask(url, {**fields, "prompt": said}))
            if reply.status != 200:
                raise ValueError(f"a request of a conversation ended with status {reply.status}.")
            said += f"{suffix}{reply.text}\n\n"
        return replies

    return list(await asyncio.gather(*map(converse, questions)))
