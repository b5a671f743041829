"""Answers to requests, as one object or as a stream of objects."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from speccascade_jax.inference.scoring import TokenScores
from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.engine import Job, Submitted, Update
from speccascade_jax.serving.models import Decoding, ServedModel
from speccascade_jax.serving.pieces import Piece, Pieces
from speccascade_jax.serving.protocol import ParsedRequest, Refused

COUNTS = ("accepted", "drafted", "deferred")


class Wire(NamedTuple):
    """OpenAI's names for the objects of an answer."""

    id: str
    whole: str
    event: str


WIRES = {
    "prompt": Wire("cmpl", "text_completion", "text_completion"),
    "messages": Wire("chatcmpl", "chat.completion", "chat.completion.chunk"),
}


class Part(NamedTuple):
    """The new text of a choice."""

    number: int  # index of the choice
    pieces: list[Piece]
    scores: list[dict[str, Any]]  # one per piece, if requested
    reason: str | None  # why the choice ended, if it has


@dataclasses.dataclass
class Choice:
    """One text of an answer. Blank prompts have no job."""

    job: Job | None
    pieces: Pieces
    offset: int = 0  # characters sent so far


class Answer:
    """The answer to a request whose jobs have been submitted. It must end within `seconds`."""

    def __init__(
        self,
        model: ServedModel,
        request: ParsedRequest,
        decoding: Decoding,
        submitted: Submitted,
        seconds: float,
    ):
        self.model, self.request, self.decoding = model, request, decoding
        self.updates, self.wire = submitted.updates, WIRES[request.text_field]
        self.came, self.created = time.monotonic(), int(time.time())
        self.deadline = self.came + seconds
        self.id = f"{self.wire.id}-{secrets.token_hex(12)}"
        self.first: float | None = None  # seconds to the first tokens
        self.results: dict[int, Result] = {}
        stop, tokenizer = decoding.settings.stop, model.cascade.tokenizer
        self.choices = [Choice(job, Pieces(tokenizer, stop)) for job in submitted.jobs]
        self.numbers = {job: number for number, job in enumerate(submitted.jobs) if job is not None}

    @property
    def running(self) -> list[Job]:
        """The jobs that have not ended."""
        return [job for job in self.numbers if not job.ended]

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return len(self.results) == len(self.choices)

    async def parts(self) -> AsyncIterator[Part]:
        """Yields the text of the choices as it arrives, in whole tokens. Raises Refused at the deadline or if
        a job fails."""
        for number, choice in enumerate(self.choices):
            if choice.job is None:
                self.results[number] = Result([], [], [], {})
                yield Part(number, [], [], "stop")
        while not self.over:
            try:
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + self.deadline - time.monotonic()
                ):
                    job, update = await self.updates.get()
            except TimeoutError:
                raise Refused(
                    "the request took longer than this server allows.",
                    status=504,
                    code="timeout",
                    kind="server_error",
                ) from None
            if update.result is None:
                raise Refused(update.error, status=500, kind="server_error")
            yield self._part(job, update, update.result)

    def _part(self, job: Job, update: Update, result: Result) -> Part:
        number = self.numbers[job]
        choice = self.choices[number]
        begin = choice.pieces.sent
        pieces = choice.pieces.of(result, update.finished)
        if update.fresh and self.first is None:
            self.first = time.monotonic() - self.came
        scores = []
        if update.scores is not None:
            for position, piece in enumerate(pieces, begin):
                scores.append(self._score(piece, choice.offset, update.scores, position))
                choice.offset += len(piece.text)
        if update.finished:
            self.results[number] = result
        return Part(number, pieces, scores, job.reason(update) if update.finished else None)

    def _score(self, piece: Piece, offset: int, scores: TokenScores, position: int) -> dict[str, Any]:
        """The scores of the token at `position`, whose text begins at character `offset`."""
        count = self.request.logprobs or 0
        likeliest, logprobs = scores.likeliest[position], scores.likeliest_logprobs[position]
        top = [
            (self.model.cascade.tokenizer.decode([token]), float(value))
            for token, value in zip(likeliest[:count].tolist(), logprobs[:count], strict=True)
        ]
        return {
            "token": piece.text,
            "logprob": float(scores.logprobs[position]),
            "offset": offset,
            "top": top,
        }

    # Objects of the wire format

    def usage(self) -> dict[str, Any]:
        counts = [result.counts for result in self.results.values()]
        prompt = sum(len(prompt.tokens) for prompt in self.decoding.prompts)
        firsts = self.choices[:: self.request.n]  # the first choice of each prompt
        cached = sum(choice.job.cached for choice in firsts if choice.job is not None)
        completion = sum(len(result.tokens) for result in self.results.values())
        calls = sum(count.get("rounds", count.get("model_passes", 0)) for count in counts)
        sums = {name: sum(count.get(name, 0) for count in counts) for name in COUNTS}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "verifier_calls": calls,
            **sums,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sums["accepted"],
                "rejected_prediction_tokens": sums["drafted"] - sums["accepted"],
            },
        }

    def _object(self, name: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
            "seed": self.decoding.settings.seed,
            **self.decoding.block_size,
            **more,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        parts: list[list[Part]] = [[] for _ in self.choices]
        async for part in self.parts():
            parts[part.number].append(part)
        choices = []
        for of_choice in parts:
            pieces = [piece for part in of_choice for piece in part.pieces]
            scores = [score for part in of_choice for score in part.scores]
            choices.append(self._choice(of_choice[-1]._replace(pieces=pieces, scores=scores), "message"))
        return self._object(self.wire.whole, choices, usage=self.usage())

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the answer as the objects of a stream."""
        name, more = self.wire.event, {"usage": None} if self.request.include_usage else {}
        if self.request.messages:
            for number in range(len(self.choices)):
                delta = {"role": "assistant", "content": ""}
                yield self._object(
                    name, [{"index": number, "delta": delta, "logprobs": None, "finish_reason": None}], **more
                )
        async for part in self.parts():
            if part.pieces or part.reason:
                yield self._object(name, [self._choice(part, "delta")], **more)
        if self.request.include_usage:
            yield self._object(name, [], usage=self.usage())

    def _choice(self, part: Part, field: str) -> dict[str, Any]:
        text = "".join(piece.text for piece in part.pieces)
        scored = self.request.logprobs is not None
        if self.request.messages:
            message = {"content": text} if field == "delta" else {"role": "assistant", "content": text}
            content: dict[str, Any] = {field: message, "logprobs": _chat_scores(part) if scored else None}
        else:
            content = {"text": text, "logprobs": _completion_scores(part) if scored else None}
        if self.request.origin:
            content["origin"] = [
                {"text": piece.text, "token": piece.token, "origin": piece.origin, "level": piece.level}
                for piece in part.pieces
            ]
        return {"index": part.number, **content, "finish_reason": part.reason}


def _completion_scores(part: Part) -> dict[str, Any]:
    return {
        "tokens": [score["token"] for score in part.scores],
        "token_logprobs": [score["logprob"] for score in part.scores],
        "top_logprobs": [dict(score["top"]) for score in part.scores],
        "text_offset": [score["offset"] for score in part.scores],
    }


def _chat_scores(part: Part) -> dict[str, Any]:
    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": [*token.encode(errors="replace")]}

    return {
        "content": [
            {
                **entry(score["token"], score["logprob"]),
                "top_logprobs": [entry(*token) for token in score["top"]],
            }
            for score in part.scores
        ],
        "refusal": None,
    }
