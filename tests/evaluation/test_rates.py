"""Consistent and inconsistent counts."""

import math

import pytest

from speccascade_jax.evaluation.rates import check_counts
from speccascade_jax.evaluation.reductions import cost_a_token
from speccascade_jax.evaluation.sweep import Quality
from speccascade_jax.settings import Settings

SPECULATIVE = {
    "drafter_passes": 6,
    "rounds": 2,
    "drafted": 4,
    "accepted": 3,
    "deferred": 4,
    "emitted": 5,
    "histogram": [0, 1, 1],
}
TALLY = {"drafter_passes": 4, "rounds": 1, "drafted": 4, "accepted": 3, "deferred": 1, "emitted": 4}


@pytest.mark.parametrize(
    "row,size",
    [
        (SPECULATIVE, 5),
        (TALLY, 4),
        ({"model_passes": 3}, 3),
        ({}, 0),
        ({"steps": 2}, 7),
        ({"emitted": 7, "rounds": 2}, 7),
    ],
)
def test_counts_that_fit(row, size):
    """Those of a sampler of its own kind among them."""
    check_counts([row], [size])


@pytest.mark.parametrize(
    "row,size",
    [
        (SPECULATIVE, 4),
        (SPECULATIVE | {"rounds": 3}, 5),
        (SPECULATIVE | {"histogram": [1, 1, 0]}, 5),
        (TALLY, 5),
        (TALLY | {"accepted": 1}, 4),
        (TALLY | {"drafted": 5}, 4),
        ({"model_passes": 3}, 2),
        ({"emitted": 7, "rounds": 2}, 6),
    ],
)
def test_counts_that_do_not_fit(row, size):
    with pytest.raises(ValueError, match="do not fit each other"):
        check_counts([row], [size])


def test_the_cost_of_a_custom_sampler_is_not_predicted():
    point = Settings(method="mine", block_size=1)
    assert math.isnan(cost_a_token(point, Quality(None, {"steps": 3}, 0.0, 3), 0.1))
    assert cost_a_token(point, Quality(None, TALLY, 0.0, 4), 0.1) == pytest.approx(1.4 / 4)
