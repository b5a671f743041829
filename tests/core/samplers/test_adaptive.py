"""Adaptive blocks: their law, what decides where a row stops, and decisions that must not be."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, FAMILIES, PROMPTS, STEPS, TABLES, TRANSFORMS, VOCAB, decoded, quick
from shapes import TINY_T5
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core.loop import generate
from speccascade_jax.core.nests import fitted
from speccascade_jax.core.protocols import NO_TOKEN, Origin
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.adaptive import Adaptive, confidence
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import model_of

MODEL, MOST = TableLM(VOCAB), 4


def adaptive(family, kind=Adaptive, stop_below=0.25):
    return kind(Autoregressive(MODEL), MODEL, METHODS[family], MOST, stop_below=stop_below)


def p_value(family, kind=Adaptive, *, rows, seed=0, **options):
    options = {"temperature": 1.0, **options}
    result, which = decoded(
        adaptive(family, kind), tuple(TABLES[:2]), rows, SamplingOptions(**options), [FAMILIES[family]], seed
    )
    counts = result.counts[1]
    if kind is Adaptive and options == {"temperature": 1.0}:  # blocks of every length
        assert (np.asarray(counts.drafted) < MOST * np.asarray(counts.rounds)).any()
        assert (np.asarray(counts.drafted) > np.asarray(counts.rounds)).any()
    return 2 * min(
        chi_square(
            np.asarray(result.tokens)[which == n],
            sequence_law(TABLES[:2], [family], [FAMILIES[family]], prompt, steps=STEPS, eos=EOS, **options),
        )
        for n, prompt in enumerate(PROMPTS)
    )


@pytest.mark.parametrize(
    "family,transform",
    quick(
        ("speculative", "plain"),
        ("opt", "plain"),
        ("opt", "top_p"),
        ("token_v3", "min_p"),
        among=[("opt", "plain")],
    ),
)
def test_adaptive_blocks_follow_the_law(family, transform, rows):
    assert p_value(family, rows=rows, **TRANSFORMS[transform]) > FAIL_BELOW


class DropsUnlikely(Adaptive):
    """Drops a token that it has drawn because the token's own probability is small."""

    def goes_on(self, chance, block, spared):
        return jnp.take_along_axis(block.untransformed[:, 0], block.tokens, axis=1)[:, 0] >= 0.2


class NoBonusLaw(Adaptive):
    """Forgets the law at which a row stops."""

    def verified(self, params, caches, rows, eos_id, drafted, *rest):
        inside = (jnp.arange(self.width) < drafted.size[:, None])[..., None]
        drafted = drafted._replace(probs=drafted.probs * inside, untransformed=drafted.untransformed * inside)
        return super().verified(params, caches, rows, eos_id, drafted, *rest)


@pytest.mark.parametrize(
    "bug,family",
    quick(
        (DropsUnlikely, "speculative"),
        (DropsUnlikely, "opt"),
        (NoBonusLaw, "token_v3"),
        among=[(DropsUnlikely, "speculative")],
    ),
)
def test_what_must_not_be_is_seen(bug, family):
    assert p_value(family, bug, rows=40_000) < FAIL_BELOW


def written(sampler, rows, eos_id=NO_TOKEN, temperature=1.0, steps=24, family="opt"):
    keys, ones = jax.vmap(jax.random.key)(rows), np.ones((len(rows), 1), np.int32)
    return generate(
        sampler,
        tuple(TABLES[:2]),
        keys,
        ones,
        ones[:, 0],
        SamplingOptions(temperature),
        jnp.array([FAMILIES[family]]),
        max_new_tokens=steps,
        eos_id=eos_id,
    )


def test_a_row_depends_on_no_other():
    """Rows stop where they like: together, in another order and by themselves they write the same."""
    rows = np.arange(48)
    together = written(adaptive("opt"), rows)
    for alone in (rows[::-1], rows[7:8]):
        other = written(adaptive("opt"), alone)
        np.testing.assert_array_equal(other.tokens, together.tokens[alone])
        np.testing.assert_array_equal(other.counts[1].histogram, together.counts[1].histogram[alone])
    assert len(np.unique(np.asarray(together.counts[1].drafted))) > 5


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_extremes_are_blocks_of_a_fixed_length(family):
    """Never stopping is Speculative, token for token, pass for pass; always stopping drafts nothing, or one
    token where that is decided before the drafter is asked."""
    whole = written(adaptive(family, stop_below=-1.0), np.arange(32), family=family)
    fixed = written(
        Speculative(Autoregressive(MODEL), MODEL, METHODS[family], MOST), np.arange(32), family=family
    )
    np.testing.assert_array_equal(whole.tokens, fixed.tokens)
    np.testing.assert_array_equal(whole.counts[0].passes, fixed.counts[0])
    none = written(adaptive(family, stop_below=2.0), np.arange(32), family=family)
    per_round = family == "speculative"
    np.testing.assert_array_equal(none.counts[1].drafted, per_round * none.counts[1].rounds)
    np.testing.assert_array_equal(none.counts[0].passes, none.counts[1].rounds)
    assert per_round or (none.counts[1].rounds == none.length).all()


def test_a_row_learns_what_its_drafter_is_worth():
    """A drafter that is its own verifier is always right, whatever it says of itself: blocks grow."""

    def drafted(steps, params):
        keys, ones = jax.vmap(jax.random.key)(np.arange(64)), np.ones((64, 1), np.int32)
        return generate(
            adaptive("speculative", stop_below=0.3),
            params,
            keys,
            ones,
            ones[:, 0],
            SamplingOptions(),
            jnp.zeros(1),
            max_new_tokens=steps,
            eos_id=NO_TOKEN,
        ).counts

    (seen, long), (_, short) = (drafted(steps, (TABLES[0], TABLES[0])) for steps in (120, 4))
    np.testing.assert_array_equal(seen.kept, long.accepted)
    assert (np.asarray(seen.bias) > 0.2).all()
    assert long.drafted.sum() / long.rounds.sum() > 1.2 * short.drafted.sum() / short.rounds.sum()
    worse, _ = drafted(120, (TABLES[0], -TABLES[0]))
    assert (np.asarray(worse.bias) < np.asarray(seen.bias)).all()


def test_of_equal_tokens_the_drafter_is_half_sure():
    laws = np.array([[0.6, 0.3, 0.1, 0], [0.45, 0.45, 0.1, 0], [0.25] * 4, [0, 1, 0, 0]], np.float32)
    np.testing.assert_allclose(confidence(jnp.asarray(laws)), [2 / 3, 1 / 2, 1 / 2, 1], atol=1e-6)


def test_a_row_learns_from_tested_tokens_only():
    """Those up to and with a rejection, by the drafter's own law at each, which no temperature changes."""
    result = written(adaptive("opt"), np.arange(64), temperature=0.5)
    seen, counts = result.counts
    tested, kept, hoped = (np.asarray(x) for x in (seen.tested, seen.kept, seen.hoped))
    np.testing.assert_array_equal(kept, counts.accepted)
    cut = tested - kept - (np.asarray(result.origin) == Origin.CORRECTION).sum(axis=1)
    assert set(cut) <= {0, 1}  # the round that the limit cut may have been about to reject one
    whole = np.flatnonzero(cut == 0)
    assert len(whole) > 16 and (np.asarray(counts.drafted)[whole] > tested[whole]).any()
    for row in whole:
        text, sure = [0, 1, *np.asarray(result.tokens)[row]], 0.0
        for n, origin in enumerate(np.asarray(result.origin)[row]):
            if origin in (Origin.DRAFT, Origin.CORRECTION):
                second, first = np.sort(np.exp(TABLES[0][text[n], text[n + 1]].astype(float)))[-2:]
                sure += first / (first + second)
        assert hoped[row] == pytest.approx(sure, abs=1e-4)


@pytest.mark.full(quick=["token_v3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_ends_with_the_end_of_the_text(family):
    """Both models are sure of 2 after the prompt, and of the end after that: nothing is drafted behind it."""
    sure = np.zeros((VOCAB,) * 3, np.float32)
    sure[:, :, 2], sure[:, 2] = 30, 30 * np.eye(VOCAB)[EOS]
    ones = np.ones((2, 1), np.int32)
    result = generate(
        adaptive(family),
        (sure, sure),
        jax.random.split(jax.random.key(0), 2),
        ones,
        ones[:, 0],
        SamplingOptions(),
        jnp.zeros(1),
        max_new_tokens=8,
        eos_id=EOS,
    )
    assert np.asarray(result.tokens)[:, :3].tolist() == [[2, EOS, NO_TOKEN]] * 2
    assert result.counts[1].drafted.tolist() == result.counts[0].passes.tolist() == [2, 2]


@dataclasses.dataclass(frozen=True)
class Watched(TableLM):
    """Notes how many tokens its calls read; of two, every one has its own list."""

    widths: tuple = dataclasses.field(default=(), compare=False)

    def extend(self, params, tokens, cache):
        self.widths[0].append(tokens.shape[1])
        return super().extend(params, tokens, cache)


@pytest.mark.parametrize(
    "rule,widths", [(METHODS["opt"], {5, 9, 13}), (METHODS["lookahead"], {13})], ids=["opt", "lookahead"]
)
def test_drafts_are_scored_in_three_widths(rule, widths):
    """By a rule that reads its place in the round in one: another would tell how long the draft is."""
    verifier, ones = Watched(VOCAB, ([],)), np.ones((2, 1), np.int32)
    generate.lower(
        Adaptive(Autoregressive(MODEL), verifier, rule, 12),
        tuple(TABLES[:2]),
        jax.random.split(jax.random.key(0), 2),
        ones,
        ones[:, 0],
        SamplingOptions(),
        jnp.zeros(1),
        max_new_tokens=24,
        eos_id=NO_TOKEN,
    )
    assert {width for width in verifier.widths[0] if width > 1} == widths


class Switches(Adaptive):
    """Takes the width by a conditional."""

    def verified(self, params, caches, rows, eos_id, drafted, below, drafter_counts):
        def of(width):
            def narrow(caches):
                cut = drafted._replace(
                    **{name: getattr(drafted, name)[:, : width + 1] for name in drafted._fields[:-1]}
                )
                block, *rest = Speculative.verified(
                    self, params, (below, caches), rows, eos_id, cut, below, drafter_counts
                )
                columns = (fitted(x, (self.width, *x.shape[2:])) for x in block[:-1])
                return block._make((*columns, block.size)), *rest

            return narrow

        return jax.lax.switch(jnp.max(drafted.size) // 3, [of(2), of(MOST)], caches[1])


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's CPU backend")
def test_no_width_copies_a_cache():
    """A conditional that writes to caches makes XLA copy all of them twice a round."""
    model, length = model_of(TINY_T5), np.array([7])
    params, row = model.init(0), np.ones((1, 7), np.int32)

    def copied(kind):
        sampler = kind(Autoregressive(model), model, METHODS["speculative"], MOST)
        program = (
            generate.lower(
                sampler,
                (params, params),
                jax.random.split(jax.random.key(0), 1),
                row,
                length,
                SamplingOptions(0.0),
                jnp.zeros(1),
                max_new_tokens=21,
                eos_id=1,
            )
            .compile()
            .as_text()
            .split("\nENTRY")[0]
        )
        _, cache = jax.eval_shape(lambda: model.prefill(params, row, length, 22 + sampler.overhang))
        shape = ",".join(map(str, cache.keys[0].shape))
        return program.count(f"f32[{shape}]"), len(re.findall(rf"= f32\[{shape}\]\S* copy\(", program))

    (there, copies), (_, planted) = copied(Adaptive), copied(Switches)
    assert there and copies == 0 < planted
