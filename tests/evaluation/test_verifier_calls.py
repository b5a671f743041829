"""Expected verifier calls, compared with those counted in decoding."""

import numpy as np
import pytest
from toys import Digits, TableLM, table

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation.verifier_calls import expected_calls, fewer, pad_ratios, ratios_along
from speccascade_jax.inference.text import Cascade
from speccascade_jax.settings import Settings

TEXTS = ["201", "1", "10"] * 400


def cascade(models):
    """Of tables that differ enough for drafts to be rejected."""
    tables = tuple(table(39 + n, 4) for n in range(models))
    return Cascade((TableLM(4),) * models, tables, Digits(), max_source_length=16, max_new_tokens=8)


@pytest.mark.full(quick=["2-token_v3-3-block"])
@pytest.mark.parametrize(
    "models,method,sizes,way",
    [
        *((2, method, 3, way) for method in ("speculative", "token_v3") for way in VERIFICATIONS),
        (3, "opt", (2, 3), "block"),
    ],
)
def test_as_many_calls_are_expected_as_are_counted(models, method, sizes, way):
    """Of a rule's texts too, and of a drafter that is a cascade; but not for another block size."""
    toys = cascade(models)
    alpha = 0.0 if method == "speculative" else 0.3
    settings = Settings(method=method, alpha=alpha, block_size=sizes, temperature=1.0, verification=way)
    outputs = list(toys.generate(TEXTS, settings, batch_size=100))
    along, lengths = ratios_along(toys, outputs, settings)
    assert lengths.tolist() == [len(output.tokens) for output in outputs]
    counted = np.array([output.counts["rounds"] for output in outputs])

    def deviation(size):
        off = counted - expected_calls(along, lengths, VERIFICATIONS[way], size)
        return abs(off.mean()) / off.std() * np.sqrt(len(off))

    assert deviation(3) < 4 < deviation(1)


def test_twice_the_calls_are_half_the_tokens_a_call():
    calls = np.random.default_rng(0).uniform(1, 9, 300)
    assert fewer(calls, 2 * calls) == pytest.approx((2, 2, 2))
    ratio, low, high = fewer(calls, calls + np.random.default_rng(1).normal(1, 1, 300))
    assert low < ratio < high and high - low < 0.1


@pytest.mark.parametrize("rows", [[[0.5], [1.0, -0.1]], [[0.5]], [[0.5], [float("nan")]]])
def test_an_invalid_ratio_is_refused(rows):
    assert pad_ratios([[0.5], [1.0, 2.0]], 3, 2)[0].tolist() == [[0.5, 1, 1], [1, 2, 1]]
    with pytest.raises(ValueError):
        pad_ratios(rows, 3, 2)


@pytest.mark.full(quick=["2-lookahead"])
@pytest.mark.parametrize("models,method", [(2, "lookahead"), (3, "lookahead+speculative")])
def test_a_law_that_depends_on_the_round_is_refused(models, method):
    """Also that of the drafts of a lossless method."""
    toys = cascade(models)
    settings = Settings(method=method, alpha=0.3)
    with pytest.raises(FieldError) as refused:
        ratios_along(toys, list(toys.generate(TEXTS[:3], settings)), settings)
    assert (refused.value.field, refused.value.value) == ("method", method)
