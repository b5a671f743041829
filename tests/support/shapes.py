"""Tiny models' shapes, and tokens for them: three rows of unlike lengths."""

import dataclasses

import numpy as np

from speccascade_jax.models.assistant import ASSISTANT
from speccascade_jax.models.dflash import DFLASH
from speccascade_jax.models.eagle import EAGLE
from speccascade_jax.models.gemma4 import GEMMA4
from speccascade_jax.models.presets import GEMMA2, GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.models.t5gemma import T5GemmaConfig
from speccascade_jax.models.t5gemma2 import T5Gemma2Config

TINY_T5 = T5Config(
    vocab_size=97,
    d_model=48,
    d_kv=16,
    d_ff=80,
    num_heads=4,
    num_encoder_layers=3,
    num_decoder_layers=2,
    relative_buckets=8,
    relative_max_distance=12,
)
TINY_T5_1_0 = dataclasses.replace(TINY_T5, gated=False, tied_embeddings=True)
TINY_GEMMA = dataclasses.replace(
    GEMMA2,
    vocab_size=97,
    d_model=48,
    d_kv=16,
    d_ff=80,
    num_heads=6,
    num_kv_heads=2,
    num_layers=3,
    window=7,
    query_scalar=20,
    attention_softcap=2.0,
    logit_softcap=3.0,
)
SMALL = {
    "vocab_size": 97,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 52,
    "num_heads": 4,
    "num_kv_heads": 1,
    "num_layers": 2,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
}  # a head's width is not d_model / num_heads
DECODERS = {  # of each family: positions reach past what was trained on, windows are shorter than the texts
    "llama": dataclasses.replace(
        LLAMA,
        **SMALL,
        query_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope_theta=50.0,
        rope_type="llama3",
        rope_factor=4.0,
        rope_length=16,
        max_positions=64,
        more_eos=(5, 3),
    ),
    "mistral": dataclasses.replace(MISTRAL, **SMALL, window=5),
    "qwen2": dataclasses.replace(
        QWEN2,
        **SMALL,
        tied_embeddings=True,
        window=5,
        local=(0, 1),
        rope_theta=100.0,
        rope_type="yarn",
        rope_factor=4.0,
        rope_length=16,
        rope_low=0.5,
        rope_high=2.0,
        rope_attention=1.1,
        rope_truncate=False,
        max_positions=64,
    ),
    "qwen3": dataclasses.replace(QWEN3, **SMALL, rope_type="dynamic", rope_factor=3.0, max_positions=24),
    "gemma2": TINY_GEMMA,
    "gemma3_text": dataclasses.replace(
        GEMMA3,
        **SMALL,
        query_bias=True,
        output_bias=True,
        query_scalar=20,
        window=5,
        local=(1, 0),
        rope_theta=1000.0,
        local_rope_theta=50.0,
        rope_type="linear",
        rope_factor=8.0,
    ),
}
TINY_T5GEMMA = T5GemmaConfig(
    dataclasses.replace(GEMMA2, **SMALL, query_scalar=20, window=5, attention_softcap=2.0, logit_softcap=3.0),
    dataclasses.replace(
        GEMMA2,
        **SMALL | {"d_model": 40, "d_ff": 28, "num_layers": 3},
        query_scalar=8,
        window=7,
        attention_softcap=3.0,
        logit_softcap=2.5,
    ),
)
TINY_T5GEMMA2 = T5Gemma2Config(  # an even window and an odd one
    dataclasses.replace(
        GEMMA3,
        **SMALL | {"d_kv": 8, "d_ff": 28, "num_layers": 3},
        query_scalar=20,
        window=6,
        local=(1, 1, 0),
        rope_theta=1000.0,
        local_rope_theta=50.0,
        rope_type="linear",
        rope_factor=8.0,
        logit_softcap=2.0,
    ),
    dataclasses.replace(
        GEMMA3,
        **SMALL | {"num_kv_heads": 2, "num_layers": 2},
        query_bias=True,
        output_bias=True,
        query_scalar=8,
        window=7,
        local=(1, 0),
        rope_theta=400.0,
        local_rope_theta=30.0,
        logit_softcap=3.0,
    ),
    end_of_image=11,
)
TINY_GEMMA4 = dataclasses.replace(  # two groups of writers, one of readers
    GEMMA4,
    **SMALL | {"num_layers": 6},
    d_kv_global=16,
    num_readers=2,
    keys_are_values=True,
    num_kv_heads_global=2,
    per_layer_width=6,
    local=(1, 0),
    window=5,
    rope_theta=100.0,
    local_rope_theta=50.0,
    logit_softcap=3.0,
)
GEMMA4S = {
    "gemma4": TINY_GEMMA4,
    "gemma4, dense": dataclasses.replace(  # as 31B: nothing is shared, no inputs for layers
        TINY_GEMMA4, num_readers=None, wide_readers=False, per_layer_width=None, num_layers=3, local=(1, 1, 0)
    ),
    "gemma4, unlike groups": dataclasses.replace(  # writers 10110, readers 0110
        TINY_GEMMA4,
        num_kv_heads=2,
        num_layers=9,
        num_readers=4,
        wide_readers=False,
        keys_are_values=False,
        local=(1, 0, 1, 1, 0, 0, 1),
        attention_bias=True,
        tied_embeddings=False,
        logit_softcap=None,
        rope_share=0.6,
        activation="silu",
        more_eos=(5, 3),
    ),
}
TINY_ASSISTANT = dataclasses.replace(  # of TINY_GEMMA4, with another window
    ASSISTANT,
    **SMALL | {"d_model": 20, "d_ff": 28, "num_layers": 3},
    num_readers=3,
    d_kv_global=16,
    num_kv_heads_global=2,
    keys_are_values=True,
    local=(1, 1, 0),
    window=4,
    rope_theta=100.0,
    local_rope_theta=50.0,
    state_width=36,
    num_centroids=None,
)
SOURCE = np.random.default_rng(0).integers(2, 97, (3, 20)).astype(np.int32)
LENGTH = np.array([20, 13, 1], np.int32)
TARGET = np.random.default_rng(1).integers(2, 97, (3, 30)).astype(np.int32)
TINY_EAGLE = dataclasses.replace(  # of a verifier with SMALL's widths and 4 layers
    EAGLE,
    **SMALL | {"num_layers": 1, "num_kv_heads": 2, "d_ff": 28},
    draft_vocab_size=50,
    state_width=36,
    rope_theta=50.0,
    layers=(3, 1, 2),
)
EAGLE_VERIFIER = dataclasses.replace(QWEN3, **SMALL | {"num_layers": 4})
TINY_DFLASH = dataclasses.replace(  # of EAGLE_VERIFIER
    DFLASH,
    **SMALL | {"num_layers": 2, "num_kv_heads": 2, "d_ff": 28},
    rope_theta=50.0,
    mask_id=95,
    states=(1, 2, 3),
    block_size=6,
)
