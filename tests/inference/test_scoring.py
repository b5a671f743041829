"""Scores computed afterwards: their sums are the logarithms of the enumerated law."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import Digits, TableBlock, TableLM, places_table, sequence_law, table

from speccascade_jax.core import loop
from speccascade_jax.core.protocols import laws, states_law
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.transforms import TRUNCATIONS, SamplingOptions
from speccascade_jax.inference.scoring import Scorer
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import model_of
from speccascade_jax.models.shared_encoder import SharedEncoderConfig
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.settings import Settings

TABLES = tuple(table(seed, 4) for seed in (39, 40, 41))
PROMPT = (2, 0, 1, 3)
ASKED = {
    "one model": [{"method": "verifier", "temperature": 0.7, "min_p": 0.05}],
    "two models": [
        {"method": "speculative", "temperature": 0.7},
        {"method": "opt", "alpha": 0.05, "top_p": 0.8},
        {"method": "token_v3", "alpha": 0.4, "top_k": 3},
        {"method": "lossy", "alpha": 0.3},
    ],
    "three models": [{"method": ("token_v3", "opt"), "alpha": (0.4, 0.05), "temperature": 0.7}],
}


@pytest.mark.parametrize(
    "kind", ["one model", "two models", pytest.param("three models", marks=pytest.mark.full)]
)
def test_scores_are_the_law(kind):
    """Of every text: rows of all methods by one program."""
    tables = TABLES[: {"one model": 1, "two models": 2, "three models": 3}[kind]]
    models = (TableLM(4),) * len(tables)
    cascade = Cascade(models, tables, Digits(), max_source_length=16, max_new_tokens=3)
    settings = [Settings(**{"temperature": 1.0, **asked}) for asked in ASKED[kind]]
    [lane] = cascade.lanes(settings).values()
    scorer = Scorer(lane.plan, lane.params, 16)
    for row_settings in settings:
        levels = len(tables) - 1
        options = {
            name: value
            for name in ("temperature", *TRUNCATIONS)
            if (value := getattr(row_settings, name)) is not None
        }
        methods, alphas = (
            [*row_settings.of_levels(name, levels)] if levels else [] for name in ("method", "alpha")
        )
        law = sequence_law(tables, methods, alphas, PROMPT, steps=3, eos=3, **options)
        request = Request(PROMPT, row_settings, 0, lane.numbers(row_settings))
        text_scores = {text: scorer(request, list(text)) for text in law}
        np.testing.assert_allclose(
            [np.exp(scores.logprobs.sum()) for scores in text_scores.values()], list(law.values()), atol=1e-6
        )
        for text, scores in text_scores.items():
            assert scores.logprobs.shape == (len(text),) and scores.likeliest.shape == (len(text), 4)
            assert (np.diff(scores.likeliest_logprobs, axis=1) <= 0).all()
            assert all(
                scores.logprobs[n] == scores.likeliest_logprobs[n][scores.likeliest[n] == token]
                for n, token in enumerate(text)
            )


def test_scores_of_a_lossless_block_drafter_are_the_verifiers_law():
    network, params = TableBlock(4), (places_table(7, 4, 5), TABLES[1])
    cascade = Cascade(network.members, (params,) * 2, Digits(), max_source_length=16, max_new_tokens=3)
    settings = Settings(temperature=0.7, block_size=2)
    [lane] = cascade.lanes([settings]).values()
    scorer = Scorer(lane.plan, lane.params, 16)
    law = sequence_law(TABLES[1:2], [], [], PROMPT, steps=3, eos=3, temperature=0.7)
    request = Request(PROMPT, settings, 0, lane.numbers(settings))
    probabilities = [np.exp(scorer(request, list(text)).logprobs.sum()) for text in law]
    np.testing.assert_allclose(probabilities, list(law.values()), atol=1e-6)


@pytest.mark.parametrize(
    "states,rules,stated",
    [
        (False, ["opt"], True),
        (True, ["opt"], False),
        (True, ["speculative"], True),
        (True, ["opt", "speculative"], True),
        (True, ["speculative", "opt"], True),
        (True, ["opt", "opt"], False),
        (False, ["lookahead"], False),
        (False, ["lookahead", "speculative"], True),
    ],
)
def test_a_drafter_that_reads_its_verifiers_states_has_no_law_by_prefix(states, rules, stated):
    """But what a lossless rule writes has: the verifier's."""
    shared = model_of(SharedEncoderConfig(states=states))
    models = [*shared.members, TableLM(shared.vocab_size)][: len(rules) + 1]
    methods = [METHODS[rule] for rule in rules]
    assert states_law(hierarchy(models, methods, [2] * len(rules)), methods) == stated
    assert states_law(hierarchy(shared.members[:1], [], []), [])


@pytest.mark.full
def test_a_hierarchy_that_says_it_states_its_law_does():
    """Of pairs of each kind of method with every other method; where neither has a law, none is stated."""
    kinds = {(method.lossless, method.by_prefix): name for name, method in METHODS.items()}
    assert len(kinds) == 3
    tokens = jnp.zeros((2, 3), jnp.int32)
    models, tables = (TableLM(4),) * 3, [jnp.asarray(rows) for rows in TABLES]
    params = (tables[0], tables[1]), tables[2]
    first = hierarchy(models, [METHODS["speculative"]] * 2, [2, 2])  # whose state is that of all
    inputs, lengths = np.array([PROMPT, PROMPT]), np.array([4, 2], np.int32)
    options, keys = SamplingOptions(temperature=1.0), jax.random.split(jax.random.key(0), 2)
    batch = loop.requests(first, keys, inputs, lengths, options, [0.1, 0.1], None, None, 3)
    state = loop.begin(first, params, batch, max_new_tokens=3)
    pairs = [(kind, name) for kind in kinds.values() for name in METHODS]
    for names in {*pairs, *(pair[::-1] for pair in pairs)}:
        methods = [METHODS[name] for name in names]
        sampler = hierarchy(models, methods, [2, 2])
        state_law = partial(laws, sampler, params, state.caches, state.rows)
        if states_law(sampler, methods):
            shapes = jax.eval_shape(state_law, tokens)
            assert [shape.shape for shape in shapes] == [(2, 3, 4)] * 2, names
        elif not any(method.by_prefix for method in methods):
            with pytest.raises(ValueError):
                state_law(tokens)


@pytest.mark.full(quick=["methods0"])
@pytest.mark.parametrize("methods", [("lookahead", "speculative"), ("speculative", "speculative")])
def test_a_lossless_method_has_its_verifiers_law_whatever_drafts(methods):
    """Also in a program of other methods, of which some have no law."""
    cascade = Cascade((TableLM(4),) * 3, TABLES, Digits(), max_source_length=16, max_new_tokens=3)
    settings = Settings(method=methods, alpha=(0.1, 0.0), temperature=1.0)
    others = [Settings(method=("speculative", "lookahead"), temperature=1.0)]
    for each in ([settings], [settings, *others]):
        [lane] = cascade.lanes(each).values()
        scorer = Scorer(lane.plan, lane.params, 16)
        request = Request(PROMPT, settings, 0, lane.numbers(settings))
        law = sequence_law(TABLES[2:], [], [], PROMPT, steps=3, eos=3)
        scores = [np.exp(scorer(request, list(text)).logprobs.sum()) for text in law]
        np.testing.assert_allclose(scores, list(law.values()), atol=1e-6)
