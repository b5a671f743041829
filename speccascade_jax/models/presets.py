"""The usual config of each decoder-only family, and the published sizes."""

from dataclasses import replace

from speccascade_jax.models.decoder import DecoderConfig

LLAMA = DecoderConfig()
MISTRAL = replace(
    LLAMA, family="mistral", d_ff=14_336, num_kv_heads=8, window=4096, local=(1,), max_positions=131_072
)
QWEN2 = replace(
    LLAMA,
    family="qwen2",
    vocab_size=151_936,
    d_ff=22_016,
    query_bias=True,
    norm_epsilon=1e-6,
    max_positions=32_768,
    pad_id=151_643,
    eos_id=151_643,
    bos_id=151_643,
)
QWEN3 = replace(QWEN2, family="qwen3", query_bias=False, head_norms=True)
GEMMA2 = replace(
    LLAMA,
    family="gemma2",
    vocab_size=256_000,
    d_model=2304,
    d_kv=256,
    d_ff=9216,
    num_heads=8,
    num_kv_heads=4,
    num_layers=26,
    activation="gelu_pytorch_tanh",
    tied_embeddings=True,
    post_norms=True,
    unit_offset=True,
    scaled_embedding=True,
    query_scalar=256,
    attention_softcap=50.0,
    logit_softcap=30.0,
    window=4096,
    local=(1, 0),
    max_positions=8192,
    norm_epsilon=1e-6,
    pad_id=0,
    eos_id=1,
    bos_id=2,
)
GEMMA3 = replace(
    GEMMA2,
    family="gemma3_text",
    vocab_size=262_208,
    head_norms=True,
    attention_softcap=None,
    logit_softcap=None,
    local=(1, 1, 1, 1, 1, 0),
    rope_theta=1e6,
    local_rope_theta=1e4,
    max_positions=131_072,
)

LLAMA2_7B = replace(LLAMA, max_positions=4096)
LLAMA3_8B = replace(
    LLAMA,
    vocab_size=128_256,
    d_ff=14_336,
    num_kv_heads=8,
    rope_theta=5e5,
    rope_type="llama3",
    rope_factor=8.0,
    rope_length=8192,
    max_positions=131_072,
    pad_id=128_001,
    eos_id=128_001,
    bos_id=128_000,
)
LLAMA3_1B = replace(
    LLAMA3_8B, d_model=2048, d_kv=64, d_ff=8192, num_layers=16, tied_embeddings=True, rope_factor=32.0
)
MISTRAL_7B = replace(MISTRAL, vocab_size=32_768, rope_theta=1e6, window=None, local=(), max_positions=32_768)
QWEN2_0_5B = replace(
    QWEN2,
    d_model=896,
    d_kv=64,
    d_ff=4864,
    num_heads=14,
    num_kv_heads=2,
    num_layers=24,
    tied_embeddings=True,
    rope_theta=1e6,
)
QWEN3_8B = replace(QWEN3, d_ff=12_288, num_kv_heads=8, num_layers=36, rope_theta=1e6, max_positions=40_960)
QWEN3_0_6B = replace(QWEN3_8B, d_model=1024, d_ff=3072, num_heads=16, num_layers=28, tied_embeddings=True)
GEMMA3_1B = replace(
    GEMMA3,
    vocab_size=262_144,
    d_model=1152,
    d_ff=6912,
    num_heads=4,
    num_kv_heads=1,
    window=512,
    max_positions=32_768,
)
GEMMA3_12B = replace(
    GEMMA3,
    d_model=3840,
    d_ff=15_360,
    num_heads=16,
    num_kv_heads=8,
    num_layers=48,
    window=1024,
    rope_type="linear",
    rope_factor=8.0,
)

PRESETS = {
    "llama2_7b": LLAMA2_7B,
    "tinyllama_1b": replace(
        LLAMA2_7B, d_model=2048, d_kv=64, d_ff=5632, num_kv_heads=4, num_layers=22, max_positions=2048
    ),
    "llama3_1b": LLAMA3_1B,
    "llama3_3b": replace(LLAMA3_1B, d_model=3072, d_kv=128, num_heads=24, num_layers=28),
    "llama3_8b": LLAMA3_8B,
    "llama3_70b": replace(LLAMA3_8B, d_model=8192, d_ff=28_672, num_heads=64, num_layers=80),
    "mistral_7b": MISTRAL_7B,
    "mistral_123b": replace(
        MISTRAL_7B, d_model=12_288, d_ff=28_672, num_heads=96, num_layers=88, max_positions=131_072
    ),
    "qwen2_0.5b": QWEN2_0_5B,
    "qwen2_7b": replace(
        QWEN2_0_5B,
        vocab_size=152_064,
        d_model=3584,
        d_kv=128,
        d_ff=18_944,
        num_heads=28,
        num_kv_heads=4,
        num_layers=28,
        tied_embeddings=False,
    ),
    "qwen2_32b": replace(
        QWEN2_0_5B,
        vocab_size=152_064,
        d_model=5120,
        d_kv=128,
        d_ff=27_648,
        num_heads=40,
        num_kv_heads=8,
        num_layers=64,
        tied_embeddings=False,
    ),
    "qwen3_0.6b": QWEN3_0_6B,
    "qwen3_1.7b": replace(QWEN3_0_6B, d_model=2048, d_ff=6144),
    "qwen3_4b": replace(QWEN3_0_6B, d_model=2560, d_ff=9728, num_heads=32, num_layers=36),
    "qwen3_8b": QWEN3_8B,
    "qwen3_14b": replace(QWEN3_8B, d_model=5120, d_ff=17_408, num_heads=40, num_layers=40),
    "qwen3_32b": replace(QWEN3_8B, d_model=5120, d_ff=25_600, num_heads=64, num_layers=64),
    "gemma2_2b": GEMMA2,
    "gemma2_9b": replace(GEMMA2, d_model=3584, d_ff=14_336, num_heads=16, num_kv_heads=8, num_layers=42),
    "gemma2_27b": replace(
        GEMMA2,
        d_model=4608,
        d_kv=128,
        d_ff=36_864,
        num_heads=32,
        num_kv_heads=16,
        num_layers=46,
        query_scalar=144,
    ),
    "gemma3_270m": replace(GEMMA3_1B, d_model=640, d_ff=2048, num_layers=18),
    "gemma3_1b": GEMMA3_1B,
    "gemma3_4b": replace(GEMMA3_12B, d_model=2560, d_ff=10_240, num_heads=8, num_kv_heads=4, num_layers=34),
    "gemma3_12b": GEMMA3_12B,
    "gemma3_27b": replace(
        GEMMA3_12B,
        d_model=5376,
        d_kv=128,
        d_ff=21_504,
        num_heads=32,
        num_kv_heads=16,
        num_layers=62,
        query_scalar=168,
    ),
}
