"""Values the verifier's token where the models disagree, by the scores of texts continued from either
token."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speccascade_jax.config import LearnedRuleConfig
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import Cache, LanguageModel, Params, Prefix
from speccascade_jax.core.rules import METHODS, Scores, total_variation
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions, token_probs
from speccascade_jax.inference.progress import track
from speccascade_jax.inference.text import Cascade
from speccascade_jax.learned.rules import FEATURES, features
from speccascade_jax.tokenizers.tokenizer import text_of
from speccascade_jax.training.data import Batch, pad

Array = jax.Array
Replaced = Callable[[str, Sequence[str], Sequence[Sequence[str]], Sequence[int], Sequence[str]], np.ndarray]
"""evaluation.quality.replaced: how much a metric changes if one text is replaced by another."""
ROWS = 16  # texts scored at once
GOING_ON = 64  # texts written at once
BUCKET = 16  # sources and beginnings are padded to multiples of this many tokens
ALPHA = 0.1  # of `opt`, which writes the texts and their continuations
BLOCK = 5
LEAST = 1e-3  # least probability of a disagreement


@dataclasses.dataclass(frozen=True)
class Continued:
    """Wraps a model so that it continues given beginnings. Its inputs [B, width + 2 + T] hold a source
    [width], its length, the beginning's length, and the beginning [T]."""

    model: LanguageModel
    width: int

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def prefill(
        self, params: Params, inputs: Array, input_length: Array, max_length: int
    ) -> tuple[Prefix, Cache]:
        source, (length, begun), tokens = (
            inputs[:, : self.width],
            inputs[:, self.width : self.width + 2].T,
            inputs[:, self.width + 2 :],
        )
        prefix, cache = self.model.prefill(params, source, length, max_length + tokens.shape[1])
        rows, size = jnp.arange(len(inputs))[:, None], tokens.shape[1]
        whole = jnp.pad(prefix.tokens, ((0, 0), (0, size)))
        whole = whole.at[rows, prefix.length[:, None] + jnp.arange(size)].set(tokens)
        unread = prefix.length[:, None] - 1 + jnp.arange(size)
        cache = self.model.extend(params, whole[rows, unread], cache)[1]
        return Prefix(whole, prefix.length + begun), self.model.roll_back(cache, prefix.length - 1 + begun)

    def extend(self, params: Params, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        return self.model.extend(params, tokens, cache)

    def roll_back(self, cache: Cache, length: Array) -> Cache:
        return self.model.roll_back(cache, length)


def logits_of(model: LanguageModel, params: Params, batch: Batch) -> Array:
    """The model's logits [B, T, V] for each of the texts' tokens, given those before it."""
    length = batch.source.shape[1] + batch.target.shape[1] + 1
    source, source_length = jnp.asarray(batch.source), jnp.asarray(batch.source_length)
    prefix, cache = model.prefill(params, source, source_length, length)
    last = jnp.take_along_axis(prefix.tokens, jnp.maximum(prefix.length - 1, 0)[:, None], axis=1)
    tokens = jnp.concatenate([last, batch.target[:, :-1]], axis=1)
    return model.extend(params, tokens, cache)[0]


class Place(NamedTuple):
    """A position in a text where the two models disagree."""

    text: int
    features: Any  # [F]
    begun: list[int]  # the text before it
    tokens: list[int]  # the drafter's and the verifier's token


def disagreements(
    cascade: Cascade,
    rows: Sequence[list[int]],
    texts: Sequence[list[int]],
    options: SamplingOptions,
    count: int,
    seed: int,
) -> list[Place]:
    """Draws `count` places in each text with probability proportional to TV(p~, q~), the probability that the
    models disagree there, and a token from each model."""

    def look(params: tuple[Params, Params], batch: Batch, key: Array) -> tuple[Array, ...]:
        q, p = (
            logits_of(model, weights, batch)
            for model, weights in zip((cascade.drafter, cascade.verifier), params, strict=True)
        )
        s = Scores(
            jax.nn.softmax(q),
            jax.nn.softmax(p),
            token_probs(q, options),
            token_probs(p, options),
            jnp.asarray(options.temperature <= 0),
        )
        chance = total_variation(s.p_sampled, s.q_sampled)[..., 0]
        real = jnp.arange(chance.shape[1]) < batch.target_length[:, None]
        keys = jax.random.split(key, 3)
        more = s.p_sampled - s.q_sampled
        drawn = [
            jax.random.categorical(key, jnp.log(jnp.maximum(left, 0.0)))
            for key, left in zip(keys, (-more, more), strict=False)
        ]
        weight = jnp.where(real & (chance > LEAST), jnp.log(chance), -jnp.inf)
        noisy = weight + jax.random.gumbel(keys[2], weight.shape)
        order = jax.lax.top_k(noisy, min(count, weight.shape[1]))[1]
        return features(s), jnp.stack(drawn, axis=-1), weight > -jnp.inf, order

    seen, look = list[Place](), jax.jit(look)
    source_width, width = max(map(len, rows)), max(map(len, texts))
    for begin in range(0, len(rows), ROWS):
        end = min(begin + ROWS, len(rows))
        blank = [[0]] * (begin + ROWS - end)
        batch = Batch(
            *pad([*rows[begin:end], *blank], source_width, 0), *pad([*texts[begin:end], *blank], width, 0)
        )
        key = jax.random.fold_in(jax.random.key(seed), begin)
        known, drawn, counts, order = jax.device_get(
            look((cascade.params[0], cascade.params[-1]), batch, key)
        )
        seen += [
            Place(begin + n, known[n, at], texts[begin + n][:at], drawn[n, at].tolist())
            for n in range(end - begin)
            for at in order[n]
            if counts[n, at]
        ]
    return seen


def continued(
    cascade: Cascade, rows: Sequence[list[int]], begun: Sequence[tuple[int, list[int]]]
) -> list[str]:
    """Completes each beginning (index of its source, tokens) greedily with `opt`, and returns the texts up to
    the cascade's stop sequences."""
    keys = jax.random.split(jax.random.key(0), GOING_ON)
    texts = [tokens for _, tokens in begun]
    alike: dict[tuple[int, int], list[int]] = {}
    for n, (text, tokens) in enumerate(begun):
        if tokens[-1] != cascade.tokenizer.eos_id:
            source_width, width = (-(-len(x) // BUCKET) * BUCKET for x in (rows[text], tokens))
            alike.setdefault((source_width, width), []).append(n)
    parts = [
        (widths, numbers[at : at + GOING_ON])
        for widths, numbers in alike.items()
        for at in range(0, len(numbers), GOING_ON)
    ]
    for (source_width, width), chosen in track(parts, "continuing texts"):
        filled = chosen + chosen[:1] * (GOING_ON - len(chosen))
        source, length = pad([rows[begun[n][0]] for n in filled], source_width, 0)
        beginning, size = pad([texts[n] for n in filled], width, 0)
        inputs = np.concatenate([source, length[:, None], size[:, None], beginning], axis=1)
        drafter, verifier = (Continued(model, source_width) for model in (cascade.drafter, cascade.verifier))
        decoded = jax.device_get(
            generate(
                Speculative(Autoregressive(drafter), verifier, METHODS["opt"], BLOCK),
                (cascade.params[0], cascade.params[-1]),
                keys,
                inputs,
                np.full(GOING_ON, inputs.shape[1]),
                SamplingOptions(0.0),
                jnp.full(1, ALPHA),
                max_new_tokens=cascade.max_new_tokens,
                eos_id=cascade.tokenizer.eos_id,
            )
        )
        for n, tokens, many in zip(chosen, decoded.tokens, decoded.length, strict=False):
            texts[n] = [*texts[n], *tokens[:many].tolist()][: cascade.max_new_tokens]
    return [text_of(cascade.tokenizer, tokens, cascade.stop) for tokens in texts]


class Tried(NamedTuple):
    """The results for every place where both tokens were tried, [N, ...]."""

    features: Any  # [N, F]
    advantages: Any  # what the verifier's token adds to the metric of all texts, times their number
    texts: Any  # index of its text


def tried(
    cascade: Cascade,
    metric: str,
    examples: Sequence[tuple[str, list[str]]],
    sampling: Iterable[SamplingOptions],
    config: LearnedRuleConfig,
    replaced: Replaced,
) -> Tried:
    """Tries both models' tokens at places in texts that the cascade writes, with each of these sampling
    options.

    `opt` completes both texts, so that preferring the better token is a step of policy iteration from `opt`.
    The metric of a single text says little (BLEU of a sentence without a match of four tokens is 0), so a
    token is valued by the change of the metric of all texts when its completion replaces one of them.
    """
    sources, references = zip(*examples, strict=True)
    rows, _ = cascade.encode(sources, truncate=True)
    replaced(metric, sources, references, [], [])  # raises for an unknown metric before texts are written
    tries, ways = list[Tried](), list(sampling)
    for number, options in enumerate(ways):
        texts = cascade.generate(
            sources,
            method="opt",
            alpha=ALPHA,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=config.seed,
            batch_size=GOING_ON,
            truncate=True,
        )
        written = list(track(texts, f"writing texts, way {number + 1} of {len(ways)}", len(sources)))
        places = disagreements(
            cascade, rows, [o.tokens for o in written], options, config.places, config.seed + number
        )
        ended = continued(
            cascade, rows, [(place.text, [*place.begun, token]) for place in places for token in place.tokens]
        )
        numbers = [place.text for place in places for _ in place.tokens]
        worth = replaced(metric, [o.text for o in written], references, numbers, ended).reshape(-1, 2)
        tries.append(
            Tried(
                np.array([place.features for place in places]).reshape(len(places), len(FEATURES)),
                len(sources) * (worth[:, 1] - worth[:, 0]),
                np.array([place.text for place in places], int),
            )
        )
    return Tried._make(np.concatenate(columns) for columns in zip(*tries, strict=True))
