"""Decoders of the same texts: measurements are kept, and ratios are paired over texts."""

import dataclasses

import jax
import numpy as np
import pytest

from speccascade_jax import config as configs
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.turns import (
    Cascades,
    Counts,
    Times,
    measure_counts,
    measure_times,
    times_as_fast,
    tokens_a_call,
)
from speccascade_jax.inference.text import Output

TEXTS = [f"text {n}" for n in range(6)]
RUNS = {
    size: DecodeConfig(drafter="small", verifier="large", block_size=int(size), temperature=1.0)
    for size in ("2", "4")
}


def outputs(first, texts, block_size, seed=0):
    """Texts of a length that depends on the text and the seed, all drafts accepted."""
    made = []
    for n, text in enumerate(texts, first):
        rounds = 1 + (n + seed) % 3
        accepted = rounds * block_size
        size, histogram = accepted + rounds, [0] * block_size + [rounds]
        counts = {
            "rounds": rounds,
            "drafted": accepted,
            "accepted": accepted,
            "deferred": 0,
            "emitted": size,
            "histogram": histogram,
        }
        made.append(Output(n, text, "", [5] * size, ["draft"] * size, counts))
    return made


class Decoders:
    """Stands for turns.Cascades; `decoded` tells what was decoded, and after `limit` the process is
    killed."""

    def __init__(self, limit=10**9):
        self.decoded, self.limit = [], limit

    def decoder(self, run):
        def decode(first, texts):
            if len(self.decoded) == self.limit:
                raise KeyboardInterrupt
            self.decoded.append((run.block_size, run.seed, first))
            return float(first + run.block_size), outputs(first, texts, run.block_size, run.seed)

        return decode


def nothing(items, name):
    return iter(items)


def counts_in(folder, decoders, runs=RUNS, seeds=2):
    return measure_counts(runs, TEXTS, folder / "counts.jsonl", seeds=seeds, track=nothing, cascades=decoders)


def test_counts_are_sums_over_seeds_and_resume(tmp_path):
    whole = counts_in(tmp_path / "whole", Decoders())
    np.testing.assert_array_equal(whole["2"].rounds, [1 + 2, 2 + 3, 3 + 1] * 2)
    np.testing.assert_array_equal(whole["2"].tokens, 3 * whole["2"].rounds)
    with pytest.raises(KeyboardInterrupt):
        counts_in(tmp_path, Decoders(limit=3))
    rest = Decoders()
    resumed = counts_in(tmp_path, rest)
    assert rest.decoded == [(4, 1, 0)]
    for name in RUNS:
        np.testing.assert_array_equal(resumed[name], whole[name])


def test_a_decoder_with_other_settings_is_counted_again(tmp_path):
    counts_in(tmp_path, Decoders())
    changed = {**RUNS, "2": dataclasses.replace(RUNS["2"], alpha=0.5)}
    again = Decoders()
    counts_in(tmp_path, again, changed)
    assert [size for size, _, _ in again.decoded] == [2, 2]


def times_in(folder, decoders, runs=RUNS, trials=3):
    return measure_times(
        {name: decoders.decoder(run) for name, run in runs.items()},
        TEXTS,
        folder / "times.jsonl",
        {"runs": {name: run.record() for name, run in runs.items()}},
        group=2,
        trials=trials,
        track=nothing,
    )


def test_times_are_taken_in_turn_and_resume(tmp_path):
    decoders = Decoders()
    whole = times_in(tmp_path / "whole", decoders)
    np.testing.assert_array_equal(whole["4"].seconds, [4, 6, 8])
    np.testing.assert_array_equal(whole["4"].tokens, 5 * whole["4"].rounds)
    timed = decoders.decoded[-2 * 3 * 3 :]  # what came before was not timed
    pairs = [(a, b) for a, b in zip(timed[::2], timed[1::2], strict=True)]
    assert all(a[2] == b[2] and {a[0], b[0]} == {2, 4} for a, b in pairs)
    assert len({a[0] for a, _ in pairs}) == 2  # each begins at times
    with pytest.raises(KeyboardInterrupt):
        times_in(tmp_path, Decoders(limit=4 + 2 * 5 + 1))
    rest = Decoders()
    resumed = times_in(tmp_path, rest)
    assert len(rest.decoded) == 4 + 2 * 4
    for name in RUNS:
        np.testing.assert_array_equal(resumed[name], whole[name])
    nothing_left = Decoders(limit=0)
    times_in(tmp_path, nothing_left)


def test_times_of_other_decoders_are_refused(tmp_path):
    times_in(tmp_path, Decoders())
    changed = {**RUNS, "2": dataclasses.replace(RUNS["2"], alpha=0.5)}
    about = ("output", str(tmp_path / "times.jsonl"))
    with pytest.raises(FieldError) as refused:
        times_in(tmp_path, Decoders(), changed)
    assert (refused.value.field, refused.value.value) == about
    with (tmp_path / "times.jsonl").open("a") as file:
        file.write((tmp_path / "times.jsonl").read_text().split("\n")[0] + "\n")
    with pytest.raises(FieldError) as refused:
        times_in(tmp_path, Decoders())
    assert (refused.value.field, refused.value.value) == about and "line 10" in refused.value.problem


def test_ratios_are_of_sums_and_paired():
    """One decoder always needs half of the calls and of the time of another: the intervals have no width."""
    rng = np.random.default_rng(0)
    tokens, rounds = rng.integers(10, 50, (2, 40)).astype(float)
    decoder = Counts(tokens, rounds / 2, rounds, rounds)
    other = Counts(tokens, rounds, rounds, rounds)
    np.testing.assert_allclose(tokens_a_call(decoder, other), 2)
    assert tokens_a_call(other).value == tokens.sum() / rounds.sum()
    low, high = tokens_a_call(other)[1:]
    assert low < tokens_a_call(other).value < high
    seconds = rng.random(40)
    np.testing.assert_allclose(times_as_fast(Times(seconds, *other), Times(3 * seconds, *other)), 3)
    assert f"{tokens_a_call(decoder, other)}" == "2.00 (2.00 to 2.00)"
    assert f"{tokens_a_call(decoder, other):.3f}" == "2.000 (2.000 to 2.000)"


def test_decoders_with_the_same_weights_read_the_same_memory():
    """Also if they are decoders of different cascades, as with lookup beside the drafter."""
    run, cascades = configs.load("e2e", DecodeConfig), Cascades(["a text"])
    run = dataclasses.replace(run, dtype="float32")
    plain, beside, narrow = (
        [jax.tree.leaves(params) for params in cascades.of(dataclasses.replace(run, **changed)).params]
        for changed in ({}, {"drafter": f"lookup+{run.drafter}"}, {"dtype": "bfloat16"})
    )
    for ours, theirs, others in zip(plain, beside, narrow, strict=True):
        assert all(x is y for x, y in zip(ours, theirs, strict=True))
        assert not all(x is y for x, y in zip(ours, others, strict=True))
