"""A drafter that writes a whole draft in one pass: what it sees, and what it must not see."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from joint_laws import FAIL_BELOW, exact
from member_laws import check_full, check_shared, text_of
from shapes import LENGTH, SOURCE, TINY_T5
from tiny_models import in_blocks, prefill, prefilled, random_checkpoint
from toys import block_law, chi_square

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import MASK, UNSEEN, LanguageModel
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import BlockDrafterConfig, block_drafter, model_of
from speccascade_jax.models.members import Network
from speccascade_jax.models.t5 import T5Config

CONFIG = BlockDrafterConfig(
    dataclasses.replace(TINY_T5, relative_buckets=12, relative_max_distance=16),
    states=(0, 1, 2),
    block_size=8,
    num_layers=2,
    num_heads=3,
    d_kv=12,
    d_ff=40,
)


def random_network(config, scale=0.2, seed=0):
    """A model and its parameters, none of them without effect."""
    made = random_checkpoint(config, seed)
    flat = {
        path: x.replace(x[...] * scale) if path[-1] == "kernel" else x
        for path, x in nnx.to_flat_state(made.params)
    }
    return made.model, jax.tree.map(jnp.asarray, nnx.from_flat_state(flat))


@pytest.fixture(scope="module")
def network():
    return random_network(CONFIG)


def expected(network, params, text, begin, count):
    """The laws of `count` places after the committed tokens text[:begin + 1], without a cache."""
    position = np.arange(text.shape[1])
    inside = (position >= begin[:, None]) & (position < begin[:, None] + count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            block_drafter, "begins", lambda *_: jnp.where(inside, begin[:, None], position).astype(jnp.int32)
        )
        target = np.pad(text[:, 1:], ((0, 0), (0, 1)))
        drafted, _ = jax.jit(network.forced_members)(params, SOURCE, LENGTH, target)
    return np.take_along_axis(drafted, (begin[:, None] + np.arange(count))[..., None], axis=1)


def masked(text, begin, count):
    """The last committed token, and masks for the other places."""
    last = text[np.arange(len(text)), begin]
    return np.concatenate([last[:, None], np.full((len(text), count - 1), MASK)], axis=1)


BEGINS = np.array([5, 0, 11])


def drafted(network, params, text, sizes, count):
    """The laws of the places after text[:BEGINS + 1]. The verifier has read more, in blocks of these
    sizes, and has been rolled back."""
    drafter, verifier = network.members
    _, cache = in_blocks(verifier, params, text[:, : sum(sizes)], sizes, prefilled(network, params))
    cache = network.roll_back(cache, jnp.asarray(BEGINS))
    return np.asarray(jax.jit(drafter.extend)(params, masked(text, BEGINS, count), cache)[0])


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 4, 9])
def test_drafts_are_those_of_the_committed_text(network, count):
    """However it was cut, and whatever was read and rolled back after it."""
    model, params = network
    assert isinstance(model, Network) and isinstance(model.members[0], LanguageModel)
    text = text_of(model, 0)
    wanted = expected(model, params, text, BEGINS, count)
    for sizes in ([16], [1, 7, 8], [4] * 4):
        logits = drafted(model, params, text, sizes, count)
        np.testing.assert_allclose(logits, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.full
def test_verifier_and_drafter_take_turns(network):
    """Rounds with unlike rows: drafts, then other tokens than the drafted ones, of which few stand."""
    model, params = network
    drafter, verifier = (jax.jit(member.extend) for member in model.members)
    rng, text, rows = np.random.default_rng(0), text_of(model, 1), np.arange(3)[:, None]
    cache, begin = prefilled(model, params), np.zeros(3, int)
    for turn in range(4):
        wanted = expected(model, params, text, begin, 5)
        logits, cache = drafter(params, masked(text, begin, 5), cache)
        np.testing.assert_allclose(logits, wanted, atol=2e-5 * np.abs(wanted).max())
        np.testing.assert_array_equal(cache.length, begin)
        read = text_of(model, 50 + turn)[:, :5]
        read[:, :1] = text[rows, begin[:, None]]
        stand = rng.integers(0, 5, 3)
        _, cache = verifier(params, read, cache)
        begin = begin + 1 + stand
        cache = model.roll_back(cache, jnp.asarray(begin))
        place = np.arange(24) - (begin - 1 - stand)[:, None]
        kept = (place >= 0) & (place <= stand[:, None])
        text = np.where(kept, np.take_along_axis(read, np.clip(place, 0, 4), axis=1), text)
    assert len(set(begin)) == 3


@pytest.mark.full
def test_rows_are_independent_and_can_be_replaced(network):
    model, params = network
    text, order = text_of(model, 3), np.array([2, 1, 2])
    drafter, verifier = (jax.jit(member.extend) for member in model.members)

    def begun(which):
        _, cache = prefill(model, params, SOURCE[which], LENGTH[which], 64)
        _, cache = verifier(params, text[which][:, :12], cache)
        return model.roll_back(cache, jnp.asarray(BEGINS[which]))

    cache = model.insert(begun(np.arange(3)), begun(np.array([2, 0])), jnp.array([0, 5]), False)
    np.testing.assert_array_equal(model.lengths(cache), np.stack([BEGINS[order]] * 2, axis=1))
    logits, _ = drafter(params, masked(text[order], BEGINS[order], 4), cache)
    for place, row in enumerate(order):
        index = np.array([row])
        alone, _ = drafter(params, masked(text[index], BEGINS[index], 4), begun(index))
        np.testing.assert_allclose(logits[place], alone[0], atol=1e-4)


@pytest.mark.full
def test_places_see_each_other_in_both_directions(network):
    """But no place sees one that is UNSEEN, and no committed token one after it: that would be judged."""
    model, params = network
    text = text_of(model, 0)
    _, cache = in_blocks(model.members[1], params, text[:, :16], [16], prefilled(model, params))
    cache = model.roll_back(cache, jnp.asarray(BEGINS))
    draft = partial(jax.jit(model.members[0].extend), params)
    usual = np.asarray(draft(masked(text, BEGINS, 4), cache)[0])
    scale = np.abs(usual).max()
    longer = np.asarray(draft(masked(text, BEGINS, 5), cache)[0])
    assert np.abs(longer[:, :4] - usual).max() > 0.01 * scale
    unseen = np.pad(masked(text, BEGINS, 4), ((0, 0), (0, 1)), constant_values=UNSEEN)
    np.testing.assert_allclose(draft(unseen, cache)[0][:, :4], usual, atol=2e-5 * scale)

    known = np.stack([text[np.arange(3), BEGINS + n] for n in range(4)], axis=1)
    logits = np.asarray(draft(known, cache)[0])
    for n in range(1, 4):
        other = known.copy()
        other[:, n] = (other[:, n] + 1) % CONFIG.vocab_size
        changed = np.abs(np.asarray(draft(other, cache)[0]) - logits).max(axis=(0, 2)) > 1e-3 * scale
        assert changed.tolist() == [place >= n for place in range(4)]


def late(right, self, states, cache):
    """The verifier's states are kept one position late."""
    return right(self, jnp.roll(states, 1, axis=2), cache)


def rejected(right, tokens, length, back):
    """States of rejected tokens are seen where they still are."""
    return right(tokens, length, back) | (
        jnp.arange(back.shape[2]) == (length + tokens.shape[1])[:, None, None]
    )


def missing_last(right, tokens, length, back):
    """The state before the last committed token is not seen."""
    return right(tokens, length, back) & (jnp.arange(back.shape[2]) != (length - 1)[:, None, None])


def planted(wrong, right):
    return lambda *given: wrong(right, *given)


@pytest.mark.parametrize(
    "place,name,wrong",
    [
        pytest.param(block_drafter.Drafter, "remember", late, marks=pytest.mark.full),
        (block_drafter, "seen", rejected),
        (block_drafter, "seen", missing_last),
    ],
)
def test_states_of_other_positions_would_be_seen(network, place, name, wrong, monkeypatch):
    model, params = network
    text = text_of(model, 0)
    wanted = expected(model, params, text, BEGINS, 4)
    monkeypatch.setattr(place, name, planted(wrong, getattr(place, name)))
    logits = drafted(model, params, text, [16], 4)
    assert np.abs(logits - wanted).max() > 1e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("part", ["mix", "masks", "bias", "states", "encoder"])
def test_every_part_matters(network, part):
    model, params = network
    flat, text = dict(nnx.to_flat_state(params)), text_of(model, 0)
    path = {
        "mix": ("drafter", "mix", "kernel"),
        "masks": ("drafter", "masks"),
        "bias": ("drafter", "bias"),
        "states": ("verifier", "decoder", 0, "mlp", "down", "kernel"),
        "encoder": ("verifier", "encoder_norm", "scale"),
    }[part]
    flat[path] = flat[path].replace(0 * flat[path][...])
    usual = expected(model, params, text, BEGINS, 4)
    other = expected(model, nnx.from_flat_state(flat), text, BEGINS, 4)
    assert np.abs(usual - other).max() > 1e-3 * np.abs(usual).max()


@pytest.mark.full
def test_the_verifier_is_the_plain_model_bit_for_bit(network):
    model, params = network
    check_full(model, params, "verifier", model.members[1])


@pytest.mark.full
def test_nothing_is_copied():
    check_shared(model_of(CONFIG))


def test_drafts_in_training_are_of_every_length():
    """Those of a row are of one length and follow each other without a gap."""
    tokens, sizes = np.zeros((200, 40), np.int32), set()
    for begins in np.asarray(block_drafter.begins(tokens, 9, jax.random.key(0))):
        change = np.flatnonzero(np.diff(begins)) + 1
        assert (begins[change] == change).all() and begins[0] == 0
        [size] = set(np.diff(change)) or {0}
        assert (np.diff(begins)[change - 1] <= size).all() and 0 < change[0] <= size
        sizes.add(size)
    assert sizes == set(range(4, 10))
    fixed = np.asarray(block_drafter.begins(tokens[:1], 9, None))[0]
    assert fixed.tolist() == (np.arange(40) // 5 * 5).tolist()


# Texts


def sampler_of(model, family, gamma):
    drafter, verifier = model.members
    return Speculative(drafting(drafter, gamma), verifier, METHODS[family], gamma)


def test_greedy_texts_are_the_verifiers(network, full):
    """Those of unlike rows, in drafts of several sizes; some drafts stand."""
    model, params = network
    count = 1000 if full else 60
    rng = np.random.default_rng(5)
    source = rng.integers(2, 97, (count, 9)).astype(np.int32)
    length, keys = rng.integers(1, 10, count).astype(np.int32), jax.random.split(jax.random.key(0), count)

    def texts(sampler, params, alphas):
        return generate(
            sampler,
            params,
            keys,
            source,
            length,
            SamplingOptions(0.0),
            jnp.asarray(alphas),
            max_new_tokens=16,
            eos_id=1,
        )

    alone = texts(Autoregressive(model.full), params["verifier"], np.zeros(0))
    for gamma in (3, 8):
        result = texts(sampler_of(model, "speculative", gamma), params, [0.0])
        np.testing.assert_array_equal(result.tokens, alone.tokens)
        assert int(result.counts[1].accepted.sum()) > 0


VOCAB, STEPS, EOS = 5, 3, 1
SMALL = BlockDrafterConfig(
    T5Config(
        vocab_size=VOCAB,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        relative_buckets=8,
        relative_max_distance=8,
    ),
    states=(1, 2),
    block_size=3,
    num_heads=2,
    d_kv=4,
    d_ff=8,
)
SOURCES = np.array([[3, 2], [4, 0]], np.int32), np.array([2, 1], np.int32)


def laws_of(model, params, gamma):
    """For each source, functions from a text (the start token first) to the laws of the places after it, and
    to the verifier's; they are read without a cache of several blocks."""
    drafter, verifier = model.members
    read, draft = jax.jit(verifier.extend), jax.jit(drafter.extend)

    def of_source(n):
        source, length = (x[n : n + 1] for x in SOURCES)
        _, begun = prefill(model, params, source, length, 16)

        def drafts(text):
            _, cache = read(params, np.array([(*text[:-1], 0)], np.int32), begun)
            cache = model.roll_back(cache, jnp.array([len(text) - 1]))
            tokens = np.array([[text[-1], *[MASK] * gamma]], np.int32)
            return np.asarray(jax.nn.softmax(draft(params, tokens, cache)[0][0]), np.float64)

        def verified(text):
            return np.asarray(
                jax.nn.softmax(read(params, np.array([text], np.int32), begun)[0][0, -1]), np.float64
            )

        return drafts, verified

    return [of_source(n) for n in range(len(SOURCES[0]))]


@pytest.mark.full(quick=["opt"])
@pytest.mark.parametrize("family,alpha", [("speculative", 0.0), ("opt", 0.05)], ids=["speculative", "opt"])
def test_texts_follow_their_law(family, alpha, rows):
    """Enumerated by (prefix, place in the round)."""
    model, params = random_network(SMALL, scale=0.4, seed=3)
    sampler, gamma = sampler_of(model, family, 2), 2
    which = np.arange(rows) % 2
    result = generate(
        sampler,
        params,
        jax.random.split(jax.random.key(1), rows),
        SOURCES[0][which],
        SOURCES[1][which],
        SamplingOptions(1.0),
        jnp.array([alpha]),
        max_new_tokens=STEPS,
        eos_id=EOS,
    )
    rule = partial(exact(METHODS[family]), alpha=alpha)
    for n, pair in enumerate(laws_of(model, params, gamma)):
        law = block_law(pair, [rule] * (gamma + 1), (0,), steps=STEPS, eos=EOS)
        assert chi_square(np.asarray(result.tokens)[which == n], law) > FAIL_BELOW / 2
        first = block_law(
            [lambda text, q=pair[0]: np.stack([q(text)[0]] * (gamma + 1)), pair[1]],
            [rule] * (gamma + 1),
            (0,),
            steps=STEPS,
            eos=EOS,
        )
        seen = chi_square(np.asarray(result.tokens)[which == n], first) < FAIL_BELOW
        assert seen == (not METHODS[family].lossless)  # the control: every place has the first one's law


# Checkpoints


@pytest.mark.full
def test_a_drafter_is_shipped_next_to_its_verifier(tmp_path):
    original = random_checkpoint(CONFIG)
    verifier = Checkpoint(original.model.full, original.params["verifier"], None, "memory")
    checkpoints.save(tmp_path / "verifier", verifier, "huggingface")
    checkpoints.native.export(tmp_path / "drafter", original.model, original.params, full_at="verifier")
    drafter, full = checkpoints.load_all([f"{tmp_path}/drafter@drafter", f"{tmp_path}/drafter"])
    assert drafter.model == original.model.members[0] and drafter.params is full.params
    jax.tree.map(np.testing.assert_array_equal, original.params, drafter.params)

    narrow = random_checkpoint(dataclasses.replace(CONFIG.verifier, d_ff=64))
    checkpoints.save(tmp_path / "other", narrow, "huggingface")
    described = json.loads((tmp_path / "drafter" / "model.json").read_text())
    wide = described | {"verifier": described["verifier"] | {"vocab_size": 96}}
    cases = [
        (described | {"full_at": "other"}, "d_ff is 64"),
        (described | {"states": [1, 3]}, "states is"),
        (described | {"states": []}, "states is"),
        (described | {"block_size": 0}, "block_size is 0"),
        (wide, "vocab_size is 97, not 96"),
    ]
    for content, said in cases:
        (tmp_path / "drafter" / "model.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=said):
            checkpoints.load(f"{tmp_path}/drafter@drafter")
