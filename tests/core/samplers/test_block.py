"""Drafts that one pass writes: their law, by every method, and what must not be known when they are drawn.

toys.block_law enumerates the law of a text by (prefix, place in the round); it shares no code with the
package.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import (
    EOS,
    FAIL_BELOW,
    FAMILIES,
    PROMPTS,
    STEPS,
    TABLES,
    TRANSFORMS,
    VOCAB,
    Batch,
    decoded,
    exact,
    quick,
    smaller,
    with_rules,
)
from toys import TableBlock, TableLM, block_law, law_as_a_whole, places_table, sequence_law

from speccascade_jax.core.loop import generate
from speccascade_jax.core.protocols import NO_TOKEN, Origin
from speccascade_jax.core.protocols import Sampler as SamplerProtocol
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Speculative
from speccascade_jax.core.samplers.adaptive import Adaptive
from speccascade_jax.core.samplers.block import Parallel, drafting
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN

GAMMA = 3
NETWORK = TableBlock(VOCAB)
PARAMS = places_table(7, VOCAB, GAMMA + 3), TABLES[1]


def cascade(*families, kind=Speculative, gamma=GAMMA, network=NETWORK, **options):
    drafter, verifier = network.members
    methods = tuple(METHODS[family] for family in families)
    return kind(drafting(drafter, gamma), verifier, methods, gamma, **options)


def p_value(texts, laws):
    return smaller(*texts, laws)


def laws(family, gamma=GAMMA, **options):
    rule = partial(exact(METHODS[family]), alpha=FAMILIES[family])
    return [
        block_law(PARAMS, [rule] * (gamma + 1), prompt, steps=STEPS, eos=EOS, **options) for prompt in PROMPTS
    ]


def written(sampler, rows, options, params=PARAMS, alphas=None, **per_row):
    alphas = [FAMILIES["speculative"]] * sampler.level if alphas is None else alphas
    result, which = decoded(sampler, params, rows, SamplingOptions(**options), alphas, **per_row)
    return result, (np.asarray(result.tokens), which)


@pytest.mark.parametrize("transform", quick(*((t,) for t in TRANSFORMS), among=[("min_p",)]))
def test_drafts_follow_their_law_by_prefix_and_place(transform, rows):
    """The control: with the places taken from the end, a rule's law is another one, unless the truncation
    leaves one token."""
    options = {"temperature": 1.0, **TRANSFORMS[transform]}
    batch, turned = Batch(cascade(*FAMILIES), PARAMS, rows), (PARAMS[0][:, :, GAMMA::-1], PARAMS[1])
    for number, (family, alpha) in enumerate(FAMILIES.items()):
        expected, setting = laws(family, **options), (SamplingOptions(**options), [alpha], [number])
        result, which = batch.decoded(*setting)
        assert p_value((result.tokens, which), expected) > FAIL_BELOW
        other, _ = batch.decoded(*setting, turned)
        same = METHODS[family].lossless or max(map(len, expected)) == 1
        assert (p_value((other.tokens, which), expected) > FAIL_BELOW) == same
        drafted, rounds = (np.asarray(x) for x in (result.counts[1].drafted, result.counts[1].rounds))
        np.testing.assert_array_equal(result.counts[0], rounds)  # a pass a draft
        assert drafted.sum() > 2 * rounds.sum()


def test_at_temperature_zero_texts_are_the_verifiers():
    _, (tokens, which) = written(cascade("speculative"), 64, {"temperature": 0.0})
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(TABLES[1:2], [], [], prompt, steps=STEPS, eos=EOS, temperature=0.0)
        assert {tuple(int(t) for t in row if t >= 0) for row in tokens[which == n]} == set(law)


@pytest.mark.full
def test_adaptive_blocks_keep_the_law(rows):
    """A row stops by the laws of its places, before it looks at a token."""
    batch = Batch(cascade(*FAMILIES, kind=Adaptive, stop_below=0.6), PARAMS, rows)
    for number, (family, alpha) in enumerate(FAMILIES.items()):
        result, which = batch.decoded(SamplingOptions(), [alpha], [number])
        drafted, rounds = (np.asarray(x) for x in (result.counts[1].drafted, result.counts[1].rounds))
        assert 0 < drafted.sum() < GAMMA * rounds.sum()
        np.testing.assert_array_equal(result.counts[0].passes, rounds)
        texts = result.tokens, which
        if METHODS[family].lossless:
            assert p_value(texts, laws(family)) > FAIL_BELOW
        else:
            assert p_value(texts, laws(family, stop_below=0.6)) > FAIL_BELOW
            assert p_value(texts, laws(family)) < FAIL_BELOW


@pytest.mark.full(quick=["block"])
@pytest.mark.parametrize("way", [TOKEN, BLOCK], ids=["token", "block"])
def test_both_verifications_are_lossless(way, rows):
    sampler = cascade("speculative", verification=(TOKEN, BLOCK))
    ways = np.full(rows, way is BLOCK, np.int32)
    _, texts = written(sampler, rows, {"temperature": 1.0}, verifications=ways)
    assert p_value(texts, laws("speculative")) > FAIL_BELOW


@pytest.mark.full
def test_drafts_as_a_whole_have_a_law_of_their_own(rows, full):
    """Each place's target is the rule's, but rounds begin elsewhere than token by token: where a rule's
    target depends on the place, the law of a text is another one."""
    batch = Batch(cascade(*FAMILIES, gamma=2, verification=BLOCK), PARAMS, rows)
    for number, (family, alpha) in enumerate(FAMILIES.items()):
        if not full and family != "token_v3":
            continue
        result, which = batch.decoded(SamplingOptions(), [alpha], [number])
        at = [partial(exact(METHODS[family]), alpha=alpha)] * 3
        whole = [law_as_a_whole(PARAMS, at, prompt, steps=STEPS, eos=EOS) for prompt in PROMPTS]
        by_token = laws(family, 2)
        assert p_value((result.tokens, which), whole) > FAIL_BELOW
        far = [
            max(abs(law[text] - other.get(text, 0)) for text in law)
            for law, other in zip(whole, by_token, strict=True)
        ]
        assert (max(far) < 1e-9) == METHODS[family].lossless
        control = p_value((result.tokens, which), by_token)
        assert (control > FAIL_BELOW) == METHODS[family].lossless


def above(family, hand_over, gammas):
    """A third model that verifies what the first two write losslessly."""
    lower = cascade("speculative", gamma=gammas[0])
    return Speculative(lower, TableLM(VOCAB), METHODS[family], gammas[1], hand_over)


@pytest.mark.parametrize(
    "family,gammas,hand_over",
    quick(
        *with_rules(
            [("speculative", (1, 2)), ("speculative", (3, 2)), ("speculative", (2, 3)), ("opt", (2, 3))]
        ),
        among=[("opt", (2, 3), "need")],
    ),
)
def test_hierarchies_follow_the_law(family, gammas, hand_over, rows):
    if hand_over == "keep" and not METHODS[family].lossless:
        hand_over = "truncate"
    sampler = above(family, hand_over, gammas)
    alphas = [0.0, FAMILIES[family]]
    _, texts = written(sampler, rows, {"temperature": 0.7}, (PARAMS, TABLES[2]), alphas)
    expected = [
        sequence_law(TABLES[1:3], [family], [FAMILIES[family]], prompt, steps=STEPS, eos=EOS, temperature=0.7)
        for prompt in PROMPTS
    ]
    assert p_value(texts, expected) > FAIL_BELOW


# Planted: each must fail


class SeesDraft(Parallel):
    """Each place's law is turned, once it is drawn from, into one that knows what was drawn."""

    def step(self, params, caches, rows, eos_id):
        block, *rest = super().step(params, caches, rows, eos_id)
        drawn = jax.nn.one_hot(block.tokens, block.probs.shape[-1])
        knowing = 0.5 * block.probs + 0.5 * drawn
        return block._replace(probs=knowing, untransformed=knowing), *rest


class Dependent(Parallel):
    """All places are drawn with one number."""

    def step(self, params, caches, rows, eos_id):
        levels = rows.noise.levels
        same = tuple(jnp.broadcast_to(x[:, :, :1], x.shape) for x in levels[:1])
        return super().step(
            params, caches, rows._replace(noise=rows.noise._replace(levels=(*same, *levels[1:]))), eos_id
        )


@pytest.mark.full(quick=["Dependent"])
@pytest.mark.parametrize("kind", [SeesDraft, Dependent])
def test_drafts_that_are_no_draws_of_their_laws_are_seen(kind):
    drafter, verifier = NETWORK.members
    sampler = Speculative(kind(drafter, GAMMA + 1), verifier, METHODS["speculative"], GAMMA)
    _, texts = written(sampler, 40_000, {"temperature": 1.0})
    assert p_value(texts, laws("speculative")) < FAIL_BELOW


class StaleStates(TableBlock):
    """The drafter reads the place after the last state: what a rejected token has left there."""

    def extend_member(self, number, params, tokens, cache):
        logits, after = super().extend_member(number, params, tokens, cache)
        if number:
            return logits, after
        rejected = jnp.take_along_axis(cache.tokens, cache.length[:, None] + 1, axis=1)
        return super().extend_member(0, params, jnp.where(tokens >= 0, rejected, tokens), cache)


class LateStates(TableBlock):
    """The drafter reads the verifier's states one position late."""

    def extend_member(self, number, params, tokens, cache):
        if number:
            return super().extend_member(number, params, tokens, cache)
        late = cache._replace(tokens=jnp.roll(cache.tokens, 1, axis=1))
        return super().extend_member(0, params, tokens, late)[0], cache


@pytest.mark.full(quick=["LateStates"])
@pytest.mark.parametrize("kind", [StaleStates, LateStates])
def test_states_of_another_position_are_seen(kind):
    """By a rule's law; a lossless one has its verifier's law whatever the drafter reads."""
    sampler = cascade("opt", network=kind(VOCAB))
    _, texts = written(sampler, 40_000, {"temperature": 1.0}, alphas=[FAMILIES["opt"]])
    assert p_value(texts, laws("opt")) < FAIL_BELOW


# The interface


def test_it_is_a_sampler_that_writes_as_much_as_there_is_room_for():
    drafter, _ = NETWORK.members
    sampler = drafting(drafter, GAMMA)
    assert isinstance(sampler, SamplerProtocol) and isinstance(sampler, Parallel)
    assert sampler == drafting(drafter, GAMMA) and hash(sampler) == hash(drafting(drafter, GAMMA))
    assert sampler.width == GAMMA + 1 and sampler.plain(3) == {"model_passes": 3}


@pytest.mark.full
def test_rows_depend_on_nothing_but_themselves():
    """Limits and methods of other rows change nothing; who wrote what is told."""
    rules = METHODS["speculative"], METHODS["opt"]
    drafter, verifier = NETWORK.members
    sampler = Speculative(drafting(drafter, GAMMA), verifier, rules, GAMMA)
    keys = jax.random.split(jax.random.key(3), 6)

    def run(rows):
        rows = np.array(rows)
        return generate(
            sampler,
            PARAMS,
            keys[rows],
            np.full((len(rows), 1), 1, np.int32),
            np.ones(len(rows), np.int32),
            SamplingOptions(1.0),
            [[0.05]] * len(rows),
            max_new_tokens=20,
            eos_id=NO_TOKEN,
            methods=(rows % 2)[:, None],
            limits=20 - 3 * rows,
        )

    whole = run(range(6))
    assert np.asarray(whole.length).tolist() == [20, 17, 14, 11, 8, 5]
    assert {int(x) for x in np.unique(whole.origin)} >= {Origin.DRAFT, Origin.CORRECTION, Origin.BONUS}
    for rows in ([4, 1], [5]):
        alone = run(rows)
        np.testing.assert_array_equal(alone.tokens, whole.tokens[np.array(rows)])
        np.testing.assert_array_equal(alone.counts[1].accepted, whole.counts[1].accepted[np.array(rows)])
