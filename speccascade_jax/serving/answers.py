"""Answers: what becomes of a request, as one object or as a stream of them."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np

from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.engine import Engine, Job, Update, Updates
from speccascade_jax.serving.models import ServedModel
from speccascade_jax.serving.pieces import Piece, Pieces
from speccascade_jax.serving.protocol import Asked, Refused
from speccascade_jax.settings import Settings

SEEDS = 2**31
COUNTS = ("accepted", "drafted", "deferred")
NAMES = {"completion": ("cmpl", "text_completion", "text_completion"),
         "chat": ("chatcmpl", "chat.completion", "chat.completion.chunk")}


class Part(NamedTuple):
    """What a choice has newly written."""

    number: int                   # the choice's
    pieces: list[Piece]
    scores: list[dict[str, Any]]  # one for each piece, where they are asked for
    reason: str | None            # why the choice ends, where it does


@dataclasses.dataclass
class Choice:
    """One of an answer's texts; blank prompts have no job."""

    job: Job | None
    pieces: Pieces
    offset: int = 0  # characters given


class Answer:
    """A request's jobs from submission to their ends. Raises Refused or Full before one is submitted."""

    def __init__(self, engine: Engine, model: ServedModel, asked: Asked, seconds: float):
        self.engine, self.model, self.asked = engine, model, asked
        self.kind = "chat" if asked.messages else "completion"
        self.settings = self._seeded(model.settings(asked))
        self.prompts = model.prompts(asked)
        self.came, self.created = time.monotonic(), int(time.time())
        self.deadline = self.came + seconds
        self.id = f"{NAMES[self.kind][0]}-{secrets.token_hex(12)}"
        self.updates: Updates = asyncio.Queue()
        self.results: dict[int, Result] = {}
        self.first: float | None = None  # seconds to the first tokens
        lane = model.lane(self.settings)
        wanted = [(prompt, n) for prompt in self.prompts for n in range(asked.n)]
        most = lane.rows + engine.max_queue
        if len(wanted) > most:
            raise Refused(f"n times the prompts is {len(wanted)}; this server takes at most {most} at once.",
                          "n")
        engine.check_room(lane, sum(bool(prompt.tokens) for prompt, _ in wanted))
        scored = asked.logprobs is not None
        jobs = [engine.submit(lane, model.request(prompt, self.settings, n), self.updates, scored)
                if prompt.tokens else None for prompt, n in wanted]
        self.choices = [Choice(job, Pieces(model.cascade.tokenizer, self.settings.stop)) for job in jobs]
        self.numbers = {job: n for n, job in enumerate(jobs) if job is not None}

    def _seeded(self, settings: Settings) -> Settings:
        """With a seed of its own, unless the request names one or draws nothing."""
        if "seed" in self.asked.changes or settings.temperature == 0:
            return settings
        return dataclasses.replace(settings, seed=secrets.randbelow(SEEDS))

    def close(self) -> int:
        """Frees the rows of jobs that run; returns how many did."""
        running = [job for job in self.numbers if not job.ended]
        for job in running:
            self.engine.cancel(job)
        return len(running)

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return len(self.results) == len(self.choices)

    async def parts(self) -> AsyncIterator[Part]:
        """What the choices write, as it comes, whole tokens at a time. Raises Refused where that ends."""
        for n, choice in enumerate(self.choices):
            if choice.job is None:
                self.results[n] = Result([], [], [], {})
                yield Part(n, [], [], "stop")
        while not self.over:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time()
                                              + self.deadline - time.monotonic()):
                    job, update = await self.updates.get()
            except TimeoutError:
                raise Refused("the request took longer than this server allows.", status=504, code="timeout",
                              kind="server_error") from None
            if update.result is None:
                raise Refused(update.error, status=500, kind="server_error")
            yield self._part(job, update, update.result)

    def _part(self, job: Job, update: Update, result: Result) -> Part:
        n = self.numbers[job]
        choice = self.choices[n]
        begin = choice.pieces.given
        pieces = choice.pieces.of(result, update.finished)
        if update.fresh and self.first is None:
            self.first = time.monotonic() - self.came
        scores = []
        if update.scores is not None:
            for k, piece in enumerate(pieces, begin):
                scores.append(self._scored(piece, choice.offset, [np.asarray(x)[k] for x in update.scores]))
                choice.offset += len(piece.text)
        if update.finished:
            self.results[n] = result
        return Part(n, pieces, scores, job.reason(update) if update.finished else None)

    def _scored(self, piece: Piece, offset: int, scores: list[Any]) -> dict[str, Any]:
        own, likeliest, theirs = scores
        most = self.asked.logprobs or 0
        others = [(self.model.cascade.tokenizer.decode([token]), float(value))
                  for token, value in zip(likeliest[:most].tolist(), theirs[:most], strict=True)]
        return {"token": piece.text, "logprob": float(own), "offset": offset, "top": others}

    # Objects of the wire format

    def usage(self) -> dict[str, Any]:
        counts = [result.counts for result in self.results.values()]
        prompt = sum(len(one.tokens) for one in self.prompts)
        completion = sum(len(result.tokens) for result in self.results.values())
        calls = sum(own.get("rounds", own.get("model_passes", 0)) for own in counts)
        sums = {name: sum(own.get(name, 0) for own in counts) for name in COUNTS}
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
                "verifier_calls": calls, **sums,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": sums["accepted"],
                    "rejected_prediction_tokens": sums["drafted"] - sums["accepted"]}}

    def _object(self, name: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model.name,
                "choices": choices, "seed": self.settings.seed, **more}

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        found: list[list[Part]] = [[] for _ in self.choices]
        async for part in self.parts():
            found[part.number].append(part)
        choices = []
        for parts in found:
            pieces = [piece for part in parts for piece in part.pieces]
            scores = [score for part in parts for score in part.scores]
            choices.append(self._choice(parts[-1]._replace(pieces=pieces, scores=scores), "message"))
        return self._object(NAMES[self.kind][1], choices, usage=self.usage())

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as the objects of a stream."""
        name, more = NAMES[self.kind][2], {"usage": None} if self.asked.include_usage else {}
        if self.kind == "chat":
            for n in range(len(self.choices)):
                delta = {"role": "assistant", "content": ""}
                yield self._object(name, [{"index": n, "delta": delta, "logprobs": None,
                                           "finish_reason": None}], **more)
        async for part in self.parts():
            if part.pieces or part.reason:
                yield self._object(name, [self._choice(part, "delta")], **more)
        if self.asked.include_usage:
            yield self._object(name, [], usage=self.usage())

    def _choice(self, part: Part, field: str) -> dict[str, Any]:
        text = "".join(piece.text for piece in part.pieces)
        scored = self.asked.logprobs is not None
        if self.kind == "chat":
            message = {"content": text} if field == "delta" else {"role": "assistant", "content": text}
            own: dict[str, Any] = {field: message, "logprobs": _chat_scores(part) if scored else None}
        else:
            own = {"text": text, "logprobs": _completion_scores(part) if scored else None}
        if self.asked.origin:
            own["origin"] = [{"text": piece.text, "token": piece.token, "origin": piece.origin,
                              "level": piece.level} for piece in part.pieces]
        return {"index": part.number, **own, "finish_reason": part.reason}


def _completion_scores(part: Part) -> dict[str, Any]:
    return {"tokens": [one["token"] for one in part.scores],
            "token_logprobs": [one["logprob"] for one in part.scores],
            "top_logprobs": [dict(one["top"]) for one in part.scores],
            "text_offset": [one["offset"] for one in part.scores]}


def _chat_scores(part: Part) -> dict[str, Any]:
    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": [*token.encode(errors="replace")]}

    return {"content": [{**entry(one["token"], one["logprob"]),
                         "top_logprobs": [entry(*other) for other in one["top"]]} for one in part.scores],
            "refusal": None}
