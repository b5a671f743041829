"""What is written with an assistant, held against its law by chi-square: lossless in every way to draft and
to verify, and rules by prefix and place, because the assistant's law depends on where a draft began."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, VOCAB, decoded
from shapes import TINY_ASSISTANT, TINY_GEMMA4
from tiny_models import random_checkpoint
from toys import chi_square, placed_law, target, text_law

from speccascade_jax import checkpoints
from speccascade_jax.core.loop import generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Adaptive, Autoregressive, Speculative, hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.models.assistant import Assisted, AssistedModel

AT_ONCE = 20_000  # rows, each with caches of its own
DRAFTS = 2
ALPHA = 0.6
VERIFIER = dataclasses.replace(
    TINY_GEMMA4,
    vocab_size=VOCAB,
    d_model=16,
    d_ff=16,
    d_kv=4,
    d_kv_global=8,
    num_heads=2,
    num_layers=4,
    per_layer_width=3,
    window=3,
    pad_id=0,
    eos_id=EOS,
    bos_id=1,
)
PLAIN = dataclasses.replace(
    TINY_ASSISTANT,
    vocab_size=VOCAB,
    d_model=8,
    d_ff=8,
    d_kv=4,
    d_kv_global=8,
    num_heads=2,
    num_layers=2,
    num_readers=2,
    local=(1, 0),
    window=2,
    state_width=16,
    pad_id=0,
    eos_id=EOS,
    bos_id=1,
)
ORDERED = dataclasses.replace(PLAIN, num_centroids=2, active_centroids=1)
LARGE = dataclasses.replace(VERIFIER, num_readers=None, wide_readers=False, per_layer_width=None)
TEXTS = np.array(list(itertools.product(range(VOCAB), repeat=STEPS)), np.int32)


def folder_of(path, config, seed, scale=1.0):
    """A checkpoint whose embedding, which gives the logits, is multiplied."""
    made = random_checkpoint(config, seed)
    made.params["embedding"].set_value(scale * made.params["embedding"][...])
    checkpoints.save(path, made, "native")
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return {
        "plain": folder_of(path / "plain", PLAIN, 1, 0.5),
        "ordered": folder_of(path / "ordered", ORDERED, 1, 0.5),
        "verifier": folder_of(path / "verifier", VERIFIER, 2),
        "large": folder_of(path / "large", LARGE, 3),
    }


def loaded(folders, *names, **options):
    return checkpoints.load_all([folders[name] for name in names], **options)


def verifier_law(model, params):
    """(0, a prompt, a text's beginning) -> what the verifier writes next."""
    full = getattr(model, "member_of", model)
    full, params = (full.full, params["verifier"]) if full is not model else (full, params)
    forced, table = jax.jit(full.forced), {}
    for prompt in PROMPTS:
        source = np.tile(np.array(prompt, np.int32), (len(TEXTS), 1))
        logits = forced(params, source, np.full(len(TEXTS), len(prompt), np.int32), TEXTS)
        table |= by_context(prompt, 0, jax.nn.softmax(logits, axis=-1))
    return lambda context, place=None: next(iter(table[context].values()))


def drafter_law(network, params):
    """(the same, place in a round) -> what the assistant drafts next."""
    table = {}
    prefill, draft = jax.jit(network.prefill, static_argnums=3), jax.jit(partial(network.extend_member, 0))
    for prompt, begin in itertools.product(PROMPTS, range(STEPS)):
        read = np.concatenate([np.tile(prompt, (len(TEXTS), 1)), TEXTS], axis=1).astype(np.int32)
        length = len(prompt) + begin
        _, cache = prefill(params, read, np.full(len(TEXTS), length, np.int32), 12)
        logits, _ = draft(params, read[:, length - 1 : -1], cache)
        for context, laws in by_context(prompt, begin, jax.nn.softmax(logits, axis=-1)).items():
            table.setdefault(context, {}).update(laws)
    return lambda context, place: table[context][place]


def by_context(prompt, begin, laws):
    """(0, a prompt, a text's beginning) -> {tokens since `begin`: law}, of laws [texts, places, V]."""
    laws = np.asarray(laws, np.float64)
    return {
        (0, *prompt, *text[: begin + place].tolist()): {place: law / law.sum()}
        for text, rows in zip(TEXTS, laws, strict=True)
        for place, law in enumerate(rows)
    }


def written(sampler, params, rows, alphas):
    """Tokens [rows, STEPS] of the compiled loop, and the prompt number of each row."""
    parts = [
        decoded(sampler, params, min(rows, AT_ONCE), SamplingOptions(1.0), alphas, seed)
        for seed in range(-(-rows // AT_ONCE))
    ]
    return np.concatenate([result.tokens for result, _ in parts]), np.concatenate([n for _, n in parts])


def p_value(sampler, params, rows, alphas, law_of):
    """The smaller p-value of the two prompts, times two (Bonferroni)."""
    tokens, which = written(sampler, params, rows, alphas)
    return 2 * min(chi_square(tokens[which == n], law_of(prompt)) for n, prompt in enumerate(PROMPTS))


LOSSLESS = METHODS["speculative"]


def pair(drafter, verifier, **fields):
    return Speculative(Autoregressive(drafter), verifier, LOSSLESS, DRAFTS, **fields)


WAYS = {  # the models, what is made of them, and how they are loaded
    "token by token": (("plain", "verifier"), pair, {}),
    "as a block": (("ordered", "verifier"), partial(pair, verification=VERIFICATIONS["block"]), {}),
    "adaptive": (("ordered", "verifier"), lambda a, v: Adaptive(Autoregressive(a), v, LOSSLESS, 3), {}),
    "in int8": (("plain", "verifier"), pair, {"dtype": "int8", "decoding": True}),
    "hierarchy": (
        ("plain", "verifier", "large"),
        lambda *models: hierarchy(models, [LOSSLESS] * 2, [DRAFTS, 3]),
        {},
    ),
}


def made(folders, way, kind=None):
    """A sampler, its parameters and the models; of another `kind` of network, where one is planted."""
    names, sampler_of, options = WAYS[way]
    entries = loaded(folders, *names, **options)
    models = [checkpoint.model for checkpoint in entries]
    if kind is not None:
        models[:2] = kind(**vars(models[0].member_of)).members
    params = entries[0].params if len(entries) == 2 else (entries[0].params, entries[2].params)
    return sampler_of(*models), params, (entries[-1].model, entries[-1].params)


class Keeping(AssistedModel):
    """What the verifier has read of rejected tokens is kept."""

    def roll_back(self, cache, length):
        return super().roll_back(cache, length)._replace(verifier=cache.verifier)


class Advancing(Assisted):
    """The assistant's position advances with the draft."""

    def draft(self, tokens, cache):
        length, read = cache.verifier.length, cache.verifier._replace(length=cache.drafted)
        logits, cache = super().draft(tokens, cache._replace(verifier=read))
        return logits, cache._replace(verifier=cache.verifier._replace(length=length))


class AdvancingModel(AssistedModel):
    def network(self, rngs):
        return Advancing(self.config, dtype=jnp.float32, remat=False, stacked=False, rngs=rngs)


def lossless_p_value(folders, way, rows, kind=None):
    """p_value() of what should follow the law of the largest model."""
    sampler, params, largest = made(folders, way, kind)
    law = verifier_law(*largest)

    def law_of(prompt):
        return text_law([law], [], [], prompt, steps=STEPS, eos=EOS)

    return p_value(sampler, params, rows, [0.0] * sampler.level, law_of)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_text_follows_the_verifiers_law(way, folders, rows):
    assert lossless_p_value(folders, way, rows) > FAIL_BELOW


@pytest.mark.full
def test_a_verifier_that_keeps_rejected_tokens_is_noticed(folders):
    assert lossless_p_value(folders, "token by token", AT_ONCE, Keeping) < FAIL_BELOW


@pytest.mark.full
def test_a_rule_follows_its_law_by_prefix_and_place(folders, rows):
    """Then with an assistant that drafts from the wrong position."""
    rule = "token_v3"
    drafter, verifier = loaded(folders, "plain", "verifier")
    network, params = drafter.model.member_of, drafter.params
    laws = drafter_law(network, params), verifier_law(verifier.model, params)
    at = [lambda *given: target(rule, *given, ALPHA, False)] * (DRAFTS + 1)

    def law_of(prompt):
        return placed_law(laws, at, prompt, steps=STEPS, eos=EOS)

    def probability(network, rows):
        drafter, verifier = network.members
        sampler = Speculative(Autoregressive(drafter), verifier, METHODS[rule], DRAFTS)
        return p_value(sampler, params, rows, [ALPHA], law_of)

    assert probability(network, rows) > FAIL_BELOW
    assert probability(AdvancingModel(**vars(network)), AT_ONCE) < FAIL_BELOW


@pytest.mark.full
def test_rows_of_a_hierarchy_depend_on_nothing_but_themselves(folders):
    """An assistant, its verifier, and a model that verifies both."""
    sampler, params, _ = made(folders, "hierarchy")
    lengths, inputs = np.array([5, 2, 1]), np.random.default_rng(0).integers(0, 3, (3, 5)).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)

    def texts(rows):
        return generate(
            sampler,
            params,
            keys[rows],
            inputs[rows],
            lengths[rows],
            SamplingOptions(1.0),
            jnp.zeros(2),
            max_new_tokens=16,
            eos_id=-1,
        ).tokens

    together = texts(np.arange(3))
    for row in range(3):
        np.testing.assert_array_equal(texts(np.array([row]))[0], together[row])
    assert len(np.unique(together)) > 2
