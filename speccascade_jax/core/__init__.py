"""The decoding core, which depends on JAX and on no other part of this package."""
