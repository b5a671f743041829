"""The decoding core: jax and nothing of ours."""
