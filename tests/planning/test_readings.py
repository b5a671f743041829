"""Plans of drafters that read their verifier, compared with actual rounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import SENTENCES, shuffled
from shapes import EAGLE_VERIFIER, TINY_EAGLE

from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import BlockDrafterConfig, EaglePairConfig, model_of
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.planning.readings import reading
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import Tokenizer

SIZE = 4
T5 = T5Config(
    vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_encoder_layers=1, num_decoder_layers=3
)
EAGLE = {"vocab_size": 352, "draft_vocab_size": 352}
CONFIGS = {
    "block drafter": BlockDrafterConfig(T5, (1, 3), 6, num_heads=4, d_kv=8, d_ff=48),
    "head": EaglePairConfig(
        dataclasses.replace(EAGLE_VERIFIER, vocab_size=352, bos_id=2),
        dataclasses.replace(TINY_EAGLE, **EAGLE),
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def cascade(request, spiece, gemma_vocabulary):
    config = CONFIGS[request.param]
    network = model_of(config)
    params = jax.tree.map(jnp.asarray, network.init(0))
    tokenizer = Tokenizer(spiece if isinstance(config, BlockDrafterConfig) else gemma_vocabulary)
    return Cascade(network.members, (params,) * 2, tokenizer, max_source_length=16, max_new_tokens=16)


@pytest.mark.full
def test_expected_calls_are_those_of_the_rounds(cascade):
    """Given the texts, with laws by (prefix, place in the draft, length of the draft). The first place's law
    at all places expects others, text by text: errors are weighted by how far the two are apart."""
    settings = Settings(block_size=SIZE, temperature=0.6)
    outputs = list(cascade.generate(shuffled(SENTENCES)[:200], settings, batch_size=50, truncate=True))
    outputs = [output for output in outputs if output.tokens]
    read, way = reading(cascade, outputs, settings, SIZE), VERIFICATIONS[settings.verification]
    expected, by_first = (
        laws.runs(0, way, SIZE).calls(np.ones(SIZE + 1)) for laws in (read, read._replace(drafts={}))
    )

    def distance(calls):
        error = [output.counts["rounds"] for output in outputs] - calls
        weighted = error * (by_first - expected)
        return abs(weighted.sum()) / np.sqrt(np.square(weighted).sum())

    assert distance(expected) < 4 < distance(by_first)
