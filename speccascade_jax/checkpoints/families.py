"""A table of model families, with what the formats and training need to know about each.

A decoder-only family has an entry in checkpoints.decoder.DECODER_SPELLINGS. Any other has its two classes in
models/__init__.py and an entry in MODEL_FAMILIES. No other code depends on a model's family.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from speccascade_jax.checkpoints import (
    assistant,
    decoder,
    deepmind,
    dflash,
    eagle,
    gemma4,
    networks,
    t5,
    t5gemma,
    t5gemma2,
    t5x,
)
from speccascade_jax.checkpoints.arrays import ParameterPath, Placement
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models import BlockDrafterConfig, Config, ExitsConfig, SharedEncoderConfig
from speccascade_jax.models import assistant as assistant_models
from speccascade_jax.models import dflash as dflash_models
from speccascade_jax.models import eagle as eagle_models
from speccascade_jax.models import gemma4 as gemma4_models
from speccascade_jax.models import presets as decoders
from speccascade_jax.models import t5 as t5_models
from speccascade_jax.models import t5gemma as t5gemma_models
from speccascade_jax.models import t5gemma2 as t5gemma2_models


class Family(NamedTuple):
    usual: Config
    """A config with the values of fields that a description omits."""
    presets: Mapping[str, Config]
    bos: bool
    """Whether prompts begin with <bos>, so that a tokenizer trained for it has one."""
    check: Callable[[Any, Any], None]
    """check(where, config) raises ValueError naming a field whose value no model can have."""
    formats: tuple[str, ...]
    """The formats in which save() can write it."""
    published_file: str | None
    """The file that identifies its authors' format; None if there is none."""
    load_published: Callable[[Any, Placement], tuple[Any, nnx.State]]
    read_published_config: Callable[[Any], Config]
    # In Hugging Face folders:
    read_config: Callable[[Path, dict[str, Any]], Config]
    """(config.json, its content) -> the config. Raises ValueError for what the family does not support."""
    describe: Callable[[Any], dict[str, Any]]
    """The content of config.json. Raises ValueError for a model that the format cannot represent."""
    parameter_names: Callable[[Any], Iterator[tuple[ParameterPath, str, bool]]]
    """(path in our parameters, name of theirs, whether theirs is transposed) of every array."""
    unused: Callable[[Any], Set[str]] = lambda config: frozenset()
    """Arrays that may be present but are not read."""
    canonical: Callable[[str], str | None] = str
    """Maps an array's name in a folder to its name in parameter_names(); None for an array that is not
    read."""
    with_arrays: Callable[[Any, Set[str]], Config] | None = None
    """with_arrays(config, names): the config of a folder with arrays of these names, if config.json is
    incomplete."""
    stand_ins: Mapping[str, str] = {}
    """Array -> the array that is read if it is missing."""
    parts: tuple[str, ...] = ()
    """The fields of a network's config that are configs themselves."""

    @property
    def config(self) -> type[Config]:
        return type(self.usual)


def network(
    usual: Config,
    parts: tuple[str, ...],
    check: Callable[[Any, Any], None],
    parameter_names: Callable[[Any], Iterator[tuple[ParameterPath, str, bool]]],
) -> Family:
    """The entry of a network, which contains a model of another entry."""
    return Family(
        usual,
        {},
        bos=False,
        check=check,
        formats=("native",),
        published_file=None,
        load_published=networks.refuse,
        read_published_config=networks.refuse,
        read_config=networks.refuse,
        describe=networks.refuse,
        parameter_names=parameter_names,
        parts=parts,
    )


def decoder_row(spelling: decoder.Spelling) -> Family:
    usual = spelling.usual
    readers: Any = (
        (deepmind.load, deepmind.read_config)
        if usual.family == "gemma2"
        else (networks.refuse, networks.refuse)
    )
    return Family(
        usual,
        {name: config for name, config in decoders.PRESETS.items() if config.family == usual.family},
        bos=True,
        check=decoder.check,
        formats=("huggingface", "native"),
        published_file="_METADATA" if usual.family == "gemma2" else None,
        load_published=readers[0],
        read_published_config=readers[1],
        read_config=decoder.read_config,
        describe=decoder.describe,
        parameter_names=decoder.parameter_names,
        unused=lambda config: {"lm_head.weight"},
        canonical=decoder.canonical,
    )


MODEL_FAMILIES = {
    row.usual.family: row
    for row in (
        Family(
            t5_models.T5Config(),
            t5_models.PRESETS,
            bos=False,
            check=t5.check,
            formats=("huggingface", "t5x", "native"),
            published_file="checkpoint",
            load_published=t5x.load,
            read_published_config=t5x.read_config,
            read_config=t5.read_config,
            describe=t5.describe,
            parameter_names=t5.parameter_names,
            unused=lambda config: t5.UNUSED,
            stand_ins=t5.STAND_INS,
        ),
        *map(decoder_row, decoder.DECODER_SPELLINGS.values()),
        Family(
            gemma4_models.GEMMA4,
            gemma4_models.PRESETS,
            bos=True,
            check=gemma4.check,
            formats=("huggingface", "native"),
            published_file=None,
            load_published=networks.refuse,
            read_published_config=networks.refuse,
            read_config=gemma4.read_config,
            describe=gemma4.describe,
            parameter_names=gemma4.parameter_names,
            unused=gemma4.unused,
            canonical=gemma4.canonical,
        ),
        Family(
            assistant_models.ASSISTANT,
            assistant_models.PRESETS,
            bos=True,
            check=assistant.check,
            formats=("huggingface", "native"),
            published_file=None,
            load_published=networks.refuse,
            read_published_config=networks.refuse,
            read_config=assistant.read_config,
            describe=assistant.describe,
            parameter_names=assistant.parameter_names,
            unused=gemma4.unused,
        ),
        Family(
            eagle_models.EAGLE,
            eagle_models.PRESETS,
            bos=True,
            check=eagle.check,
            formats=("huggingface", "native"),
            published_file=None,
            load_published=networks.refuse,
            read_published_config=networks.refuse,
            read_config=eagle.read_config,
            describe=eagle.describe,
            parameter_names=eagle.parameter_names,
            unused=lambda config: {"d2t"},
            canonical=eagle.canonical,
            with_arrays=eagle.with_arrays,
        ),
        Family(
            dflash_models.DFLASH,
            dflash_models.PRESETS,
            bos=True,
            check=dflash.check,
            formats=("huggingface", "native"),
            published_file=None,
            load_published=networks.refuse,
            read_published_config=networks.refuse,
            read_config=dflash.read_config,
            describe=dflash.describe,
            parameter_names=dflash.parameter_names,
            canonical=dflash.canonical,
        ),
        Family(
            t5gemma_models.T5GemmaConfig(),
            t5gemma_models.PRESETS,
            bos=True,
            check=t5gemma.check,
            formats=("huggingface", "native"),
            published_file=None,
            load_published=networks.refuse,
            read_published_config=networks.refuse,
            read_config=t5gemma.read_config,
            describe=t5gemma.describe,
            parameter_names=t5gemma.parameter_names,
            unused=lambda config: t5gemma.UNUSED,
            parts=t5gemma.PARTS,
        ),
        Family(
            t5gemma2_models.T5Gemma2Config(),
            t5gemma2_models.PRESETS,
            bos=True,
            check=t5gemma2.check,
            formats=("huggingface", "native"),
            published_file=None,
            load_published=networks.refuse,
            read_published_config=networks.refuse,
            read_config=t5gemma2.read_config,
            describe=t5gemma2.describe,
            parameter_names=t5gemma2.parameter_names,
            unused=lambda config: t5gemma2.UNUSED,
            canonical=t5gemma2.canonical,
            parts=t5gemma.PARTS,
        ),
        network(ExitsConfig(), ("full",), networks.check_exits, networks.exits_names),
        network(
            SharedEncoderConfig(),
            ("verifier", "drafter"),
            networks.check_shared_encoder,
            networks.shared_encoder_names,
        ),
        network(
            BlockDrafterConfig(),
            ("verifier",),
            networks.check_block_drafter,
            networks.block_drafter_names,
        ),
        network(
            assistant_models.AssistedConfig(),
            ("verifier", "drafter"),
            assistant.check_assisted,
            assistant.assisted_names,
        ),
        network(
            eagle_models.EaglePairConfig(), ("verifier", "drafter"), eagle.check_config, eagle.pair_names
        ),
        network(
            dflash_models.DFlashPairConfig(),
            ("verifier", "drafter"),
            dflash.check_config,
            dflash.pair_names,
        ),
    )
}
PRESETS: dict[str, Config] = {
    name: config for row in MODEL_FAMILIES.values() for name, config in row.presets.items()
}


def family_of(where: Any, name: Any) -> Family:
    """The entry of a family. Raises ValueError for an unknown name."""
    if not isinstance(name, str) or name not in MODEL_FAMILIES:
        near = (
            []
            if not isinstance(name, str)
            else [known for known in MODEL_FAMILIES if name and known.startswith(name)]
            or difflib.get_close_matches(name[:100], MODEL_FAMILIES, n=1)
        )
        hint = f" (the nearest is {near[0]})" if near else ""
        raise ValueError(
            f"{where} holds a {shown(name)} model; only {', '.join(MODEL_FAMILIES)} are supported{hint}."
        )
    return MODEL_FAMILIES[name]
