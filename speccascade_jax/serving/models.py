"""Served models: a config's cascade, the methods compiled for it, and how requests are decoded."""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import ability_of
from speccascade_jax.core.rules import METHODS, TRAINED
from speccascade_jax.core.samplers.named import SAMPLERS
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.blocks import sizes_up_to
from speccascade_jax.scheduling.chunks import any_continues
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.serving.engine import ServedLane
from speccascade_jax.serving.protocol import ALONE, UNFINISHED, ParsedRequest, Refused
from speccascade_jax.settings import LOAD, NAMED, Choice, Settings, resolved
from speccascade_jax.tokenizers.tokenizer import Tokenizer
from speccascade_jax.vocabularies.joining import readings
from speccascade_jax.vocabularies.translated import Translated

CHARACTERS_PER_TOKEN = 64  # longer prompts are refused before they are tokenized
LARGEST_BOUND = 1024  # the largest static bound of a truncation, such as top_k
SEEDS = 2**31
SERVABLE = (*(name for name, rule in METHODS.items() if rule.by_prefix), *SAMPLERS)
"""The methods that can be served with any models. Their distributions depend only on the prefix, so they have
log probabilities."""


class Prompt(NamedTuple):
    """A prompt in the verifier's tokens ([] if blank), and in those of each model with another vocabulary."""

    tokens: list[int]
    foreign: dict[Translated, list[int]]


class Decoding(NamedTuple):
    """How and where an accepted request is decoded."""

    settings: Settings
    prompts: list[Prompt]
    lane: ServedLane
    requests: list[Request | None]  # one per choice; None for a blank prompt
    seeded: bool  # whether the request has a seed

    @property
    def block_size(self) -> dict[str, int | str]:
        """The block size that an answer reports if it can differ between rounds."""
        if self.lane.scheduler.blocks is None:
            return {}
        return {"block_size": self.settings.block_sizes(1)[0] if self.seeded else LOAD}


class ServedModel:
    """A config and its name. Those of `methods` that can verify its drafts are compiled, and requests choose
    among them. Models that can do so read prompts in chunks of `chunk` tokens between rounds.

    `by_load`: rounds draft up to the config's block size, and fewer tokens if that is faster
    (--block-size=load). Raises ValueError for a method that cannot be served, models that do not support
    `by_load`, and an unreadable chat template.
    """

    def __init__(
        self,
        name: str,
        config: DecodeConfig,
        cascade: Cascade,
        methods: Sequence[str],
        rows: int,
        chunk: int = 128,
        by_load: bool = False,
    ):
        self.name, self.cascade, self.created = name, cascade, int(time.time())
        self.defaults: Settings = config.settings
        self.examples = config.examples
        self.bounds = {
            name: min(LARGEST_BOUND, cascade.verifier.vocab_size)
            for name, truncation in TRUNCATIONS.items()
            if truncation.bounded
        }
        chats = [tokenizer.chat for tokenizer in (cascade.tokenizer, *cascade.foreign.values())]
        self.chats = chats[0] is not None
        if cascade.levels == 0:  # a single model decodes alone whatever its config says
            self.defaults, methods = self.defaults.by(**ALONE), ()
        cascade.check_model_free(resolved(self.defaults, cascade.named))
        methods = [name for name in methods if self._can_follow(name)]
        choices: dict[str, Choice | tuple[Choice, ...]] = {
            self.defaults.name: self.defaults.method,
            **{method: method for method in methods},
        }
        self.methods = tuple(choices)
        by_name = {name: self._compiled(choice) for name, choice in choices.items()}
        compiled = list(by_name.values())
        self.lanes: dict[Any, ServedLane] = {}
        lanes = cascade.lanes(compiled)
        if by_load:
            self._check_load([lane.plan.sampler for lane in lanes.values() if lane.methods])
        for key, lane in lanes.items():
            chunked = any_continues(lane.plan.sampler, lane.params)
            lane = lane._replace(
                plan=dataclasses.replace(
                    lane.plan,
                    ragged=bool(lane.methods),
                    block_sizes=sizes_up_to(lane.plan.sampler.width - 1) if by_load and lane.methods else (),
                    chunk=min(chunk, cascade.max_source_length) if chunked else 0,
                )
            )
            names = [called for called, settings in by_name.items() if cascade.lane_of(settings) == key]
            self.lanes[key] = ServedLane(
                name, cascade, lane, by_name[names[0]], rows, cascade.max_source_length, names
            )

    def _check_load(self, samplers: Sequence[Any]) -> None:
        """Raises FieldError if a sampler's rounds cannot differ in their block size."""
        if not samplers or not all(ability_of(sampler, "resizes") for sampler in samplers):
            raise FieldError(
                "block_size",
                LOAD,
                "give a number.",
                f"block_size is load, which takes one model that drafts token by token for one verifier; "
                f"those of {self.name} do not",
            )

    def _can_follow(self, method: str) -> bool:
        """Whether a method can verify the drafts of these models."""
        if NAMED.get(method) is None or method in TRAINED:  # checked or resolved later
            return True
        try:
            self.cascade.check_model_free(dataclasses.replace(self.defaults, method=method))
        except FieldError:
            return False
        return True

    def _compiled(self, method: Choice | tuple[Choice, ...]) -> Settings:
        """Settings that cover all options of this method's requests."""
        servable = (*SERVABLE, *self.cascade.named)
        for name in method.split("+") if isinstance(method, str) else ():
            if name not in servable:
                raise FieldError(
                    "methods", method, f"known: {', '.join(servable)}.", f"--methods: {name} cannot be served"
                )
        truncations: dict[str, Any] = {
            name: self.bounds.get(name, truncation.off) for name, truncation in TRUNCATIONS.items()
        }
        known = {**NAMED, **self.cascade.named}
        spans = dataclasses.replace(self.defaults, alpha_after={"\n": 0.0}).by(method, known).alpha_after
        settings = dataclasses.replace(
            self.defaults, method=method, stop=("\n",), alpha_after=spans, **truncations
        )
        settings.of_levels("method", max(self.cascade.levels, 1))
        return resolved(settings, self.cascade.named)

    async def decoding(self, request: ParsedRequest) -> Decoding:
        """The settings and lane of a request. Raises FieldError or Refused if it cannot be decoded."""
        settings, seeded = self._settings(request), "seed" in request.changes
        lane, methods = self._lane(settings, request)
        if request.logprobs is not None and not lane.states_law(methods):
            raise FieldError(
                "logprobs",
                request.logprobs,
                "leave it out, or use a lossless method.",
                f"outputs of {settings.name} with these models have no distribution given the prefix alone",
            )
        # Chat templates are programs, which may be slow.
        prompts = (
            await asyncio.to_thread(self._prompts, request) if request.messages else (self._prompts(request))
        )
        return Decoding(
            settings,
            prompts,
            lane,
            [
                Request(
                    prompt.tokens,
                    settings,
                    number,
                    methods,
                    settings.stop,
                    prompt.foreign,
                    self.cascade.spans(settings),
                    keeps_size=seeded,
                )
                if prompt.tokens
                else None
                for prompt in prompts
                for number in range(request.n)
            ],
            seeded,
        )

    def _settings(self, request: ParsedRequest) -> Settings:
        """The server's settings with the request's changes, and a new seed if it samples without one."""
        changes, names = request.changes, request.names
        for setting, limit in {"max_new_tokens": self.cascade.max_new_tokens, **self.bounds}.items():
            if (changes.get(setting) or 0) > limit:
                raise FieldError(names[setting], changes[setting], f"this server takes at most {limit}.")
        if any(UNFINISHED in text for text in changes.get("stop", ())):
            raise FieldError(
                "stop",
                changes["stop"],
                "leave it out.",
                "stop holds U+FFFD, which stands for an unfinished character",
            )
        defaults = self.defaults
        if "method" in changes:  # another method may not use alpha, or verify nothing
            defaults = defaults.by(changes["method"], {**NAMED, **self.cascade.named})
        try:
            settings = self.cascade.checked(defaults, changes)
        except FieldError as error:
            name = names.get(error.field, error.field)
            raise (error if name == error.field else FieldError(name, error.value, error.remedy)) from None
        except ValueError as error:
            raise Refused(error) from None
        self._check_blocks(settings)
        method = dataclasses.replace(self.defaults, **changes).name
        if method not in self.methods:
            raise FieldError(
                "method", method, f"known: {', '.join(self.methods)}.", f"method {method} is not served here"
            )
        if settings.temperature > 0 and "seed" not in changes:
            return dataclasses.replace(settings, seed=secrets.randbelow(SEEDS))
        return settings

    def _check_blocks(self, settings: Settings) -> None:
        """Raises FieldError for a block size above the server's, or different from it if it is fixed."""
        server, size = self.defaults, settings.block_size
        fixed = server.adaptive or self.cascade.levels > 1 or not isinstance(size, int)
        if fixed and size != server.block_size:
            raise FieldError("block_size", size, f"this server's is {server.block_size}: leave it out.")
        for name in ("block_size",) if not fixed else ("max_block_size",) if server.adaptive else ():
            if getattr(settings, name) > getattr(server, name):
                raise FieldError(
                    name, getattr(settings, name), f"this server drafts at most {getattr(server, name)}."
                )

    def _lane(self, settings: Settings, request: ParsedRequest) -> tuple[ServedLane, tuple[int, ...]]:
        """A request's lane, and the indices of its methods there. Raises FieldError if the request changes a
        setting that is fixed when a lane is compiled."""
        place = self.place(settings)
        if place is not None:
            return place
        for setting, value in request.changes.items():
            default = getattr(self.defaults, setting)
            settings = dataclasses.replace(settings, **{setting: default})
            if self.place(settings) is not None:
                raise FieldError(
                    request.names.get(setting, setting), value, f"this server's is {default}: leave it out."
                )
        raise Refused("this server has no compiled program for such a request.")

    def place(self, settings: Settings) -> tuple[ServedLane, tuple[int, ...]] | None:
        """The lane that decodes such settings, and the indices of their methods there; None if no lane
        does."""
        lane = self.lanes.get(
            self.cascade.lane_of(
                dataclasses.replace(
                    settings, block_size=self.defaults.block_size, max_block_size=self.defaults.max_block_size
                )
            )
        )
        try:
            return None if lane is None else (lane, lane.lane.numbers(settings))
        except ValueError:  # a rule with a compiled-in value
            return None

    def _prompts(self, request: ParsedRequest) -> list[Prompt]:
        """Tokenizes a request's texts. Raises FieldError, or Refused for a text that is too long."""
        cascade, field, limit = self.cascade, request.text_field, self.cascade.max_source_length
        texts = [self._conversation(request)] if request.messages else [*request.prompts]
        for text in texts:
            if len(text) > limit * CHARACTERS_PER_TOKEN:
                raise too_long(field, f"{len(text)} characters", limit)
        if request.messages:
            [row] = cascade.tokenizer.encode_batch(texts)
            rows, cut = [cascade.tokenizer.framed(row)], [False]
            foreign = readings(
                cascade.foreign,
                texts,
                limit,
                lambda texts, tokenizer: texts if tokenizer.chat is None else [rendered(tokenizer, request)],
            )
        else:
            rows, cut = cascade.encode(texts, truncate=True)
            foreign = cascade.foreign_readings(texts)
        if any(cut) or max(map(len, rows)) > limit:
            raise too_long(field, f"more tokens than {limit}", limit)
        return [Prompt(*pair) for pair in zip(rows, foreign, strict=True)]

    def _conversation(self, request: ParsedRequest) -> str:
        if not self.chats:
            raise FieldError(
                "messages", request.messages, "use /v1/completions.", f"{self.name} has no chat template"
            )
        return rendered(self.cascade.tokenizer, request)


def rendered(tokenizer: Tokenizer, request: ParsedRequest) -> str:
    """Renders a conversation with a tokenizer's template. Raises FieldError if the template refuses it."""
    try:
        return tokenizer.conversation(request.messages)
    except ValueError as error:
        raise FieldError("messages", request.messages, "change them.", str(error).rstrip(".")) from None


def too_long(field: str, size: str, limit: int) -> Refused:
    return Refused(
        FieldError(field, size, f"at most {limit} tokens are read: shorten it.", f"{field} has {size}"),
        code="context_length_exceeded",
    )
