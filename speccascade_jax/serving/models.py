"""What a server serves: a config's cascade, the methods compiled for it, and how it reads a request."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers.autoregressive import SINGLE_MODEL
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.chunks import any_continues
from speccascade_jax.scheduling.scheduler import Request
from speccascade_jax.serving.engine import ServedLane
from speccascade_jax.serving.protocol import Asked, Refused
from speccascade_jax.settings import Settings, resolved
from speccascade_jax.vocabularies.joining import readings
from speccascade_jax.vocabularies.translated import Translated

CHARACTERS_PER_TOKEN = 64  # longer prompts are refused before they are cut into tokens
MOST_TOP_K = 1024


class Prompt(NamedTuple):
    """A prompt as the verifier reads it, [] for a blank one, and as each model of another vocabulary does."""

    tokens: list[int]
    own: dict[Translated, list[int]]


class ServedModel:
    """One config under its name. Each of `methods` is compiled; requests choose among them. Models that can
    read `chunk` tokens of a prompt between two rounds.

    Raises ValueError for a method that cannot be served.
    """

    def __init__(self, name: str, config: DecodeConfig, cascade: Cascade, methods: Sequence[str], rows: int,
                 chunk: int = 128):
        self.name, self.cascade, self.created = name, cascade, int(time.time())
        self.defaults: Settings = config.settings
        self.examples = config.examples
        self.max_top_k = min(MOST_TOP_K, cascade.verifier.vocab_size)
        if cascade.levels == 0:  # whatever its config says, it is the verifier
            self.defaults, methods = dataclasses.replace(self.defaults, method="verifier"), ()
        self.methods = tuple(dict.fromkeys([self.defaults.name, *methods]))
        every = [self._compiled(method) for method in self.methods]
        self.lanes: dict[Any, ServedLane] = {}
        for key, lane in cascade.lanes(every).items():
            chunked = any_continues(lane.plan.sampler, lane.params)
            lane = lane._replace(plan=dataclasses.replace(
                lane.plan, ragged=lane.plan.sampler.level > 0,
                chunk=min(chunk, cascade.max_source_length) if chunked else 0))
            some = next(one for one in every if cascade.lane_of(one) == key)
            self.lanes[key] = ServedLane(name, cascade, lane, some, rows, cascade.max_source_length)

    def _compiled(self, method: str) -> Settings:
        """Settings of everything that this method's requests may ask for."""
        for one in method.split("+"):
            known = [*(name for name, rule in METHODS.items() if rule.by_prefix), *SINGLE_MODEL]
            if one not in known:  # log probabilities are those of a law by prefix
                raise ValueError(f"--methods: {one} cannot be served; known: {', '.join(known)}.")
        truncations: dict[str, Any] = {name: self.max_top_k if truncation.bounded else truncation.off
                       for name, truncation in TRUNCATIONS.items()}
        settings = dataclasses.replace(self.defaults, method=method, stop=("\n",), **truncations)
        settings.of_levels("method", max(self.cascade.levels, 1))
        return resolved(settings, self.cascade.named)

    def settings(self, asked: Asked) -> Settings:
        """How a request is decoded. Raises Refused."""
        changes, limit = asked.changes, self.cascade.max_new_tokens
        if changes.get("max_new_tokens", 1) > limit:
            raise Refused(f"max_tokens is {changes['max_new_tokens']}; this server writes at most {limit}.",
                          "max_tokens")
        if (changes.get("top_k") or 0) > self.max_top_k:
            raise Refused(f"top_k is {changes['top_k']}; this server takes at most {self.max_top_k}: leave "
                          "it out, or give top_p or min_p.", "top_k")
        try:
            settings = self.cascade.checked(self.defaults, changes)
            settings = dataclasses.replace(settings, block_size=self._block_size(settings))
        except ValueError as error:
            param = str(error).split()[0]
            raise Refused(str(error), param if param in changes else None) from None
        if settings.name not in self.methods:
            raise Refused(f"method {settings.name} is not served here; known: {', '.join(self.methods)}.",
                          "method")
        return settings

    def _block_size(self, settings: Settings) -> Any:
        """A request's block size; raises ValueError unless it is at most the server's."""
        most, own = self.defaults.block_size, settings.block_size
        if self.defaults.adaptive or settings.adaptive:
            if own != most:
                raise ValueError(f"block_size is {own}; this server's is {most}: leave it out.")
            if settings.max_block_size > self.defaults.max_block_size:
                raise ValueError(f"max_block_size is {settings.max_block_size}; this server drafts at most "
                                 f"{self.defaults.max_block_size}.")
            return own
        if own == most or not isinstance(own, int) or not isinstance(most, int) or self.cascade.levels > 1:
            if own != most:
                raise ValueError(f"block_size is {own}; this model is a hierarchy, and its block sizes are "
                                 f"fixed: {most}.")
            return own
        if own > most:
            raise ValueError(f"block_size is {own}; this server drafts at most {most}.")
        return own

    def lane(self, settings: Settings) -> ServedLane:
        """Where such a request is decoded."""
        own = self.defaults
        return self.lanes[self.cascade.lane_of(dataclasses.replace(
            settings, block_size=own.block_size, max_block_size=own.max_block_size))]

    def prompts(self, asked: Asked) -> list[Prompt]:
        """What is asked for, read. Raises Refused."""
        if asked.messages:
            if self.cascade.tokenizer.chat is None:
                raise Refused(f"{self.name} has no chat template: use /v1/completions.", "messages")
            try:
                texts = [self.cascade.tokenizer.conversation(asked.messages)]
            except ValueError as error:
                raise Refused(str(error), "messages") from None
        else:
            texts = list(asked.prompts)
        field, limit = ("messages" if asked.messages else "prompt"), self.cascade.max_source_length
        for text in texts:
            if len(text) > limit * CHARACTERS_PER_TOKEN:
                raise Refused(f"{field} has {len(text)} characters; at most {limit} tokens are read.", field,
                              code="context_length_exceeded")
        if asked.messages:
            [row] = self.cascade.tokenizer.encode_batch(texts)
            rows, cut = [self.cascade.tokenizer.framed(row)], [False]
            own = readings(self.cascade.foreign, texts, limit, lambda texts,
                           own: texts if own.chat is None else [
                own.conversation(asked.messages)])
        else:
            rows, cut = self.cascade.encode(texts, truncate=True)
            own = self.cascade.own_readings(texts)
        if any(cut) or max(map(len, rows)) > limit:
            raise Refused(f"{field} has more tokens than the {limit} that are read: shorten it.", field,
                          code="context_length_exceeded")
        return [Prompt(*one) for one in zip(rows, own, strict=True)]

    def request(self, prompt: Prompt, settings: Settings, number: int) -> Request:
        """What the scheduler is asked for; number: which of a prompt's answers."""
        methods = self.lane(settings).lane.numbers(settings)
        return Request(prompt.tokens, settings, number, methods, settings.stop, prompt.own)
