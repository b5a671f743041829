"""Tiny models' shapes, and tokens for them: three rows of unlike lengths."""

import dataclasses

import numpy as np

from speccascade_jax.models.gemma import GemmaConfig
from speccascade_jax.models.t5 import T5Config

TINY_T5 = T5Config(vocab_size=97, d_model=48, d_kv=16, d_ff=80, num_heads=4, num_encoder_layers=3,
                   num_decoder_layers=2, relative_buckets=8, relative_max_distance=12)
TINY_T5_1_0 = dataclasses.replace(TINY_T5, gated=False, tied_embeddings=True)
TINY_GEMMA = GemmaConfig(vocab_size=97, d_model=48, d_kv=16, d_ff=80, num_heads=6, num_kv_heads=2,
                         num_layers=3, window=7, query_scalar=20, attention_softcap=2.0, logit_softcap=3.0)
SOURCE = np.random.default_rng(0).integers(2, 97, (3, 20)).astype(np.int32)
LENGTH = np.array([20, 13, 1], np.int32)
TARGET = np.random.default_rng(1).integers(2, 97, (3, 30)).astype(np.int32)
