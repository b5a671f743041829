"""The language models, each identified by its config."""

from collections.abc import Callable
from typing import Any

from speccascade_jax.models.assistant import AssistantConfig, AssistantModel, AssistedConfig, AssistedModel
from speccascade_jax.models.block_drafter import BlockDrafterConfig, BlockDrafterModel
from speccascade_jax.models.decoder import DecoderConfig, DecoderModel
from speccascade_jax.models.dflash import DFlashConfig, DFlashModel, DFlashPairConfig, DFlashPairModel
from speccascade_jax.models.eagle import EagleConfig, EagleModel, EaglePairConfig, EaglePairModel
from speccascade_jax.models.exits import ExitsConfig, ExitsModel
from speccascade_jax.models.gemma4 import Gemma4Config, Gemma4Model
from speccascade_jax.models.shared_encoder import SharedEncoderConfig, SharedEncoderModel
from speccascade_jax.models.t5 import T5Config, T5Model
from speccascade_jax.models.t5gemma import T5GemmaConfig, T5GemmaModel
from speccascade_jax.models.t5gemma2 import T5Gemma2Config, T5Gemma2Model

DecoderOnlyConfig = DecoderConfig | Gemma4Config
SingleConfig = T5Config | DecoderOnlyConfig | T5GemmaConfig | T5Gemma2Config
TrainedNetworkConfig = ExitsConfig | SharedEncoderConfig | BlockDrafterConfig | EaglePairConfig
NetworkConfig = TrainedNetworkConfig | AssistedConfig | DFlashPairConfig
"""Configs of networks: several models that share parameters."""
TrainedConfig = SingleConfig | TrainedNetworkConfig
"""The configs of models that can be trained."""
Config = TrainedConfig | AssistedConfig | AssistantConfig | EagleConfig | DFlashPairConfig | DFlashConfig
NetworkModel = ExitsModel | SharedEncoderModel | BlockDrafterModel | EaglePairModel
SingleModel = T5Model | DecoderModel | Gemma4Model | T5GemmaModel | T5Gemma2Model
AttachedModel = AssistantModel | EagleModel | DFlashModel
Model = SingleModel | NetworkModel | AssistedModel | DFlashPairModel | AttachedModel
MODELS: dict[type, Callable[..., Model]] = {
    T5Config: T5Model,
    DecoderConfig: DecoderModel,
    Gemma4Config: Gemma4Model,
    T5GemmaConfig: T5GemmaModel,
    T5Gemma2Config: T5Gemma2Model,
    ExitsConfig: ExitsModel,
    SharedEncoderConfig: SharedEncoderModel,
    BlockDrafterConfig: BlockDrafterModel,
    AssistantConfig: AssistantModel,
    AssistedConfig: AssistedModel,
    DFlashConfig: DFlashModel,
    DFlashPairConfig: DFlashPairModel,
    EagleConfig: EagleModel,
    EaglePairConfig: EaglePairModel,
}


def model_of(config: Config, **fields: Any) -> Model:
    """The model with that config; for an assistant or head without its verifier, a model that only holds
    parameters. `fields`: dtype, cache_dtype, remat and so on."""
    return MODELS[type(config)](config, **fields)


def start_of(config: Config) -> int | None:
    """The token that a model's outputs begin with; None for a model that continues its prompt."""
    full = full_of(config)
    return None if isinstance(full, DecoderOnlyConfig) else getattr(full, "start_id", full.pad_id)


def full_of(config: Config) -> SingleConfig:
    """The config of a network's full model; for any other model, its config."""
    return config.full if isinstance(config, NetworkConfig) else config
