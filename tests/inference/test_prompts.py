"""A decoder-only pair continues prompts: templates, stop sequences, the verifier's texts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import PROMPTS
from tiny_models import prefill

from speccascade_jax import checkpoints
from speccascade_jax.inference.text import Cascade
from speccascade_jax.tokenizers.tokenizer import up_to_stop


def load(gemma_pair, **fields):
    return Cascade.load(
        gemma_pair / "drafter", gemma_pair / "verifier", max_source_length=32, max_new_tokens=24, **fields
    )


@pytest.mark.full
def test_speculative_is_the_verifier_whatever_the_batch(gemma_pair):
    cascade = load(gemma_pair)
    outputs = {
        (method, size): [o.tokens for o in cascade.generate(PROMPTS, method=method, batch_size=size)]
        for method, size in itertools.product(("speculative", "verifier"), (1, 4))
    }
    assert len({str(tokens) for tokens in outputs.values()}) == 1
    tokens = outputs["verifier", 1]
    assert tokens[2] == [] and all(len(row) == 24 for n, row in enumerate(tokens) if n != 2)
    sampled = [
        [
            o.tokens
            for o in cascade.generate(PROMPTS, method="token_v3", alpha=0.3, temperature=1.0, batch_size=size)
        ]
        for size in (1, 4)
    ]
    assert sampled[0] == sampled[1] != tokens


def test_suffix_and_prefix_are_the_template(gemma_pair):
    template = {"prefix": "<start_of_turn>user\n", "suffix": "<end_of_turn>\n<start_of_turn>model\n"}
    rows, _ = load(gemma_pair, **template).encode(["why not"])
    assert rows[0][:2] == [2, 4] and rows[0].count(5) == 1 and rows[0].count(4) == 2
    whole = load(gemma_pair).encode(["<start_of_turn>user\nwhy not<end_of_turn>\n<start_of_turn>model\n"])[0]
    assert rows == whole


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_sequences_end_outputs_early(temperature, gemma_pair):
    """The same tokens as without them, cut; stopped rows are not decoded further."""
    free = load(gemma_pair)
    options = {"method": "opt", "alpha": 0.2, "temperature": temperature, "block_size": 3}
    whole = list(free.generate(PROMPTS, **options))
    stop = tuple({o.text[n : n + 2] for o, n in zip(whole, (8, 12, 0, 10, 14), strict=True)} - {""})
    held = load(gemma_pair, stop=stop)
    for size in (1, 4):
        for output, full in zip(held.generate(PROMPTS, **options, batch_size=size), whole, strict=True):
            kept, text = up_to_stop(free.tokenizer, full.tokens, stop) or (full.tokens, full.text)
            assert (output.tokens, output.text) == (kept, text)
            assert output.origin == full.origin[: len(kept)]
            if kept:
                assert len(kept) <= output.counts["emitted"] < len(kept) + 4
    longest = max(whole, key=lambda output: len(output.text))
    text = next(o.text for o in held.generate([longest.source], **options, first_index=longest.index))
    assert list(held.stream(longest.source, **options, index=longest.index))[-1] == text
    assert text == longest.text[: len(text)] and len(text) < len(longest.text)


@pytest.mark.full
def test_logits_of_training_are_those_of_decoding(gemma_pair):
    loaded = checkpoints.load(gemma_pair / "verifier")
    model, params = loaded.model, loaded.params
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, 300, (3, 11)), rng.integers(4, 300, (3, 9))
    length = jnp.array([11, 4, 1])
    forced = jax.jit(model.forced)(params, source, length, jnp.asarray(target))
    for row in range(3):
        _, cache = prefill(model, params, source[row : row + 1], length[row : row + 1], 32)
        fed = np.concatenate([source[row, length[row] - 1][None], target[row, :-1]])
        logits, _ = jax.jit(model.extend)(params, fed[None], cache)
        np.testing.assert_allclose(forced[row], logits[0], atol=1e-5)
