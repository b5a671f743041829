"""One model by itself: its law, its greedy text, and what it counts."""

import jax.numpy as jnp
import numpy as np
import pytest
from joint_laws import EOS, FAIL_BELOW, PROMPTS, STEPS, TABLES, VOCAB, decoded, p_value
from toys import TableLM, sequence_law

from speccascade_jax.core.protocols import Origin
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import SamplingOptions


def test_one_model_follows_its_law(rows):
    assert p_value([], [], [], rows=rows) > FAIL_BELOW


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_is_a_pass_of_the_model(temperature):
    result, which = decoded(Autoregressive(TableLM(VOCAB)), TABLES[0], 64, SamplingOptions(temperature), ())
    tokens, length = np.asarray(result.tokens), np.asarray(result.length)
    np.testing.assert_array_equal(result.counts, length)
    np.testing.assert_array_equal(length, (tokens >= 0).sum(axis=1))
    assert set(np.asarray(result.origin)[tokens >= 0]) == {Origin.MODEL} and not jnp.any(result.level > 0)
    for n, prompt in enumerate(PROMPTS):
        law = sequence_law(TABLES[:1], [], [], prompt, steps=STEPS, eos=EOS, temperature=temperature)
        written = {tuple(int(t) for t in row if t >= 0) for row in tokens[which == n]}
        assert written <= set(law) and (temperature or written == set(law))
