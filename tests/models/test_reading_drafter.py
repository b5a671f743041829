"""A drafter that reads its verifier's states, written in this file alone: nothing in the package knows it.

`Reader` has two members. The verifier leaves each token's state in their cache; the drafter guesses from the
last state and from the embeddings of the tokens since. `params_from` makes the parameters of both from the
verifier's.
"""

import dataclasses
import json
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from corpora import SENTENCES

from speccascade_jax.commands import decode
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.nests import insert_rows
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.cache import T5Cache, write
from speccascade_jax.models.members import members
from speccascade_jax.models.t5 import T5Model


class ReaderCache(NamedTuple):
    verifier: T5Cache
    states: jax.Array  # [B, L, D], the verifier's
    lengths: jax.Array  # [B, 2], how many tokens the drafter and the verifier have read

    @property
    def length(self):
        return jnp.max(self.lengths, axis=1)


@dataclasses.dataclass(frozen=True)
class Reader:
    """The verifier, and a drafter that consists of one matrix [D, D]."""

    verifier: T5Model
    names: ClassVar[tuple[str, ...]] = ("drafter", "verifier")

    @property
    def config(self):
        return self.verifier.config

    @property
    def vocab_size(self):
        return self.verifier.vocab_size

    @property
    def members(self):
        return members(self)

    def params_from(self, params_of):
        width = self.config.d_model
        mix = jax.random.normal(jax.random.key(0), (width, width)) / width
        return {"verifier": params_of(self.verifier), "mix": mix}

    def prefill(self, params, inputs, input_length, max_length):
        prefix, cache = self.verifier.prefill(params["verifier"], inputs, input_length, max_length)
        rows = inputs.shape[0]
        states = jnp.zeros((rows, max_length, self.config.d_model))
        return prefix, ReaderCache(cache, states, jnp.zeros((rows, 2), jnp.int32))

    def lengths(self, cache):
        return cache.lengths

    def extend(self, params, tokens, cache):
        return self.extend_member(1, params, tokens, cache)

    def extend_member(self, number, params, tokens, cache):
        network, count = self.verifier.merged(params["verifier"]), tokens.shape[1]
        if number == 0:
            position = cache.lengths[:, :1] + jnp.arange(count)
            place = jnp.minimum(position, cache.lengths[:, 1:]) - 1  # before the first token there is none
            states = jnp.take_along_axis(cache.states, jnp.maximum(place, 0)[..., None], axis=1)
            seen = jnp.where(place[..., None] >= 0, states, 0.0)
            logits = network.logits(seen + network._embed(tokens) @ params["mix"])
            return logits, cache._replace(lengths=cache.lengths.at[:, 0].add(count))
        start = cache.lengths[:, 1]
        states, verifier = network.advance(tokens, cache.verifier._replace(length=start))
        cache = ReaderCache(
            verifier, write(cache.states, states, start), cache.lengths.at[:, 1].set(start + count)
        )
        return network.logits(states), cache

    def roll_back(self, cache, length):
        return cache._replace(lengths=jnp.minimum(cache.lengths, jnp.asarray(length)[:, None]))

    def insert(self, cache, fresh, slots, like_fresh):
        return ReaderCache(
            self.verifier.insert(cache.verifier, fresh.verifier, slots, like_fresh),
            *insert_rows(cache[1:], fresh[1:], slots, like_fresh),
        )


def reading(models: Any) -> Speculative:
    """What a config calls with the pair's models: the larger one drafts for itself."""
    drafter, verifier = Reader(models[-1]).members
    return Speculative(Autoregressive(drafter), verifier, METHODS["speculative"], block_size=3)


@pytest.fixture(scope="module")
def config(t5_pair):
    return DecodeConfig(
        drafter=str(t5_pair / "drafter"),
        verifier=str(t5_pair / "verifier"),
        samplers={"reading": reading},
        method="reading",
        max_source_length=32,
        max_new_tokens=24,
        dtype="float32",
        batch_size=2,
        examples=tuple(SENTENCES),
    )


@pytest.fixture(scope="module")
def cascade(config):
    return Cascade.from_config(config)


def test_it_writes_the_verifiers_texts(cascade, config):
    """At temperature 0, token by token, in batches whose rows are replaced."""
    expected = list(cascade.generate(SENTENCES, method="verifier", batch_size=2))
    outputs = list(cascade.generate(SENTENCES, config.settings, batch_size=2))
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    assert sum(o.counts["rounds"] for o in outputs) < sum(len(o.tokens) for o in outputs)  # some drafts stand
    assert {"draft", "correction"} <= {origin for o in outputs for origin in o.origin}


@pytest.mark.full
def test_what_it_drafts_follows_the_verifiers_states(cascade):
    """Without them other drafts stand."""

    @dataclasses.dataclass(frozen=True)
    class Blind(Reader):
        def extend_member(self, number, params, tokens, cache):
            if number == 0:
                cache = cache._replace(states=cache.states * 0)
            return super().extend_member(number, params, tokens, cache)

    def accepted(kind):
        drafter, verifier = kind(cascade.verifier).members
        sampler = Speculative(Autoregressive(drafter), verifier, METHODS["speculative"], block_size=3)
        return [o.counts["accepted"] for o in cascade.generate(SENTENCES, sampler=sampler)]

    assert accepted(Reader) != accepted(Blind)


def test_its_parameters_are_made_once(cascade, config):
    list(cascade.generate(SENTENCES[:1], config.settings, batch_size=2))
    programs = len(cascade.programs)
    _, params = cascade.sampler(cascade.checked(config.settings, {}))
    assert params["verifier"] is cascade.params[-1]
    list(cascade.generate(SENTENCES[:1], config.settings, batch_size=2))
    assert len(cascade.programs) == programs


def test_the_command_line_decodes_with_it(config, cascade, tmp_path):
    output = tmp_path / "texts.jsonl"
    decode.decode(decode.Arguments(config, output=str(output), summary=str(tmp_path / "summary.json")))
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert texts == [o.text for o in cascade.generate(SENTENCES, method="verifier")]
    assert json.loads((tmp_path / "summary.json").read_text())["acceptance_rate"] > 0
