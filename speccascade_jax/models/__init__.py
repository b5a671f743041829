"""The language models, each known by its shape."""

from collections.abc import Callable
from typing import Any

from speccascade_jax.models.gemma import GemmaConfig, GemmaModel
from speccascade_jax.models.t5 import T5Config, T5Model

Config = T5Config | GemmaConfig
Model = T5Model | GemmaModel
MODELS: dict[str, Callable[..., Model]] = {T5Config.family: T5Model, GemmaConfig.family: GemmaModel}


def model_of(config: Config, **fields: Any) -> Model:
    """The model of that shape; `fields` are its others: dtype, cache_dtype, remat."""
    return MODELS[config.family](config, **fields)
