"""Speculative cascades in JAX (Narasimhan et al., ICLR 2025)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speccascade_jax.baselines import BASELINES
    from speccascade_jax.core.loop import generate
    from speccascade_jax.core.methods import Method
    from speccascade_jax.core.protocols import LanguageModel
    from speccascade_jax.core.rules import METHODS
    from speccascade_jax.core.samplers import Autoregressive, Speculative, hierarchy
    from speccascade_jax.core.transforms import SamplingOptions
    from speccascade_jax.inference.text import Cascade, Output
    from speccascade_jax.settings import Settings

__version__ = "0.2.0"
__all__ = [
    "BASELINES",
    "METHODS",
    "Autoregressive",
    "Cascade",
    "LanguageModel",
    "Method",
    "Output",
    "SamplingOptions",
    "Settings",
    "Speculative",
    "generate",
    "hierarchy",
    "load",
]
_HOMES = {
    "baselines": ("BASELINES",),
    "core.loop": ("generate",),
    "core.samplers": ("Autoregressive", "Speculative", "hierarchy"),
    "core.methods": ("Method",),
    "core.rules": ("METHODS",),
    "core.protocols": ("LanguageModel",),
    "core.transforms": ("SamplingOptions",),
    "settings": ("Settings",),
    "inference.text": ("Cascade", "Output"),
}


def __getattr__(name: str) -> Any:
    """Imports names lazily, so that `import speccascade_jax` does not load JAX."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"speccascade_jax.{home}"), name)
    raise AttributeError(f"speccascade_jax has no {name!r}; it has: {', '.join(__all__)}.")


def load(config: str) -> "Cascade":
    """Loads the cascade of a config, given its name ("demo") or path."""
    from speccascade_jax import config as configs
    from speccascade_jax.inference.text import Cascade

    return Cascade.from_config(configs.load(config, configs.DecodeConfig))
