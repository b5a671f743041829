"""The language models, each known by its shape."""

from collections.abc import Callable
from typing import Any

from speccascade_jax.models.exits import ExitsConfig, ExitsModel
from speccascade_jax.models.gemma import GemmaConfig, GemmaModel
from speccascade_jax.models.shared_encoder import SharedEncoderConfig, SharedEncoderModel
from speccascade_jax.models.t5 import T5Config, T5Model

SingleConfig = T5Config | GemmaConfig
NetworkConfig = ExitsConfig | SharedEncoderConfig
"""Of several models that share parameters."""
Config = SingleConfig | NetworkConfig
Network = ExitsModel | SharedEncoderModel
Model = T5Model | GemmaModel | Network
MODELS: dict[str, Callable[..., Model]] = {
    T5Config.family: T5Model, GemmaConfig.family: GemmaModel, ExitsConfig.family: ExitsModel,
    SharedEncoderConfig.family: SharedEncoderModel}


def model_of(config: Config, **fields: Any) -> Model:
    """The model of that shape; `fields` are its others: dtype, cache_dtype, remat."""
    return MODELS[config.family](config, **fields)


def full_of(config: Config) -> SingleConfig:
    """The shape of a network's full model; any other model's own."""
    return config.full if isinstance(config, NetworkConfig) else config
