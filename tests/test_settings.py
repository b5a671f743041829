"""Settings: their descriptions, and the values that they refuse."""

import typing

import pytest

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.rules import METHODS
from speccascade_jax.settings import Settings


def test_settings_make_the_rule():
    (rule,) = Settings(method="lookahead", acceptance=0.5, round_cost=3.0).rules(1)
    assert rule is METHODS["lookahead"].tuned(acceptance=0.5, round_cost=3.0)
    assert Settings(method=rule).name == "lookahead"
    (default,) = Settings(method="lookahead").rules(1)
    knobs = METHODS["lookahead"].knobs
    assert default is METHODS["lookahead"].tuned(**{name: knob.default for name, knob in knobs.items()})
    nan = float("nan")
    for field, value in (("acceptance", 1.5), ("round_cost", 0.0), ("round_cost", nan), ("top_p", nan)):
        with pytest.raises(FieldError) as refused:
            Settings(method="lookahead", **{field: value}).check(10)
        assert refused.value.field == field and refused.value.value is value


def test_a_knob_that_counts_is_a_whole_number():
    """In the settings' annotations, from which flags and the schema of requests are made."""
    assert typing.get_type_hints(Settings)["relaxed_top_k"] is int
    (rule,) = Settings(method="relaxed", relaxed_top_k=3).rules(1)
    assert rule is METHODS["relaxed"].tuned(relaxed_top_k=3)
    with pytest.raises(FieldError) as refused:
        Settings(method="relaxed", relaxed_top_k=0).check(10)
    assert (refused.value.field, refused.value.value) == ("relaxed_top_k", 0)


def test_only_rules_have_a_deferral_rate():
    assert [
        Settings(method=method).defers
        for method in ("lossy", "lossy+lossy", "lossy+opt", "opt", METHODS["lossy"], "bild", "verifier")
    ] == [False, False, True, True, False, True, True]


def test_one_value_applies_to_every_level():
    settings = Settings(method="speculative+opt", alpha=(0.0, 0.3), block_size=4)
    assert settings.of_levels("method", 2) == ("speculative", "opt")
    assert settings.of_levels("alpha", 2) == (0.0, 0.3) and settings.block_sizes(2) == (4, 4)
    assert settings.rules(2) == (METHODS["speculative"], METHODS["opt"])
    assert settings.of_levels("block_size", 0) == ()  # one model verifies nothing
    for field in ("method", "alpha"):
        with pytest.raises(FieldError) as refused:
            settings.of_levels(field, 3)
        assert (refused.value.field, refused.value.value) == (field, getattr(settings, field))


def test_adaptive_blocks_that_never_stop_are_fixed_ones():
    adaptive = Settings(block_size="adaptive", max_block_size=7, stop_below=0.2)
    assert adaptive.stops == 0.2 and adaptive.block_sizes(1) == (7,)
    assert Settings(block_size="adaptive", max_block_size=7, stop_below=0.0).stops is None
    assert Settings(block_size=3, stop_below=0.2).stops is None


def test_settings_are_lossless_if_every_level_is():
    lossless = "speculative", "speculative+speculative", METHODS["speculative"]
    assert all(Settings(method=method).lossless for method in lossless)
    assert not any(Settings(method=method).lossless for method in ("speculative+opt", "opt", "bild"))
