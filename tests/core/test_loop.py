"""The compiled loop: rows of all kinds share a program, limits cut, values of other shapes are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, TABLES, VOCAB, decoded
from toys import TableLM, chi_square, sequence_law

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.loop import generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import TRUNCATIONS, SamplingOptions

# Unlike rows: all that a row may choose for itself
ASKED = [
    {"method": "opt", "alpha": 0.05, "temperature": 0.7},
    {"method": "token_v3", "alpha": 0.4, "temperature": 1.3, "top_k": 3},
    {"method": "chow", "alpha": 0.5, "temperature": 2.0, "top_p": 0.8},
    {"method": "lossy", "alpha": 0.3, "temperature": 2.0, "min_p": 0.15},
    {"method": "token_v1", "alpha": 0.3, "temperature": 3.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"method": "speculative", "temperature": 1.0, "limit": 2},
    {"method": "opt", "alpha": 0.3, "temperature": 0.0},
]


def test_unlike_rows_follow_each_its_own_law(full, rows):
    """One batch, one compiled program: methods, leniences, limits and options of all kinds together."""
    calls = len(ASKED) if full else 2  # with all of them, so many rows of each kind
    kind = np.random.default_rng(0).integers(0, len(ASKED), rows)
    column = {
        name: np.array([asked.get(name, off) for asked in ASKED])[kind]
        for name, off in (
            ("alpha", 0.0),
            ("temperature", 1.0),
            ("limit", STEPS),
            *((name, truncation.off) for name, truncation in TRUNCATIONS.items()),
        )
    }
    methods = np.array([list(METHODS).index(asked["method"]) for asked in ASKED])[kind][:, None]
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), tuple(METHODS.values()), 2)
    before, batches = generate._cache_size(), []
    for seed in range(calls):
        order = np.random.default_rng(seed).permutation(rows)  # every kind at every place in the batch
        options = SamplingOptions(
            **{name: column[name][order] for name in ("temperature", *TRUNCATIONS)}, max_top_k=3
        )
        result, which = decoded(
            sampler,
            tuple(TABLES[:2]),
            rows,
            options,
            column["alpha"][order][:, None],
            seed,
            methods=methods[order],
            limits=column["limit"][order],
        )
        batches.append((np.asarray(result.tokens), which, kind[order]))
    assert generate._cache_size() == before + 1
    tokens, which, kinds = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    chances, others = [], []
    for number, asked in enumerate(ASKED):
        options = {name: asked[name] for name in ("temperature", *TRUNCATIONS) if name in asked}
        for n, prompt in enumerate(PROMPTS):
            law = sequence_law(
                TABLES[:2],
                [asked["method"]],
                [asked.get("alpha", 0.0)],
                prompt,
                steps=asked.get("limit", STEPS),
                eos=EOS,
                **options,
            )
            chances.append(chi_square(tokens[(kinds == number) & (which == n)], law))
            neighbour = (number + 1) % len(ASKED)
            others.append(chi_square(tokens[(kinds == neighbour) & (which == n)], law))
    assert len(chances) * min(chances) > FAIL_BELOW
    assert max(others) < FAIL_BELOW  # the control: no kind passes for another


@pytest.mark.parametrize("alphas,methods", [((), None), ((0.1, 0.2), None), ((0.1,), (0, 0)), (0.1, None)])
def test_values_for_another_number_of_verifiers_are_refused(alphas, methods):
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHODS["opt"], 2)
    with pytest.raises(FieldError) as refused:
        decoded(sampler, tuple(TABLES[:2]), 4, SamplingOptions(), alphas, methods=methods)
    wrong = ("alphas", np.shape(alphas)) if methods is None else ("methods", np.shape(methods))
    assert (refused.value.field, refused.value.value) == wrong


@pytest.mark.parametrize("name", ["temperature", *TRUNCATIONS])
def test_options_for_another_number_of_rows_are_refused(name):
    with pytest.raises(FieldError) as refused:
        decoded(Autoregressive(TableLM(VOCAB)), TABLES[0], 4, SamplingOptions(**{name: np.ones(3)}), ())
    assert (refused.value.field, refused.value.value) == (name, (3,))


def test_a_round_is_traced_once():
    """The shapes of its counts come from the same trace; and the verifier's prefill needs no other one."""
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Traced(Speculative):
        def step(self, *arguments):
            traced.append("step")
            return super().step(*arguments)

    @dataclasses.dataclass(frozen=True)
    class TracedLM(TableLM):
        def prefill(self, *arguments):
            traced.append("prefill")
            return super().prefill(*arguments)

    sampler = Traced(Autoregressive(TableLM(VOCAB)), TracedLM(VOCAB), METHODS["opt"], 2)
    decoded(sampler, tuple(TABLES[:2]), 2, SamplingOptions(temperature=1.0), [0.05])
    assert sorted(traced) == ["prefill", "step"]


def test_limits_cut_and_change_nothing_else():
    """Limits of 1 .. gamma + 2 tokens with gamma = 5, each row its own: texts are prefixes of the longest."""
    sampler = Speculative(Autoregressive(TableLM(VOCAB)), TableLM(VOCAB), METHODS["opt"], 5)
    keys = jax.vmap(jax.random.key)(jnp.arange(64))
    inputs, lengths = np.ones((64, 1), np.int32), np.ones(64, np.int32)

    def run(steps, limits=None):
        return np.asarray(
            generate(
                sampler,
                tuple(TABLES[:2]),
                keys,
                inputs,
                lengths,
                SamplingOptions(),
                jnp.array([0.3]),
                max_new_tokens=steps,
                eos_id=EOS,
                limits=limits,
            ).tokens
        )

    longest = run(7)
    np.testing.assert_array_equal(run(4), longest[:, :4])
    limits = np.arange(64) % 8
    np.testing.assert_array_equal(run(7, limits), np.where(np.arange(7) < limits[:, None], longest, -1))
