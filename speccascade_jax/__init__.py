"""Speculative cascades in JAX (Narasimhan et al., ICLR 2025)."""

from speccascade_jax import config as _config
from speccascade_jax.baselines import BASELINES
from speccascade_jax.decoding import Autoregressive, Speculative, generate, hierarchy
from speccascade_jax.rules import METHODS, Method
from speccascade_jax.text import Cascade, Output
from speccascade_jax.typing import LanguageModel, SamplingOptions

__all__ = ["BASELINES", "METHODS", "Autoregressive", "Cascade", "LanguageModel", "Method", "Output",
           "SamplingOptions", "Speculative", "generate", "hierarchy", "load"]


def load(config: str) -> Cascade:
    """The cascade of a config: a name in configs/ ("demo") or the path of such a file."""
    return Cascade.from_config(_config.load(config))
