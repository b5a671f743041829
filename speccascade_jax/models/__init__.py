"""The language models, each known by its shape."""

from typing import Any

from speccascade_jax.models.gemma import GemmaConfig, GemmaModel
from speccascade_jax.models.t5 import T5Config, T5Model

Config = T5Config | GemmaConfig
Model = T5Model | GemmaModel
FAMILIES: dict[str, type[Config]] = {kind.family: kind for kind in (T5Config, GemmaConfig)}


def model_of(config: Config, **fields: Any) -> Model:
    """The model of that shape; `fields` are its others: dtype, cache_dtype, remat."""
    return T5Model(config, **fields) if isinstance(config, T5Config) else GemmaModel(config, **fields)
