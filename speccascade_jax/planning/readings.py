"""Measures the acceptances between the models of a cascade on the verifier's texts, and stores them in a
file. A plan for another machine needs that file instead of the weights.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int

from speccascade_jax.checkpoints.files import JSON_BYTES, parse_json, read
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.nests import network_of
from speccascade_jax.core.protocols import MASK, UNSEEN, Prefix
from speccascade_jax.core.transforms import TRUNCATIONS, SamplingOptions, token_probs
from speccascade_jax.core.verification import Verification
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.parallel import fetched, whole_on
from speccascade_jax.planning.runs import Runs, windows
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import pad
from speccascade_jax.vocabularies.joining import inputs_of

Array = jax.Array
KIND = "speccascade_jax acceptance"


def options_of(settings: Settings) -> SamplingOptions:
    return SamplingOptions(settings.temperature, **{name: getattr(settings, name) for name in TRUNCATIONS})


class Reading(NamedTuple):
    """Every model's probabilities on texts written by the largest model."""

    acceptance: Float[np.ndarray, "M M"]
    """[j, i]: the probability that model i accepts a token drafted by model j < i: the mean of sum_v
    min(p_j(v), p_i(v)) over the positions of the texts. If the distributions of model j's drafts depend on
    where a draft began, it is that of a draft's first token."""
    probs: Float[np.ndarray, "M T L"]  # each model's probabilities of each text's tokens; 1 after the end
    lengths: Int[np.ndarray, " T"]
    drafts: Mapping[int, Float[np.ndarray, "S T L N"]] = {}
    """For each model whose draft distributions depend on where a draft began: [n - 1, t, s, j] is the
    probability of the (s + j)-th token of text t in a draft of n tokens that begins after s tokens. S is as
    in Runs."""

    def runs(self, drafter: int, verification: Verification, longest: int) -> Runs:
        """The numbers of accepted tokens in a model's drafts of up to `longest` tokens."""
        q, p = self.probs[drafter], self.probs[-1]
        if drafter in self.drafts:
            q, p = self.drafts[drafter][..., :longest], windows(p, longest)
        ratios = np.where(p > 0, q / np.where(p > 0, p, 1), q > 0)
        if drafter in self.drafts:
            return Runs.of_drafts(ratios, self.lengths, verification)
        return Runs.of(ratios, self.lengths, verification, longest)

    def save(self, path: str, names: Sequence[str], settings: Settings) -> None:
        """Writes a JSON file for load(). `names` are the models' names, the smallest first."""
        texts = [self.probs[:, t, :length].round(7).tolist() for t, length in enumerate(self.lengths)]
        content = {
            "kind": KIND,
            "names": list(names),
            "temperature": settings.temperature,
            "truncations": {name: getattr(settings, name) for name in TRUNCATIONS},
            "acceptance": self.acceptance.round(7).tolist(),
            "probs": texts,
        }
        write_whole(path, json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str, names: Sequence[str], settings: Settings) -> "Reading":
        """Reads a file that save() wrote for these models at these settings. Raises FieldError for any other
        file."""

        def refused(remedy: str, what: str) -> FieldError:
            return FieldError("acceptance_from", path, remedy, f"{path} {what}")

        try:
            content = parse_json(path, read(Path(path), JSON_BYTES))
        except ValueError as error:
            raise refused("give a file that plan.py --acceptance-to wrote.", f"({error})") from None
        if content.get("kind") != KIND:
            raise refused("give a file that plan.py --acceptance-to wrote.", "holds something else")
        if content.get("names") != list(names):
            raise refused(f"measure {', '.join(names)}.", f"is about the models {content.get('names')}")
        truncations = {name: getattr(settings, name) for name in TRUNCATIONS}
        if (content.get("temperature"), content.get("truncations")) != (settings.temperature, truncations):
            raise refused(
                "give the same --temperature and truncations, or measure again.",
                f"was measured at temperature {content.get('temperature')} and other truncations",
            )
        try:
            acceptance = np.array(content["acceptance"], np.float64)
            texts = [np.array(text, np.float64) for text in content["probs"]]
            lengths = np.array([text.shape[1] for text in texts])
            probs = np.ones((len(names), len(texts), lengths.max()))
            for t, text in enumerate(texts):
                probs[:, t, : lengths[t]] = text
            valid = acceptance.shape == (len(names),) * 2 and lengths.min() > 0
            valid = valid and all(((x >= 0) & (x <= 1)).all() for x in (acceptance, probs))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError):
            valid = False
        if not valid:
            raise refused("measure again with plan.py --acceptance-to.", "is damaged")
        return cls(acceptance, probs, lengths)


def reading(cascade: Cascade, outputs: Sequence[Output], settings: Settings, longest: int) -> Reading:
    """Computes every model's probabilities on `outputs`. A model whose distributions depend on where a draft
    began is evaluated in drafts of up to `longest` tokens. Raises FieldError if all outputs are empty."""
    kept = [output for output in outputs if output.tokens]
    if not kept:
        raise FieldError(
            "outputs",
            list(outputs),
            "give inputs that are not blank.",
            "there is no text to compare the models on",
        )
    options = options_of(settings)
    size = max(len(output.tokens) for output in kept)
    rows, _ = cascade.encode([output.source for output in kept], truncate=True)
    readings = cascade.foreign_readings([output.source for output in kept])
    needed = [model.needs(len(ids)) for reading in readings for model, ids in reading.items()]
    width = cascade.bucket(max([*map(len, rows), *needed]))
    models: tuple[Any, ...] = cascade.models

    def read_text(params: Any, inputs: Any, length: Any, tokens: Any, count: Any) -> Any:
        laws, drafts = [], {}
        for number, (model, weights, source) in enumerate(zip(models, params, inputs, strict=True)):
            network = network_of(model)
            if by_place(model):
                law, drafts[number] = drafted_along(
                    model, weights, (source, length), tokens, options, longest
                )
                laws.append(law)
                continue
            if not getattr(network, "by_prefix", True):  # its distribution depends on the verifier's features
                logits = network.forced_members(weights, source, length, tokens)[model.number]
            else:
                prefix, cache = model.prefill(weights, source, length, width + size + 1)
                read = jnp.concatenate([last_of(prefix), tokens[:, :-1]], axis=1)
                logits, _ = model.extend(weights, read, cache)
            laws.append(token_probs(logits, options))
        inside = jnp.arange(size) < count[:, None]
        overlaps = [[jnp.sum(jnp.minimum(q, p).sum(axis=-1) * inside) for p in laws] for q in laws]
        probs = jnp.take_along_axis(jnp.stack(laws), tokens[None, ..., None], axis=-1)[..., 0]
        ahead = jnp.arange(size)[:, None] + jnp.arange(longest) < count
        return (
            jnp.array(overlaps),
            jnp.where(inside, probs, 1.0)[:, 0],
            {number: jnp.where(ahead, of_text, 1.0) for number, of_text in drafts.items()},
        )

    program, total, probs = jax.jit(read_text), np.zeros((len(models),) * 2), []
    drafts: dict[int, list[np.ndarray]] = {}
    for row, foreign, output in zip(rows, readings, kept, strict=True):
        tokens, length = pad([row], width, cascade.tokenizer.pad_id)
        inputs = tuple(inputs_of(model, tokens, [foreign]) for model in models)
        tokens, count = pad([output.tokens], size, cascade.tokenizer.pad_id)
        text = whole_on(cascade.mesh, (inputs, length, tokens, count))
        overlaps, of_text, by_model = fetched(program(cascade.params, *text))
        total += overlaps
        probs.append(of_text)
        for number, drafted in by_model.items():
            drafts.setdefault(number, []).append(drafted)
    lengths = np.array([len(output.tokens) for output in kept])
    return Reading(
        np.clip(total / lengths.sum(), 0, 1),
        np.stack(probs, axis=1),
        lengths,
        {number: np.stack(drafted, axis=1) for number, drafted in drafts.items()},
    )


def by_place(model: Any) -> bool:
    """Whether a model's distributions depend on where a draft began, and on its verifier's cache there."""
    return bool(getattr(network_of(model), "by_place", False)) and model.number == 0


def last_of(prefix: Prefix) -> Int[Array, "B 1"]:
    return jnp.take_along_axis(prefix.tokens, prefix.length[:, None] - 1, axis=1)


def drafted_along(
    model: Any,
    params: Any,
    source: tuple[Any, Any],
    tokens: Int[Array, "1 L"],
    options: SamplingOptions,
    longest: int,
) -> tuple[Float[Array, "1 L V"], Float[Array, "S L N"]]:
    """For a text `tokens` after `source` (inputs, input_length): the distribution of the first token of a
    draft at each position, and the probabilities of the text's tokens in drafts of N = `longest` tokens,
    indexed like Reading.drafts.

    The verifier reads the whole text once; rolling its cache back to a position gives the state in which a
    round begins there.
    """
    network, size = model.member_of, tokens.shape[1]
    sizes = jnp.arange(1, longest + 1) if model.drafts_at_once else jnp.array([longest])
    prefix, cache = model.prefill(params, *source, source[0].shape[1] + size + longest + 2)
    text = jnp.concatenate([last_of(prefix), tokens], axis=1)[0]
    _, whole = network.members[-1].extend(params, text[None, :-1], cache)
    text = jnp.pad(text, (0, longest))

    def after(place: Int[Array, ""]) -> tuple[Array, Array]:
        shorter = network.roll_back(whole, cache.length + place)
        ahead = lax.dynamic_slice_in_dim(text, place, longest + 1)

        def of_size(count: Int[Array, ""]) -> tuple[Array, Array]:
            number = jnp.arange(longest + 1)
            masked = jnp.where(number == 0, ahead, jnp.where(number <= count, MASK, UNSEEN))
            read = masked if model.drafts_at_once else ahead[:-1]
            logits, _ = model.extend(params, read[None], shorter)
            laws = token_probs(logits[:, :longest], options)[0]
            return laws[0], jnp.take_along_axis(laws, ahead[1:, None], axis=1)[:, 0]

        first, of_text = lax.map(of_size, sizes)
        return first[-1], of_text

    first, of_text = lax.map(after, jnp.arange(size))
    return first[None], jnp.swapaxes(of_text, 0, 1)
