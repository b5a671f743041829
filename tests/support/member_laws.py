"""What every network of several members must hold, whatever it is."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from shapes import LENGTH, SOURCE, TARGET
from tiny_models import in_blocks, prefilled

from speccascade_jax.commands import decode
from speccascade_jax.core.protocols import LanguageModel
from speccascade_jax.models.members import Network

SIZE = 24
"""Tokens of a text."""


def text_of(network, seed):
    """[3, SIZE] tokens to feed: the first is what decoding of SOURCE begins with."""
    text = np.random.default_rng(seed).integers(2, 97, (3, SIZE)).astype(np.int32)
    is_prompt = hasattr(network.config.full, "bos_id")
    text[:, 0] = SOURCE[np.arange(3), LENGTH - 1] if is_prompt else network.config.pad_id
    return text


def reference(network, params, text):
    """Each member's logits after every token of `text`, without a cache of several blocks."""
    target = np.pad(text[:, 1:], ((0, 0), (0, 1)))
    return [np.asarray(x) for x in jax.jit(network.forced_members)(params, SOURCE, LENGTH, target)]


def check_shared(network):
    """A network around a full model holds that model's arrays, not copies. Returns its parameters by path."""
    full = network.full.init(0)
    params = network.around(full, 0)
    assert jax.tree.structure(params) == jax.tree.structure(network.abstract_params())
    mine = dict(nnx.to_flat_state(params))
    for path, value in nnx.to_flat_state(full):
        assert mine["verifier", *path].get_value() is value.get_value()
    return mine


def check_members(network, params, writes_for):
    """The interface, and append and chunk for every member by itself. writes_for(i) are the members whose
    part of the cache member i writes."""
    assert isinstance(network, Network) and isinstance(network, LanguageModel)
    text, start = text_of(network, 0), prefilled(network, params)
    expected = reference(network, params, text)
    for number, member in enumerate(network.members):
        assert isinstance(member, LanguageModel) and member.member_of == network
        assert hash(member) == hash(type(member)(network, number))
        logits, cache = in_blocks(member, params, text, [1, 7, 16], start)
        np.testing.assert_allclose(logits, expected[number], atol=2e-5)
        for other, peer in enumerate(network.members):
            grown = np.asarray(peer.length(cache) - peer.length(start))
            assert (grown == (SIZE if other in writes_for(number) else 0)).all()
        assert (cache.length - start.length).tolist() == [SIZE] * 3
    far = max(np.abs(a - b).max() for a in expected for b in expected)
    assert far > 0.1  # the control: members differ


def check_full(network, params, part, member):
    """`part` of the parameters is the plain model, and `member` decodes and trains as that, bit for bit."""
    plain, part_params = network.full, params[part]
    expected, _ = in_blocks(plain, part_params, TARGET, [3, 1, 26], prefilled(plain, part_params))
    for full in (network, member):
        logits, _ = in_blocks(full, params, TARGET, [3, 1, 26], prefilled(full, params))
        np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(
        jax.jit(network.forced)(params, SOURCE, LENGTH, TARGET),
        jax.jit(plain.forced)(part_params, SOURCE, LENGTH, TARGET),
    )


def check_interleaved(network, params, writes_for, rounds=14):
    """Members read in turn, blocks of unlike sizes, and are rolled back to ragged lengths, after which the
    text goes on differently: always the logits of the text as it stands."""
    rng, extends = np.random.default_rng(1), [jax.jit(member.extend) for member in network.members]
    text, cache = text_of(network, 2), prefilled(network, params)
    begin = np.asarray(cache.length)
    covered = np.zeros((len(network.members), 3), int)
    expected, rows = reference(network, params, text), np.arange(3)[:, None]
    ragged = 0
    for turn in range(rounds):
        number = turn % len(network.members) if turn % 4 < 3 else int(rng.integers(len(network.members)))
        size = (1, 5)[int(rng.integers(2))]
        if (covered[number] + size > SIZE).any() or turn % 3 == 2:
            kept = rng.integers(0, covered.max(axis=0) + 1)
            cache = network.roll_back(cache, jnp.asarray(begin + kept))
            covered = np.minimum(covered, kept)
            new = text_of(network, 100 + turn)
            text = np.where(np.arange(SIZE) < np.maximum(kept, 1)[:, None], text, new)
            expected = reference(network, params, text)
        places = covered[number][:, None] + np.arange(size)
        ragged += len(set(covered[number])) > 1
        logits, cache = extends[number](params, text[rows, places], cache)
        np.testing.assert_allclose(logits, expected[number][rows, places], atol=2e-5)
        for other in writes_for(number):
            covered[other] = np.maximum(covered[other], covered[number] + size)
        lengths = np.stack([np.asarray(member.length(cache)) for member in network.members])
        np.testing.assert_array_equal(lengths - begin, covered)
        np.testing.assert_array_equal(np.asarray(cache.length) - begin, covered.max(axis=0))
    assert ragged > 3


def check_rows(network, params):
    """No row depends on another, and a row that is put in another's place goes on as it would have."""
    text, kept = text_of(network, 3), np.array([6, 5, 2])
    prefill = jax.jit(network.prefill, static_argnums=3)
    extends = [jax.jit(member.extend) for member in network.members]

    def begun(which):
        """Members have read 6 and 4 tokens, of which each row keeps as many as it likes."""
        _, cache = prefill(params, SOURCE[which], LENGTH[which], SIZE + 40)
        begin = np.asarray(cache.length)
        _, cache = extends[0](params, text[which][:, :6], cache)
        _, cache = extends[-1](params, text[which][:, :4], cache)
        return network.roll_back(cache, jnp.asarray(begin + kept[which])), begin

    whole, begins = begun(np.arange(3))
    cache = network.insert(whole, begun(np.array([2, 0]))[0], jnp.array([0, 5]), False)
    order = np.array([2, 1, 2])
    np.testing.assert_array_equal(network.lengths(cache), np.asarray(network.lengths(whole))[order])
    np.testing.assert_array_equal(cache.length, np.asarray(whole.length)[order])
    for member, extend in zip(network.members, extends, strict=True):
        ahead = np.asarray(member.length(cache)) - begins[order]
        tokens = np.stack([text[row, n : n + 5] for row, n in zip(order, ahead, strict=True)])
        logits, _ = extend(params, tokens, cache)
        for place, row in enumerate(order[:2]):
            alone, _ = begun(np.array([row]))
            expected, _ = extend(params, tokens[place : place + 1], alone)
            np.testing.assert_allclose(logits[place], expected[0], atol=2e-5)


def products(function, *arguments):
    """How many matrix products a program has."""
    return jax.jit(function, static_argnums=3).lower(*arguments, SIZE).as_text().count("dot_general")


def check_lossless_texts(flags, capsys):
    """At temperature 0, decode.py writes the same text with the pair as with its verifier alone."""
    texts = []
    for method in ("speculative", "verifier"):
        assert decode.main([*flags, f"--method={method}", "--temperature=0"]) == 0
        texts.append(capsys.readouterr().out.splitlines()[:2])
    assert texts[0] == texts[1]
