"""Hierarchies follow their law: the recursion by enumeration, the compiled sampler against the recursion."""

import dataclasses
from functools import cache, partial
from math import ceil

import hierarchy_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hierarchy_reference import MODULUS, AsABlock, Hierarchy, Stopping, Uniforms, UniformsOfRounds, deviation
from joint_laws import (
    EOS,
    FAIL_BELOW,
    PROMPTS,
    TABLES,
    VOCAB,
    lenience,
    nested,
    p_value,
    p_values,
    quick,
    unlikely,
    with_rules,
)
from toys import TableCache, TableLM, sequence_law, table

from speccascade_jax.core.counters import Counters
from speccascade_jax.core.loop import advance, begin, generate, requests
from speccascade_jax.core.protocols import NO_TOKEN, Origin
from speccascade_jax.core.randomness import Role, noise
from speccascade_jax.core.rounds import noise_sizes_of
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Speculative, hierarchy
from speccascade_jax.core.samplers import speculative as samplers
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN
from speccascade_jax.models.cache import write
from speccascade_jax.planning.prediction import Candidates, predict

SURE, LONG, HAND_OVERS = "speculative", 24, ("need", "truncate", "keep")

# The recursion, enumerated

EXACT = [  # methods, block sizes, the vocabulary's size
    ((SURE,), (2,), 3),
    (("token_v3",), (3,), 3),
    ((SURE, SURE), (1, 2), 3),
    ((SURE, SURE), (2, 3), 3),
    (("opt", SURE), (2, 2), 3),
    ((SURE, "token_v3"), (2, 2), 3),
    (("chow", "opt"), (1, 1), 3),
    ((SURE, "lossy"), (3, 2), 2),
    ((SURE, SURE, SURE), (2, 2, 3), 2),
    ((SURE, SURE, SURE), (1, 1, 1), 3),
    (("opt", SURE, SURE), (1, 2, 2), 3),
    ((SURE, "token_v3", SURE), (1, 2, 2), 3),
    (("mixture", "typical"), (2, 2), 2),
    (("mixture", "typical"), (1, 2), 3),
    ((SURE, SURE, "diff"), (2, 1, 2), 2),
    (("token_v3", "bild_star", "opt"), (1, 2, 2), 2),
]
SHAPINGS = [{}, {"top_p": 0.7}, {"top_k": 2, "temperature": 0.7}, {"temperature": 0.0}]


def wrong_by(kind, methods, sizes, vocab_size, hand_over, eos, steps=4, seed=39, **options):
    """How far the enumerated law of texts is from the target's."""
    tables = [table(seed + n, vocab_size) for n in range(len(sizes) + 1)]
    alphas = [lenience(method) for method in methods]
    law = kind(tables, methods, alphas, sizes, hand_over, eos, **options).text_law((1,), steps)
    assert abs(sum(law.values()) - 1) < 1e-12
    return deviation(law, sequence_law(tables, methods, alphas, (1,), steps=steps, eos=eos, **options))


@pytest.mark.parametrize("kind", [Hierarchy, AsABlock, Stopping])
@pytest.mark.parametrize("hand_over", HAND_OVERS)
def test_the_recursion_is_exact(hand_over, kind, full):
    """An end of sequence stands anywhere in a draft; the second text is shorter than most drafts."""
    for number, (methods, sizes, vocab_size) in enumerate(EXACT):
        ends = vocab_size - 1, NO_TOKEN, 0
        for n, options in enumerate(SHAPINGS) if full else [(0, SHAPINGS[number % len(SHAPINGS)])]:
            asked = methods, sizes, vocab_size, hand_over, ends[(number + n) % 3 if full else 0]
            assert wrong_by(kind, *asked, **options) < 1e-12
            assert wrong_by(kind, *asked, steps=2, **options) < 1e-12


PLANTED = [  # what is wrong, a hierarchy and the rules of handing over that show it
    *(
        (kind, (SURE, SURE), HAND_OVERS)
        for kind in (reference.LowerLaw, reference.ResidualLaw, reference.ReusedUniform, reference.Picky)
    ),
    (reference.BonusFromP, (SURE, "token_v3"), HAND_OVERS),
    (reference.BonusFromP, ("token_v3", "opt"), ["need"]),  # below a lossless level it would be as good
    (reference.SurplusUnderARule, (SURE, "token_v3"), ["keep"]),
    (reference.LeftoverKept, (SURE, SURE), ["truncate"]),
]


@pytest.mark.full(quick=["LowerLaw--", "ResidualLaw--", "ReusedUniform--", "Picky--", "BonusFromP--1"])
@pytest.mark.parametrize("kind,methods,hand_overs", PLANTED, ids=lambda x: getattr(x, "__name__", ""))
def test_wrong_recursions_are_seen(kind, methods, hand_overs):
    for hand_over in hand_overs:
        for eos in (NO_TOKEN, 2):
            assert wrong_by(kind, methods, (2, 2), 3, hand_over, eos) > 1e-3


# The compiled sampler against the recursion


@dataclasses.dataclass(frozen=True)
class WholeLM(TableLM):
    """reference.hashed() as a model: every token of its cache counts, at its place."""

    def extend(self, params, tokens, cache):
        written = write(cache.tokens, tokens, cache.length)
        place = jnp.arange(written.shape[1])
        sums = jnp.cumsum((written + 1) * (7 * place * place + place + 1) % MODULUS, axis=1) % MODULUS
        position = cache.length[:, None] + jnp.arange(tokens.shape[1])
        return (
            params[jnp.take_along_axis(sums, position, axis=1)],
            TableCache(written, cache.length + tokens.shape[1]),
        )


@cache
def whole_table(seed):
    """Logits [MODULUS, VOCAB] near those of seed 0, so that drafts are accepted about as often as not."""
    shared, variation = (np.random.default_rng(n).normal(size=(MODULUS, VOCAB)) for n in (0, seed))
    return (1.2 * shared + 0.6 * variation).astype(np.float32)


def prompts(rows):
    """PROMPTS in turn: inputs, lengths."""
    inputs, lengths = np.zeros((rows, max(map(len, PROMPTS))), np.int32), np.zeros(rows, np.int32)
    for row in range(rows):
        prompt = PROMPTS[row % len(PROMPTS)]
        inputs[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    return inputs, lengths


def asked_of(methods, sizes, hand_over, rows, model=WholeLM, lossless=None):
    """A sampler and generate()'s arguments. lossless: of each level, whether a lossless method says so."""
    chosen = [METHODS[name] for name in methods]
    for level, says in enumerate(lossless or ()):
        chosen[level] = dataclasses.replace(chosen[level], lossless=chosen[level].lossless and says)
    sampler = hierarchy([model(VOCAB)] * (len(methods) + 1), chosen, sizes, hand_over, (TOKEN, BLOCK))
    tables = [whole_table(n + 1) for n in range(len(sizes) + 1)]
    keys = jax.vmap(jax.random.key)(jnp.arange(rows))
    return (
        sampler,
        nested(tables),
        keys,
        *prompts(rows),
        SamplingOptions(),
        jnp.array([lenience(name) for name in methods]),
    )


def by_level(counts):
    """Counts of each model from the smallest up: passes, then Counters."""
    levels = []
    while isinstance(counts, tuple) and not isinstance(counts, Counters):
        counts, level_counts = counts
        levels.append(level_counts)
    return [counts, *levels[::-1]]


COMPILED = [
    ((SURE,), (3,)),
    (("opt",), (2,)),
    ((SURE, SURE), (1, 3)),
    ((SURE, "opt"), (2, 3)),
    (("token_v3", SURE), (2, 4)),
    (("opt", "token_v3"), (3, 1)),
    ((SURE, SURE, SURE), (1, 3, 6)),
    ((SURE, "opt", SURE), (2, 2, 4)),
    (("opt", SURE, "token_v3"), (1, 2, 3)),
    ((SURE, SURE, "opt"), (2, 3, 4)),
]


def differences(methods, sizes, hand_over, eos, rows, limits=None, ways=None):
    """Rows that the compiled loop decodes in another way than the recursion with the same uniforms. `ways`:
    each row's, by token or as a block."""
    ways = np.zeros(rows, int) if ways is None else ways
    sampler, params, keys, inputs, lengths, *asked = asked_of(methods, sizes, hand_over, rows)
    limits = np.full(rows, LONG) if limits is None else limits
    result = generate(
        sampler,
        params,
        keys,
        inputs,
        lengths,
        *asked,
        max_new_tokens=LONG,
        eos_id=eos,
        limits=limits,
        verifications=ways,
    )
    numbers = [
        [np.asarray(x) for x in noise(keys, shapes, 64).levels]
        for shapes in (((),) * (len(sizes) + 1), noise_sizes_of(sampler))
    ]
    recursions = [
        kind(
            [whole_table(n + 1) for n in range(len(sizes) + 1)],
            methods,
            [lenience(name) for name in methods],
            sizes,
            hand_over,
            eos,
        )
        for kind in (Hierarchy, AsABlock)
    ]
    passes, *counters = by_level(result.counts)
    wrong = []
    for row, way in enumerate(ways):
        uniforms = (Uniforms, UniformsOfRounds)[way]([x[row] for x in numbers[way]])
        block = recursions[way].decoded(tuple(map(int, inputs[row, : lengths[row]])), limits[row], uniforms)
        size = len(block)
        output = [np.asarray(x)[row, :size].tolist() for x in (result.tokens, result.origin, result.level)]
        expected = [[w.token for w in block], [w.kind for w in block], [w.level for w in block]]
        counted = {(0, "passes"): int(passes[row])} | {
            (level, name): int(getattr(counts, name)[row])
            for level, counts in enumerate(counters, 1)
            for name in ("rounds", "drafted", "accepted", "emitted")
        }
        if (
            int(result.length[row]) != size
            or output != expected
            or counted != {key: uniforms.counts[key] for key in counted}
        ):
            wrong.append(row)
    return wrong


@pytest.mark.full(quick=["methods11-sizes11-keep"])
@pytest.mark.parametrize(
    "methods,sizes,hand_over",
    quick(
        *with_rules(COMPILED),
        *(((SURE, "opt"), (2, 3), h) for h in ("truncate", "keep")),
        among=[((SURE, "opt"), (2, 3), "need"), ((SURE, "opt"), (2, 3), "keep")],
    ),
)
def test_the_compiled_loop_is_the_recursion(methods, sizes, hand_over, full):
    """Whatever else is in the batch: rows verified in the other way, texts of all lengths, or nothing that is
    still going on; in one program. The recursion's laws are float64, which moves a decision once in some
    10**6: the seeds have none."""
    rows = 32
    for eos in (EOS, NO_TOKEN) if full and len(sizes) == 2 else (EOS,):
        alone = np.where(np.arange(rows) == 3, LONG, 0)
        programs = set()
        for n, limits in enumerate((None, np.arange(rows) % (LONG + 1), alone, np.roll(alone, 20))):
            ways = (np.arange(rows) // len(PROMPTS) + n) % 2
            limits = np.full(rows, LONG) if limits is None else limits
            assert differences(methods, sizes, hand_over, eos, rows, limits, ways) == []
            programs.add(generate._cache_size())
        assert len(programs) == 1


def caches_of(caches):
    return [caches] if isinstance(caches, TableCache) else [*caches_of(caches[0]), caches[1]]


@pytest.mark.full
@pytest.mark.parametrize("methods,sizes,hand_over", with_rules(COMPILED[2:])[::2])
def test_caches_hold_the_text(methods, sizes, hand_over):
    """After each round: a prefix of the committed text, short of it by no more than is read again."""
    sampler, params, *asked = asked_of(methods, sizes, hand_over, 8)
    state = jax.jit(partial(begin, max_new_tokens=LONG), static_argnums=0)(
        sampler, params, requests(sampler, *asked, None, None, LONG)
    )
    step = jax.jit(partial(advance, eos_id=NO_TOKEN), static_argnums=0)
    allowed, reader = [0], sampler
    while isinstance(reader, Speculative):
        reader = reader.reader
        allowed.append(reader.behind)
    for _ in range(6):
        state = step(sampler, params, state)
        for level_cache, lacks in zip(caches_of(state.caches), allowed[::-1], strict=True):
            for row in range(8):
                prompt = PROMPTS[row % len(PROMPTS)]
                text = [*prompt, *np.asarray(state.tokens)[row, : int(state.emitted[row])].tolist()]
                length = int(level_cache.length[row])
                if state.rows.room[row]:
                    assert len(text) - 1 - lacks <= length <= len(text) - 1
                length = min(length, len(text) - 1)
                assert np.asarray(level_cache.tokens)[row, :length].tolist() == text[:length]


@pytest.mark.full
@pytest.mark.parametrize(
    "methods,sizes,hand_over",
    [
        *(((SURE, SURE), (2, 4), hand_over) for hand_over in HAND_OVERS),
        ((SURE, "opt", SURE), (1, 3, 4), "truncate"),
        ((SURE, "opt", SURE), (1, 3, 4), "keep"),
    ],
)
def test_a_spared_pass_changes_nothing(methods, sizes, hand_over):
    """The same texts as with the pass. With a token more, need and keep verify other blocks above the lowest
    level: there only that level spares it."""

    def run(lossless):
        sampler, *asked = asked_of(methods, sizes, hand_over, 64, lossless=lossless)
        return generate(sampler, *asked, max_new_tokens=LONG, eos_id=NO_TOKEN)

    levels = len(sizes) if hand_over == "truncate" else 1
    spared, whole = run([True] * len(sizes)), run([False] * levels + [True] * (len(sizes) - levels))
    for name in ("tokens", "origin", "level", "length"):
        np.testing.assert_array_equal(getattr(spared, name), getattr(whole, name))
    (passes, *counters), (more, *others) = by_level(spared.counts), by_level(whole.counts)
    assert (np.asarray(passes) < np.asarray(more)).all()
    np.testing.assert_array_equal(counters[-1].rounds, others[-1].rounds)


# Laws of the compiled sampler

LAWS = [  # how drafts are handed over, block sizes, hierarchies
    ("need", (2, 2), [(SURE, "opt")]),
    ("truncate", (1, 3), [("token_v3", SURE), (SURE, "opt")]),
    ("keep", (1, 1), [(SURE, SURE)]),
    ("need", (2, 2, 2), [("opt", SURE, SURE)]),
    ("truncate", (1, 2, 2), [(SURE, "token_v3", SURE)]),
    ("keep", (1, 2, 3), [(SURE, SURE, SURE), (SURE, "chow", "opt")]),
]


@pytest.mark.parametrize("hand_over,sizes,hierarchies", quick(*LAWS, among=[LAWS[0]]))
def test_hierarchies_follow_their_law(hand_over, sizes, hierarchies, rows, full):
    """Settings of one program: temperatures and top_p are traced; of four models each hierarchy has one.
    Lossless greedy texts: below."""
    shapings = [{"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0, "top_p": 1.0}]
    settings = [(methods, options) for methods in hierarchies for options in shapings]
    if len(sizes) > 2:
        settings = settings[::3]
    if full:
        greedy = {"temperature": 0.0, "top_p": 1.0}
        settings += [(methods, greedy) for methods in hierarchies if set(methods) != {SURE}]
    methods = [tuple(dict.fromkeys(names)) for names in zip(*hierarchies, strict=True)]
    assert not unlikely(p_values(methods, sizes, settings, rows=rows, hand_over=hand_over))


def lower_law(self, draft, pi, verdict):
    """Drafted tokens are handed up with the law they came with."""
    kept = (jnp.arange(pi.shape[1]) < verdict.num_accepted[:, None])[..., None]
    return jnp.where(kept, draft.probs, pi)


def residual_law(self, draft, pi, verdict):
    """Replaced tokens are handed up with the residual."""
    here = (
        jnp.arange(pi.shape[1])
        == jnp.where(verdict.num_accepted < draft.size, verdict.num_accepted, -1)[:, None]
    )[..., None]
    rest = jnp.maximum(pi - draft.probs, 0.0)
    return jnp.where(here, rest / jnp.maximum(rest.sum(-1, keepdims=True), 1e-9), pi)


def hands_up(law, patch):
    """Every block leaves with law(sampler, draft, pi, verdict)."""
    step, verify, seen = Speculative.step, samplers.verify, {}

    def verified(accept_u, draw_u, draft, pi, *ways):
        seen["last"] = draft, pi, verify(accept_u, draw_u, draft, pi, *ways)
        return seen["last"][-1]

    def stepped(self, *args):
        block, *rest = step(self, *args)
        return block._replace(probs=law(self, *seen["last"])), *rest

    patch.setattr(samplers, "verify", verified)
    patch.setattr(Speculative, "step", stepped)


def one_uniform(patch):
    """All levels accept by the same uniform."""
    uniforms = samplers.uniforms
    patch.setattr(
        samplers,
        "uniforms",
        lambda rows, level, role, *rest: uniforms(rows, 1 if role == Role.ACCEPT else level, role, *rest),
    )


def bonus_from_p(patch):
    target = Speculative.target

    def wrong(self, scores, rows, draft):
        pi, deferred = target(self, scores, rows, draft)
        bonus = (jnp.arange(pi.shape[1]) == draft.size[:, None])[..., None]
        return jnp.where(bonus, scores.p_sampled, pi), deferred

    patch.setattr(Speculative, "target", wrong)


BUGS = {
    "lower law": (partial(hands_up, lower_law), (SURE, SURE)),
    "residual law": (partial(hands_up, residual_law), (SURE, SURE)),
    "one uniform": (one_uniform, (SURE, SURE)),
    "bonus from p, above": (bonus_from_p, (SURE, "token_v3")),
    "bonus from p, below": (bonus_from_p, ("token_v3", "opt")),
}


@pytest.mark.full(quick=["residual law-truncate"])
@pytest.mark.parametrize(
    "bug,hand_over",
    [
        pytest.param(bug, rule, id=f"{bug}-{rule}")
        for n, bug in enumerate(BUGS)
        for rule in (HAND_OVERS if bug == "residual law" else HAND_OVERS[n % 3 :][:1])
    ],
)
def test_the_law_test_catches(bug, hand_over, rows, monkeypatch):
    plant, methods = BUGS[bug]
    jax.clear_caches()
    with monkeypatch.context() as patch:
        plant(patch)
        assert (
            p_value(
                methods, [lenience(m) for m in methods], (2, 2), rows=min(rows, 60_000), hand_over=hand_over
            )
            < FAIL_BELOW
        )
    jax.clear_caches()


@pytest.mark.full
def test_a_cache_not_caught_up_is_seen(monkeypatch):
    """No law depends on it: below a lossless level drafts may be anything. The recursion's texts differ."""
    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(Speculative, "reader", property(lambda self: self.drafter))
        assert differences((SURE, SURE), (2, 3), "need", NO_TOKEN, 4)
    jax.clear_caches()


# Identities


@pytest.mark.full
@pytest.mark.parametrize("hand_over", HAND_OVERS)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_temperature_zero_is_the_greedy_text(levels, hand_over):
    """Of the largest model, for blocks of 1 and blocks longer than the text, too."""
    tables = TABLES[: levels + 1]
    expected = []
    for prompt in PROMPTS:
        text = list(prompt)
        while len(text) < len(prompt) + 12 and text[-1] != EOS:
            text.append(int(np.argmax(tables[-1][(0, *text)[-2], text[-1]])))
        expected.append(text[len(prompt) :] + [-1] * (12 + len(prompt) - len(text)))
    kinds = (2, 30, 14)[-levels:], (1,) * levels, (5, 3, 1)[:levels]
    for sizes in kinds if levels < 2 else [kinds[HAND_OVERS.index(hand_over)]]:
        sampler = hierarchy([TableLM(VOCAB)] * len(tables), [METHODS[SURE]] * levels, sizes, hand_over)
        inputs, lengths = prompts(2)
        result = generate(
            sampler,
            nested(tables),
            jax.random.split(jax.random.key(0), 2),
            inputs,
            lengths,
            SamplingOptions(0.0),
            jnp.zeros(levels),
            max_new_tokens=12,
            eos_id=EOS,
        )
        assert np.asarray(result.tokens).tolist() == expected


@pytest.mark.full
@pytest.mark.parametrize("sizes,hand_over", [*(((1, 5), h) for h in HAND_OVERS), ((2, 3, 7), "keep")])
def test_equal_models_accept_everything(sizes, hand_over):
    sampler = hierarchy([TableLM(VOCAB)] * (len(sizes) + 1), [METHODS[SURE]] * len(sizes), sizes, hand_over)
    keys, length = jax.random.split(jax.random.key(0), 256), 64
    result = generate(
        sampler,
        nested(TABLES[:1] * (len(sizes) + 1)),
        keys,
        *prompts(256),
        SamplingOptions(),
        jnp.zeros(len(sizes)),
        max_new_tokens=length,
        eos_id=NO_TOKEN,
    )
    assert not (np.asarray(result.origin) == Origin.CORRECTION).any()
    _, *counters = by_level(result.counts)
    if hand_over == "keep":  # nothing is cut, except by the text's end
        for counts in counters[:-1]:
            np.testing.assert_array_equal(counts.accepted, counts.drafted)
    else:
        rounds = np.asarray(counters[-1].rounds)
        assert (rounds == ceil(length / (sizes[-1] + 1))).all()
        for level in range(len(sizes) - 1, 0, -1):
            rounds = rounds * ceil(sizes[level] / (sizes[level - 1] + 1))
            np.testing.assert_array_equal(counters[level - 1].rounds, rounds)


@pytest.mark.full
@pytest.mark.parametrize("method", [SURE, "opt"])
def test_one_verifier_has_nothing_to_hand_over(method):
    plain, *others = (
        generate(sampler, *asked, max_new_tokens=LONG, eos_id=EOS)
        for sampler, *asked in (asked_of((method,), (3,), hand_over, 64) for hand_over in HAND_OVERS)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, plain, other)


@pytest.mark.full
@pytest.mark.parametrize("hand_over", ["need", "truncate"])
@pytest.mark.parametrize("sizes", [(2, 4), (1, 3, 5)])
def test_passes_are_those_predicted(sizes, hand_over):
    """For models whose laws do not depend on the text, where the prediction is exact, the cut at a text's end
    and all."""
    length, rows, count = 200, 256, len(sizes) + 1
    shared, *variations = (np.random.default_rng(n).normal(size=VOCAB) for n in range(count + 1))
    logits = [shared + 0.6 * variation for variation in variations]
    laws = [np.exp(row) / np.exp(row).sum() for row in logits]
    acceptance = np.array([[np.minimum(p, q).sum() for p in laws] for q in laws])
    names = tuple("abcd"[:count])
    models = Candidates(names, np.ones((count, 30)), acceptance, lengths=(length,))
    per_token = np.array(predict(models, names, sizes, hand_over).passes_per_token)
    sampler = hierarchy([TableLM(VOCAB)] * count, [METHODS[SURE]] * len(sizes), sizes, hand_over)
    tables = [np.broadcast_to(row, (VOCAB,) * 3).astype(np.float32) for row in logits]
    keys = jax.random.split(jax.random.key(0), rows)
    result = generate(
        sampler,
        nested(tables),
        keys,
        *prompts(rows),
        SamplingOptions(),
        jnp.zeros(len(sizes)),
        max_new_tokens=length,
        eos_id=NO_TOKEN,
    )
    passes, *counters = by_level(result.counts)
    row_passes = np.stack([passes, *(counts.rounds for counts in counters)], axis=1).astype(float)
    error = row_passes.std(axis=0, ddof=1) / np.sqrt(rows)
    assert (np.abs(row_passes.mean(axis=0) - length * per_token) < 4 * error + 1e-9).all()
    np.testing.assert_allclose(row_passes.mean(axis=0) / length, per_token, rtol=0.02)
