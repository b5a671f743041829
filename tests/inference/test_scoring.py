"""Scores found afterwards: their sums are the logarithms of the enumerated law."""

import dataclasses

import numpy as np
import pytest
from toys import Digits, TableLM, sequence_law, table

from speccascade_jax.inference.scoring import Scorer
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.scheduler import Request
from speccascade_jax.settings import Settings

TABLES = tuple(table(seed, 4) for seed in (39, 40, 41))
PROMPT = (2, 0, 1, 3)
ASKED = {
    "one model": [{"method": "verifier", "temperature": 0.7, "min_p": 0.05}],
    "two models": [{"method": "speculative", "temperature": 0.7},
                   {"method": "opt", "alpha": 0.05, "top_p": 0.8},
                   {"method": "token_v3", "alpha": 0.4, "top_k": 3}, {"method": "lossy", "alpha": 0.3}],
    "three models": [{"method": ("token_v3", "opt"), "alpha": (0.4, 0.05), "temperature": 0.7}]}


@pytest.mark.parametrize("kind", ["one model", "two models",
                                  pytest.param("three models", marks=pytest.mark.full)])
def test_scores_are_the_law(kind):
    """Of every text: rows of all methods by one program."""
    tables = TABLES[:{"one model": 1, "two models": 2, "three models": 3}[kind]]
    models = (TableLM(4),) * len(tables)
    cascade = Cascade(models, tables, Digits(), max_source_length=16, max_new_tokens=3)
    settings = [Settings(**{"temperature": 1.0, **asked}) for asked in ASKED[kind]]
    [lane] = cascade.lanes(settings).values()
    scorer = Scorer(dataclasses.replace(lane.plan, max_top_k=4), lane.params, 16)
    if kind == "two models":
        plan = dataclasses.replace(lane.plan, max_top_k=4, top_p=True, min_p=True)
        scorer = Scorer(plan, lane.params, 16)
    for own in settings:
        levels = len(tables) - 1
        options = {name: value for name in ("temperature", "top_k", "top_p", "min_p")
                   if (value := getattr(own, name)) is not None}
        methods, alphas = ([*own.of_levels(name, levels)] if levels else [] for name in ("method", "alpha"))
        law = sequence_law(tables, methods, alphas, PROMPT, steps=3, eos=3, **options)
        request = Request(PROMPT, own, 0, lane.numbers(own))
        found = {text: scorer(request, list(text)) for text in law}
        np.testing.assert_allclose([np.exp(one.own.sum()) for one in found.values()], list(law.values()),
                                   atol=1e-6)
        for text, one in found.items():
            assert one.own.shape == (len(text),) and one.likeliest.shape == (len(text), 4)
            assert (np.diff(one.theirs, axis=1) <= 0).all()
            assert all(one.own[n] == one.theirs[n][one.likeliest[n] == token] for n, token in enumerate(text))
