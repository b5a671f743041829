"""EAGLE-3 heads against the authors' numbers and a reference in numpy, their laws, and their folders."""

import dataclasses
import itertools
import json
import zlib
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_reference import NOWHERE, Reference
from flax import nnx
from joint_laws import FAIL_BELOW, oracle
from member_laws import check_full, check_rows
from safetensors.numpy import save_file
from shapes import DECODERS, EAGLE_VERIFIER, LENGTH, SOURCE, TARGET, TINY_EAGLE
from tiny_models import random_checkpoint
from toys import chi_square, target

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import eagle as spelling
from speccascade_jax.checkpoints.families import MODEL_FAMILIES
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import EaglePairConfig, eagle, model_of
from speccascade_jax.models.members import Network

PUBLISHED = json.loads((Path(__file__).parent / "eagle3.json").read_text())
"""What the authors' code computes: three rounds of four drafted tokens, of which 0, 1 and 2 stand."""
HEADS = {
    "llama": TINY_EAGLE,
    "qwen3, normalised residual": dataclasses.replace(
        TINY_EAGLE, head_norms=True, norm_before_residual=True, layers=(4, 0)
    ),
    "its own embedding, all tokens": dataclasses.replace(
        TINY_EAGLE,
        d_model=24,
        own_embedding=True,
        draft_vocab_size=97,
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
}


def pair(drafter, verifier=EAGLE_VERIFIER, scale=0.3, **fields):
    """A pair's model and random parameters, whose drafts stand now and then."""
    model = model_of(EaglePairConfig(verifier, drafter), **fields)
    params = random_checkpoint(model.config).params
    return model, jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


# ---- logits ---------------------------------------------------------------------------------------------


def drawn(name, shape):
    """An array of the folders that PUBLISHED was computed from."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    return 1 + 0.1 * x if len(shape) == 1 else x * (1.0 if "embed" in name else 2 * shape[-1] ** -0.5)


def published_folders(folder):
    """Both folders, as published: config.json and safetensors."""
    for part in ("verifier", "head"):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(PUBLISHED[part]))
        config = MODEL_FAMILIES["qwen3" if part == "verifier" else "eagle3"].read_config(
            folder, spelling.as_head(PUBLISHED[part])
        )
        shapes = {path: x.shape for path, x in nnx.to_flat_state(model_of(config).abstract_params())}
        arrays = {
            name: drawn(name, shapes[path][::-1] if turned else shapes[path])
            for path, name, turned in MODEL_FAMILIES[config.family].parameter_names(config)
        }
        if part == "head":
            arrays["d2t"] = np.array(PUBLISHED["offsets"])
            arrays["t2d"] = np.isin(np.arange(61), np.array(PUBLISHED["offsets"]) + np.arange(23))
        save_file(arrays, folder / part / "model.safetensors")
    return [folder / "head", folder / "verifier"]


def as_published(drafter):
    """The greatest difference of a member's logits from PUBLISHED, over its three rounds."""
    model, params = drafter.model.member_of, drafter.params
    draft, read = (jax.jit(partial(member.extend, params)) for member in model.members)
    text, worst = PUBLISHED["text"], 0.0
    _, cache = model.prefill(params, np.array([PUBLISHED["prompt"]]), np.array([9]), 32)
    _, cache = read(np.array([[text[8]]]), cache)
    targets = np.array(PUBLISHED["offsets"]) + np.arange(23)
    for rounds in PUBLISHED["rounds"]:
        last, begin = text[rounds["text"] - 1], rounds["text"] - 1
        assert cache.length.tolist() == [begin]
        for token, expected in zip([last, *rounds["draft"]], rounds["logits"], strict=False):
            logits, cache = draft(np.array([[token]]), cache)
            worst = max(worst, np.abs(np.asarray(logits)[0, 0, targets] - expected).max())
        _, cache = read(np.array([[last, *rounds["draft"]]]), cache)
        cache = model.roll_back(cache, np.array([begin + 1 + rounds["stand"]]))
    return worst


def late(features_before, features, place):
    """The verifier's states are read one position late."""
    return features_before(features, jnp.maximum(place - 1, 0))


def rejected(advance, self, tokens, cache, after=None):
    """Features of rejected tokens are kept: what the head has written stands."""
    x, after = advance(self, tokens, cache)
    written = jnp.arange(cache.features.shape[-2])[:, None] < cache.drafted.max()
    return x, after._replace(features=jnp.where(written, cache.features, after.features))


def off_by_one(targets, self):
    return targets(self) - 1


def planted(wrong, right):
    return lambda *given, **more: wrong(right, *given, **more)


FAULTS = (
    (eagle, "features_before", late),
    (eagle.EaglePair, "advance", rejected),
    (eagle.Eagle, "targets", off_by_one),
)


def test_logits_are_those_of_the_authors_code(tmp_path):
    """Loaded from folders as published, round by round; then with planted faults."""
    drafter, verifier = checkpoints.load_all(published_folders(tmp_path))
    network = drafter.model.member_of
    assert network == verifier.model.member_of and drafter.params is verifier.params
    assert isinstance(network, Network) and isinstance(network.members[0], LanguageModel)
    assert network.config.drafter.layers == (2, 3, 4)
    assert as_published(drafter) < 2e-4
    for place, name, wrong in FAULTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, planted(wrong, getattr(place, name)))
            assert as_published(drafter) > 0.1, wrong.__name__


def check_against_reference(model, params, rounds, atol=1e-4):
    """Rounds as decoding has them, of three unlike rows, with blocks and rollbacks of any size: the head reads
    the last committed token and its draft, the verifier all of that, and each row keeps what it likes."""
    reference, rng = Reference(model, params), np.random.default_rng(0)
    vocab = model.vocab_size
    draft, read = (jax.jit(partial(member.extend, params)) for member in model.members)
    _, cache = model.prefill(params, SOURCE % vocab, LENGTH, 96)
    texts = [(row[:length] % vocab).tolist() for row, length in zip(SOURCE, LENGTH, strict=True)]
    for number in range(rounds):
        begins = np.array([len(text) - 1 for text in texts])
        np.testing.assert_array_equal(model.lengths(cache), np.stack([begins, begins], axis=1))
        size = int(rng.integers(1, 5))
        block = np.stack([[text[-1], *rng.integers(0, vocab, size)] for text in texts]).astype(np.int32)
        cut = int(rng.integers(1, size + 1)) if number % 2 else 1  # in one call, or two
        parts = []
        for tokens in np.split(block, [cut], axis=1):
            logits, cache = draft(tokens, cache)
            parts.append(logits)
        for row, found in enumerate(np.concatenate(parts, axis=1)):
            text = [*texts[row][:-1], *block[row].tolist()]
            expected = reference.logits(text, begins[row])[begins[row] :]
            can = expected[0] > NOWHERE
            np.testing.assert_allclose(found[:, can], expected[:, can], atol=atol)
            assert (found[:, ~can] <= NOWHERE).all() and can.sum() == model.config.drafter.draft_vocab_size
        for tokens in np.split(
            block, [int(rng.integers(0, size + 2))], axis=1
        ):  # any blocks for the verifier
            if tokens.shape[1]:
                _, cache = read(tokens, cache)
        keep = rng.integers(0, size + 1, 3)
        texts = [
            [*text[:-1], *tokens[: kept + 1].tolist(), int(rng.integers(vocab))]
            for text, tokens, kept in zip(texts, block, keep, strict=True)
        ]
        cache = model.roll_back(cache, begins + 1 + keep)


@pytest.mark.full(quick=["llama"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_logits_are_those_of_the_reference(head):
    check_against_reference(*pair(head, chunk=8), 6)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_verifiers_of_other_families(family):
    """Windows, caps and scaled embeddings, stacked layers: the head reads the states as they are."""
    from speccascade_jax.models.stacking import stacked

    verifier = DECODERS[family]
    head = dataclasses.replace(
        TINY_EAGLE, d_model=verifier.d_model, state_width=verifier.d_model, layers=(1, 2)
    )
    model, params = pair(head, verifier)
    check_against_reference(model, params, 2)
    looped, stack = stacked(model, params)
    _, cache = model.prefill(params, SOURCE, LENGTH, 48)
    _, other = looped.prefill(stack, SOURCE, LENGTH, 48)
    for number in (0, 1, 0):
        found, cache = model.extend_member(number, params, TARGET[:, :2], cache)
        again, other = looped.extend_member(number, stack, TARGET[:, :2], other)
        np.testing.assert_allclose(found, again, atol=1e-5)


def test_rows_and_the_verifier_alone():
    model, params = pair(TINY_EAGLE)
    check_rows(model, params)
    check_full(model, params, "verifier", model.members[1])


# ---- texts ----------------------------------------------------------------------------------------------

VOCAB, STEPS, DRAFTS = 4, 4, 2
SMALLEST = dict.fromkeys(("d_model", "d_ff"), 8) | {"vocab_size": VOCAB, "d_kv": 4, "num_heads": 2}
LAW_VERIFIER = dataclasses.replace(EAGLE_VERIFIER, **SMALLEST, num_layers=2)
LAW_HEAD = dataclasses.replace(
    TINY_EAGLE, **SMALLEST, num_kv_heads=1, draft_vocab_size=3, state_width=8, layers=(0, 1, 2)
)
PROMPTS = ((1,), (2, 0, 1))


@pytest.fixture(scope="module")
def law_pair():
    return pair(LAW_HEAD, LAW_VERIFIER, scale=0.6)


def law_of_texts(model, params, prompt, rule, alpha):
    """The probability of each text of STEPS tokens, enumerated over where a token stands in a
    round: the head's law depends on that."""
    reference, full = Reference(model, params), model.full

    def softmax(logits):
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    @cache
    def verifier(text):
        tokens = np.array([text])
        _, held = full.prefill(params["verifier"], tokens[:, :1], np.array([1]), len(text) + 1)
        return softmax(np.asarray(full.extend(params["verifier"], tokens, held)[0], np.float64)[0, -1])

    @cache
    def head(text, begin):
        return softmax(reference.logits(text, begin)[-1])

    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=STEPS), 0.0)

    def write(text, begin, mass):
        """`mass` that the round which begins after `begin` + 1 tokens has written `text`, all drafted."""
        written = text[len(prompt) :]
        if len(written) == STEPS:
            law[written] += mass
            return
        q, p = head(text, begin), verifier(text)
        pi = target(rule, q, p, q, p, alpha, False)
        for token in range(VOCAB):
            longer = (*text, token)
            if len(text) - 1 - begin == DRAFTS:
                write(longer, len(longer) - 1, mass * pi[token])
                continue
            stands = min(q[token], pi[token])
            if stands:
                write(longer, begin, mass * stands)
            if pi[token] > stands:
                write(longer, len(longer) - 1, mass * (pi[token] - stands))

    write(tuple(prompt), len(prompt) - 1, 1.0)
    np.testing.assert_allclose(sum(law.values()), 1)
    return law


@pytest.mark.parametrize("method,alpha", [("speculative", 0.0), ("opt", 0.2)])
def test_the_law_of_texts(method, alpha, law_pair, rows):
    """Chi-square against enumeration over (prefix, place): the verifier's law without a rule, another one
    with."""
    model, params = law_pair
    drafter, verifier = model.members
    sampler = Speculative(Autoregressive(drafter), verifier, METHODS[method], DRAFTS)
    which = np.arange(rows) % 2
    prompts = np.array([[1, 0, 0], [2, 0, 1]], np.int32)[which]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(rows))
    result = generate(
        sampler,
        params,
        keys,
        prompts,
        np.array([1, 3], np.int32)[which],
        SamplingOptions(1.0),
        jnp.array([alpha]),
        max_new_tokens=STEPS,
        eos_id=-1,
    )
    tokens, laws = np.asarray(result.tokens), []
    for number, prompt in enumerate(PROMPTS):
        law = law_of_texts(model, params, prompt, oracle(method), alpha)
        assert 2 * chi_square(tokens[which == number], law) > FAIL_BELOW
        laws.append(np.array(list(law.values())))
    lossless = np.array(list(law_of_texts(model, params, PROMPTS[1], "speculative", 0.0).values()))
    assert (np.abs(laws[1] - lossless).sum() > 0.05) == (method != "speculative")
    stood = np.asarray(result.counts[1].accepted).sum() / np.asarray(result.counts[1].drafted).sum()
    assert 0.1 < stood < 0.99
