"""How often the models of a cascade accept each other's tokens along the verifier's texts, and a file of it.

The file takes the place of the weights in a plan for another machine.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from speccascade_jax.checkpoints.files import JSON_BYTES, parse_json, read
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.nests import network_of
from speccascade_jax.core.transforms import TRUNCATIONS, SamplingOptions, token_probs
from speccascade_jax.core.verification import Verification
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.inference.text import Cascade, Output
from speccascade_jax.planning.runs import Runs
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import pad
from speccascade_jax.vocabularies.joining import inputs_of

Array = jax.Array
KIND = "speccascade_jax acceptance"


def options_of(settings: Settings) -> SamplingOptions:
    return SamplingOptions(settings.temperature, **{name: getattr(settings, name) for name in TRUNCATIONS})


class Reading(NamedTuple):
    """What all models say of texts of the largest."""

    acceptance: Float[np.ndarray, "M M"]
    """[j, i]: how probable it is that model i accepts a token that model j < i has drafted: the mean of
    sum_v min(p_j(v), p_i(v)) over the positions of the texts."""
    probs: Float[np.ndarray, "M T L"]  # of each text's tokens, by each model; 1 after the end
    lengths: Int[np.ndarray, " T"]

    def runs(self, drafter: int, verification: Verification, most: int) -> Runs:
        """How far a model's drafts of up to `most` tokens stand."""
        q, p = self.probs[drafter], self.probs[-1]
        ratios = np.where(p > 0, q / np.where(p > 0, p, 1), q > 0)
        return Runs.of(ratios, self.lengths, verification, most)

    def save(self, path: str, names: Sequence[str], settings: Settings) -> None:
        """Writes a JSON file for load(). `names` are the models', the smallest first."""
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
        """What save() has written of these models at these settings. Raises FieldError for anything else."""

        def refused(remedy: str, what: str) -> FieldError:
            return FieldError("acceptance_from", path, remedy, f"{path} {what}")

        try:
            content = parse_json(path, read(Path(path), JSON_BYTES))
        except ValueError as error:
            raise refused("give a file that plan.py --acceptance-to has written.", f"({error})") from None
        if content.get("kind") != KIND:
            raise refused("give a file that plan.py --acceptance-to has written.", "holds something else")
        if content.get("names") != list(names):
            raise refused(f"measure {', '.join(names)}.", f"is about the models {content.get('names')}")
        truncations = {name: getattr(settings, name) for name in TRUNCATIONS}
        if (content.get("temperature"), content.get("truncations")) != (settings.temperature, truncations):
            raise refused(
                "give the same --temperature and truncations, or measure anew.",
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
            raise refused("measure anew with plan.py --acceptance-to.", "is damaged")
        return cls(acceptance, probs, lengths)


def reading(cascade: Cascade, outputs: Sequence[Output], settings: Settings) -> Reading:
    """What the models say of `outputs`. Raises FieldError where these are empty."""
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

    def read_text(params: Any, inputs: Any, length: Any, tokens: Any, count: Any) -> tuple[Array, Array]:
        laws = []
        models: tuple[Any, ...] = cascade.models
        for model, weights, source in zip(models, params, inputs, strict=True):
            network = network_of(model)
            if getattr(network.config, "states", False):  # which a drafter reads where the verifier has been
                logits = network.forced_members(weights, source, length, tokens)[model.number]
            else:
                prefix, cache = model.prefill(weights, source, length, width + size + 1)
                last = jnp.take_along_axis(prefix.tokens, prefix.length[:, None] - 1, axis=1)
                logits, _ = model.extend(weights, jnp.concatenate([last, tokens[:, :-1]], axis=1), cache)
            laws.append(token_probs(logits, options))
        inside = jnp.arange(size) < count[:, None]
        overlaps = [[jnp.sum(jnp.minimum(q, p).sum(axis=-1) * inside) for p in laws] for q in laws]
        probs = jnp.take_along_axis(jnp.stack(laws), tokens[None, ..., None], axis=-1)[..., 0]
        return jnp.array(overlaps), jnp.where(inside, probs, 1.0)[:, 0]

    program, total, probs = jax.jit(read_text), np.zeros((len(cascade.models),) * 2), []
    for row, foreign, output in zip(rows, readings, kept, strict=True):
        tokens, length = pad([row], width, cascade.tokenizer.pad_id)
        inputs = tuple(inputs_of(model, tokens, [foreign]) for model in cascade.models)
        tokens, count = pad([output.tokens], size, cascade.tokenizer.pad_id)
        overlaps, of_text = program(cascade.params, inputs, length, tokens, count)
        total += np.asarray(overlaps)
        probs.append(np.asarray(of_text))
    lengths = np.array([len(output.tokens) for output in kept])
    return Reading(np.clip(total / lengths.sum(), 0, 1), np.stack(probs, axis=1), lengths)
