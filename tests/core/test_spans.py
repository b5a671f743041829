"""Lenience by span: the law of every row against enumeration, and bugs that must be seen.

One prompt ends with the first of the marker's three tokens, the other one with all of them: neither counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, TABLES, VOCAB, after, oracle, table_of
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core import loop, rounds, spans
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Adaptive, Autoregressive, Speculative, hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import BLOCK, TOKEN

pytestmark = pytest.mark.long
STEPS = 6
ROWS = 200_000
PROMPTS = [(2, 1), (1, 0, 0)]
MARKER = (1, 0, 0)
LEVELS = {"opt": (0.0, 5.0), "token_v3": (0.05, 0.95), "mixture": (0.0, 1.0), "lookahead": (0.0, 5.0)}
"""Two leniences at which a rule writes unlike texts: as good as the verifier's, and as the drafter's."""


def decoded(sampler, params, kinds, alphas, methods=None, ways=None, rows=ROWS, seed=0, temperature=1.0):
    """Tokens of `rows` rows, and each row's kind: of these (prompt, markers) in turn."""
    which = np.arange(rows) % len(kinds)
    width = max(len(prompt) for prompt, _ in kinds)
    inputs = np.array([[*prompt, *[0] * (width - len(prompt))] for prompt, _ in kinds])[which]
    lengths = np.array([len(prompt) for prompt, _ in kinds], np.int32)[which]
    table = jax.tree.map(lambda x: x[which], table_of([markers for _, markers in kinds]))
    result = loop.generate(
        sampler,
        params,
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows)),
        inputs,
        lengths,
        SamplingOptions(temperature),
        np.asarray(alphas, np.float32)[which],
        methods=None if methods is None else np.asarray(methods)[which],
        verifications=None if ways is None else ways[which],
        max_new_tokens=STEPS,
        eos_id=EOS,
        markers=table,
    )
    return np.asarray(result.tokens), which


def pair(method, gamma=3):
    models = [TableLM(VOCAB)] * 2
    return hierarchy(models, [METHODS[method]], [gamma]), (TABLES[0], TABLES[1])


def p_value(method="opt", *, rows=ROWS, seed=0, markers=None):
    """The smaller p-value of the two prompts, times two (Bonferroni)."""
    strict, lenient = LEVELS[method]
    markers = [(MARKER, (lenient,))] if markers is None else markers
    tokens, which = decoded(
        *pair(method), [(prompt, markers) for prompt in PROMPTS], [(strict,)] * 2, rows=rows, seed=seed
    )
    leniences = after(markers, (strict,))
    laws = [
        sequence_law(TABLES[:2], [oracle(method)], leniences, prompt, steps=STEPS, eos=EOS)
        for prompt in PROMPTS
    ]
    return 2 * min(chi_square(tokens[which == n], law) for n, law in enumerate(laws))


@pytest.mark.parametrize(
    "method", ["opt", *(pytest.param(m, marks=pytest.mark.full) for m in ("token_v3", "mixture"))]
)
def test_joint_law(method):
    assert p_value(method) > FAIL_BELOW


def test_the_marker_matters():
    """The control: the law without the marker is another one by far."""
    strict, lenient = LEVELS["opt"]
    tokens, which = decoded(*pair("opt"), [(p, [(MARKER, (lenient,))]) for p in PROMPTS], [(strict,)] * 2)
    law = sequence_law(TABLES[:2], ["opt"], (strict,), PROMPTS[0], steps=STEPS, eos=EOS)
    assert chi_square(tokens[which == 0], law) < 1e-12


@pytest.mark.full
def test_a_later_marker_ends_the_span_of_an_earlier():
    strict, lenient = LEVELS["opt"]
    assert p_value(markers=[((2,), (strict,)), ((1, 0), (lenient,))]) > FAIL_BELOW


@pytest.mark.full
def test_of_markers_that_end_together_the_last_of_the_table_decides():
    strict, lenient = LEVELS["opt"]
    assert p_value(markers=[((0,), (lenient,)), ((1, 0), (strict,))]) > FAIL_BELOW


HIERARCHIES = [
    (("opt", "token_v3"), (2, 2), "need"),
    pytest.param(("token_v3", "opt"), (3, 2), "truncate", marks=pytest.mark.full),
    pytest.param(("opt", "opt"), (2, 3), "keep", marks=pytest.mark.full),
]


@pytest.mark.full
@pytest.mark.parametrize("methods,blocks,hand_over", HIERARCHIES)
def test_joint_law_of_three_models(methods, blocks, hand_over):
    """Every level has a lenience before and after: the drafter's drafts are of the law after the marker that
    it has drafted itself."""
    strict, lenient = zip(*(LEVELS[method] for method in methods), strict=True)
    first, later = (strict[0], lenient[1]), (lenient[0], strict[1])
    sampler = hierarchy([TableLM(VOCAB)] * 3, [METHODS[m] for m in methods], blocks, hand_over)
    kinds = [(prompt, [(MARKER[:2], later)]) for prompt in PROMPTS]
    tokens, which = decoded(sampler, ((TABLES[0], TABLES[1]), TABLES[2]), kinds, [first] * 2)
    leniences = after([(MARKER[:2], later)], first)
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(TABLES[:3], methods, leniences, prompt, steps=STEPS, eos=EOS)
        assert chi_square(tokens[which == n], law) > FAIL_BELOW / 2


@pytest.mark.full
def test_joint_law_of_unlike_rows():
    """Rows with a span, without one, with other markers, another method and the other verification in a batch
    of one program: each follows its law. The control: the first of each way, without their marker."""
    methods, ways = ("opt", "token_v3"), (TOKEN, BLOCK)
    models = [TableLM(VOCAB)] * 2
    sampler = hierarchy(models, [tuple(METHODS[m] for m in methods)], [2], verification=ways)
    chosen = [0, 0, 1, 1] * 2
    bases = [LEVELS[methods[number]][0] for number in chosen]
    markers = [
        [(MARKER, (LEVELS["opt"][1],))],
        [],
        [((2,), (LEVELS["token_v3"][1],)), ((0, 1), (0.3,))],
        [(MARKER, (LEVELS["token_v3"][1],))],
    ] * 2
    kinds = [(PROMPTS[n % 2], row) for n, row in enumerate(markers)]
    programs = loop.generate._cache_size()
    tokens, which = decoded(
        sampler,
        (TABLES[0], TABLES[1]),
        kinds,
        [(base,) for base in bases],
        [(number,) for number in chosen],
        ways=np.arange(8) // 4,
        rows=ROWS,
    )
    assert loop.generate._cache_size() == programs + 1
    for n, (prompt, row) in enumerate(kinds):
        laws = [
            sequence_law(TABLES[:2], [methods[chosen[n]]], leniences, prompt, steps=STEPS, eos=EOS)
            for leniences in (after(row, (bases[n],)), (bases[n],))
        ]
        chances = [chi_square(tokens[which == n], law) for law in laws]
        assert chances[0] > FAIL_BELOW / 8
        assert n % 4 or chances[1] < FAIL_BELOW


@pytest.mark.full
def test_joint_law_of_adaptive_blocks():
    strict, lenient = LEVELS["opt"]
    model = TableLM(VOCAB)
    sampler = Adaptive(Autoregressive(model), model, METHODS["opt"], 4, stop_below=0.5)
    tokens, which = decoded(
        sampler, (TABLES[0], TABLES[1]), [(p, [(MARKER, (lenient,))]) for p in PROMPTS], [(strict,)] * 2
    )
    for n, prompt in enumerate(PROMPTS):
        leniences = after([(MARKER, (lenient,))], (strict,))
        law = sequence_law(TABLES[:2], ["opt"], leniences, prompt, steps=STEPS, eos=EOS)
        assert chi_square(tokens[which == n], law) > FAIL_BELOW / 2


@pytest.mark.full
def test_greedy_texts_are_those_of_the_spans():
    """At temperature 0 the law is a single text; it is enumerated in float64."""
    strict, lenient = LEVELS["opt"]
    for marker in [(a, b) for a in range(3) for b in range(3)]:
        markers = [(marker, (lenient,))]
        tokens, _ = decoded(
            *pair("opt"), [(p, markers) for p in PROMPTS], [(strict,)] * 2, rows=2, temperature=0.0
        )
        for n, prompt in enumerate(PROMPTS):
            law = sequence_law(
                TABLES[:2],
                ["opt"],
                after(markers, (strict,)),
                prompt,
                steps=STEPS,
                eos=EOS,
                temperature=0,
            )
            assert tuple(t for t in tokens[n].tolist() if t >= 0) == max(law, key=law.__getitem__)


# Planted bugs


def one_late(monkeypatch):
    """A marker is recognised one position late."""
    completed = spans.completed

    def wrong(state, rows, draft):
        which = completed(state, rows, draft)
        return jnp.concatenate([state.latest[:, None], which[:, :-1]], axis=1)

    monkeypatch.setattr(spans, "completed", wrong)


def of_rejected_drafts(monkeypatch):
    """A marker of drafted tokens stands although they are rejected."""
    advance, target, drafted = loop.advance, Speculative.target, []

    def watched(self, scores, rows, draft):
        drafted.append(spans.completed(rows.spans, rows, draft.tokens)[:, -1])
        return target(self, scores, rows, draft)

    def wrong(*arguments, **more):
        drafted.clear()
        state = advance(*arguments, **more)
        latest = jnp.maximum(state.rows.spans.latest, drafted[-1])
        return state._replace(rows=state.rows._replace(spans=state.rows.spans._replace(latest=latest)))

    monkeypatch.setattr(loop, "step", rounds.step.__wrapped__)  # traced where its tokens are at hand
    monkeypatch.setattr(Speculative, "target", watched)
    monkeypatch.setattr(loop, "advance", wrong)


def of_the_prompt(monkeypatch):
    """A marker that begins in the prompt counts."""
    monkeypatch.setattr(loop, "begun", lambda markers, first: spans.begun(markers, jnp.zeros_like(first)))


def of_committed_tokens_only(monkeypatch):
    """All of a round's positions have the lenience of its beginning."""
    completed = spans.completed
    monkeypatch.setattr(
        spans,
        "completed",
        lambda state, rows, draft: jnp.broadcast_to(
            completed(state, rows, draft[:, :0]), (len(draft), draft.shape[1] + 1)
        ),
    )


@pytest.mark.full(quick=["one_late"])
@pytest.mark.parametrize("plant", [one_late, of_rejected_drafts, of_the_prompt, of_committed_tokens_only])
def test_law_test_fails_on(plant, monkeypatch):
    plant(monkeypatch)
    jax.clear_caches()
    try:
        # A marker of one token: it is in drafts that are rejected more often than a longer one.
        markers = {of_rejected_drafts: [((2,), (5.0,))], of_the_prompt: [((1, 0), (5.0,))]}.get(plant)
        assert p_value(rows=50_000, markers=markers) < FAIL_BELOW
    finally:
        jax.clear_caches()
