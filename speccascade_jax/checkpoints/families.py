"""One row a model family: what the formats and training must know of it.

A new family has its two classes in models/__init__.py and a row here; nothing else asks which family a model
is of.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from speccascade_jax.checkpoints import deepmind, gemma, networks, t5, t5x
from speccascade_jax.checkpoints.arrays import ParameterPath, Placement
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models import Config, ExitsConfig, SharedEncoderConfig, SingleConfig
from speccascade_jax.models import gemma as gemma_models
from speccascade_jax.models import t5 as t5_models


class Family(NamedTuple):
    config: type[Config]
    presets: Mapping[str, SingleConfig]
    bos: bool
    """Its prompts begin with <bos>: a tokenizer trained for it has one."""
    check: Callable[[Any, Any], None]
    """check(where, config) raises ValueError naming the field of a config that no model can have."""
    formats: tuple[str, ...]
    """What save() can write it in."""
    own_file: str | None
    """The file by which the format of its authors is known; None: there is none."""
    load_own: Callable[[Any, Placement], tuple[Any, nnx.State]]
    read_own_config: Callable[[Any], Config]
    # In Hugging Face folders:
    read_config: Callable[[Path, dict[str, Any]], Config]
    """(config.json, its content) -> the config. Raises ValueError for what the family is not."""
    describe: Callable[[Any], dict[str, Any]]
    """The content of config.json. Raises ValueError for a model that the format cannot hold."""
    parameter_names: Callable[[Any], Iterator[tuple[ParameterPath, str, bool]]]
    """(path in our parameters, name of theirs, whether theirs is transposed) of every array."""
    unused: Set[str] = frozenset()
    """Arrays that may lie there and are not read."""
    stand_ins: Mapping[str, str] = {}
    """Array -> the one that is read where it is missing."""
    parts: tuple[str, ...] = ()
    """The fields of a network's config that are configs themselves."""


def network(config: type[Config], parts: tuple[str, ...], check: Callable[[Any, Any], None],
            parameter_names: Callable[[Any], Iterator[tuple[ParameterPath, str, bool]]]) -> Family:
    """The row of a network, which is a model of one of the other rows with more around it."""
    return Family(config, {}, bos=False, check=check, formats=("native",), own_file=None,
                  load_own=networks.refuse, read_own_config=networks.refuse, read_config=networks.refuse,
                  describe=networks.refuse, parameter_names=parameter_names, parts=parts)


FAMILIES = {row.config.family: row for row in (
    Family(t5_models.T5Config, t5_models.PRESETS, bos=False, check=t5.check,
           formats=("huggingface", "t5x", "native"), own_file="checkpoint", load_own=t5x.load,
           read_own_config=t5x.read_config, read_config=t5.read_config,
           describe=t5.describe, parameter_names=t5.parameter_names, unused=t5.UNUSED,
           stand_ins=t5.STAND_INS),
    Family(gemma_models.GemmaConfig, gemma_models.PRESETS, bos=True, check=gemma.check,
           formats=("huggingface", "native"), own_file="_METADATA", load_own=deepmind.load,
           read_own_config=deepmind.read_config, read_config=gemma.read_config,
           describe=gemma.describe, parameter_names=gemma.parameter_names),
    network(ExitsConfig, ("full",), networks.check_exits, networks.exits_names),
    network(SharedEncoderConfig, ("verifier", "drafter"), networks.check_shared_encoder,
            networks.shared_encoder_names),
)}
PRESETS: dict[str, SingleConfig] = {name: config for row in FAMILIES.values()
                              for name, config in row.presets.items()}


def family_of(where: Any, name: Any) -> Family:
    """The row of a family's name. Raises ValueError for an unknown one."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"{where} holds a {shown(name)} model; only {' and '.join(FAMILIES)} are supported.")
    return FAMILIES[name]
