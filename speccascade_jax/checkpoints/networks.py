"""The configs and parameters of networks with several members, which only our own format supports."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NoReturn

from speccascade_jax.checkpoints import decoder, t5
from speccascade_jax.checkpoints.arrays import ParameterPath
from speccascade_jax.checkpoints.fields import check_fields
from speccascade_jax.checkpoints.files import shown
from speccascade_jax.models.block_drafter import BlockDrafterConfig
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.models.exits import HEADS, ExitsConfig, depth_of
from speccascade_jax.models.shared_encoder import SharedEncoderConfig
from speccascade_jax.models.t5 import T5Config

Names = Iterator[tuple[ParameterPath, str, bool]]


def of(config: T5Config | DecoderConfig) -> Any:
    """The functions for the config and the parameters of such a model."""
    return t5 if isinstance(config, T5Config) else decoder


def refuse(where: Any, *_: Any) -> NoReturn:
    """Rejects a network, which other formats do not support."""
    raise ValueError(
        f"{where}: a network of several models can only be saved in our own format (model.json)."
    )


def check_exits(where: Any, config: ExitsConfig) -> None:
    """Raises ValueError naming a field whose value no model with exits can have."""
    check_fields(where, ExitsConfig, vars(config))
    of(config.full).check(f"{where}: full", config.full)
    deepest = depth_of(config.full) - 1
    layers = config.layers
    if not layers or list(layers) != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] <= deepest:
        raise ValueError(
            f"{where}: layers is {shown(layers)}, not the exits' numbers of layers, the "
            f"smallest first, each from 1 to {deepest}."
        )
    if config.head not in HEADS:
        raise ValueError(f"{where}: head is {shown(config.head)}, not one of {', '.join(HEADS)}.")


def exits_names(config: ExitsConfig) -> Names:
    """(path in our parameters, a name, False) of every array."""
    head_paths = {
        "shared": [],
        "norm": [("norm", "scale")],
        "own": [("norm", "scale"), ("head", "kernel")],
        "adapter": [("norm", "scale"), ("narrow", "kernel"), ("widen", "kernel")],
    }[config.head]
    yield from part("full", config.full)
    for number in range(len(config.layers)):
        yield from plain(("exits", number, *path) for path in head_paths)


def check_shared_encoder(where: Any, config: SharedEncoderConfig) -> None:
    """Raises ValueError naming a field whose value no verifier with such a drafter can have."""
    drafter, verifier = config.drafter, config.verifier
    check_fields(where, SharedEncoderConfig, vars(config))
    t5.check(f"{where}: verifier", verifier)
    if drafter.num_encoder_layers != 0:
        raise ValueError(
            f"{where}: drafter: num_encoder_layers is {shown(drafter.num_encoder_layers)}, not "
            "0: it reads what the verifier encodes."
        )
    t5.check(f"{where}: drafter", dataclasses.replace(drafter, num_encoder_layers=1))
    for name in ("vocab_size", "pad_id", "eos_id"):
        ours, theirs = getattr(drafter, name), getattr(verifier, name)
        if ours != theirs:
            raise ValueError(
                f"{where}: drafter: {name} is {ours}, the verifier's is {theirs}: they must be the same."
            )


def shared_encoder_names(config: SharedEncoderConfig) -> Names:
    """(path in our parameters, a name, False) of every array."""
    yield from part("verifier", config.verifier)
    yield from part("drafter", config.drafter)
    yield from plain([("projection", "kernel"), *([("states", "kernel")] if config.states else [])])


def check_block_drafter(where: Any, config: BlockDrafterConfig) -> None:
    """Raises ValueError naming a field whose value no verifier with a block drafter can have."""
    check_fields(where, BlockDrafterConfig, vars(config))
    t5.check(f"{where}: verifier", config.verifier)
    depth, states = config.verifier.num_decoder_layers, config.states
    if not states or list(states) != sorted(set(states)) or not 0 <= states[0] <= states[-1] <= depth:
        raise ValueError(
            f"{where}: states is {shown(states)}, not the numbers of layers after which the verifier's "
            f"states are read, the smallest first, each from 0 to {depth}."
        )
    if config.verifier.relative_buckets < 8:  # as many per direction as t5.check requires of a decoder
        raise ValueError(
            f"{where}: {config.verifier.relative_buckets} buckets of relative positions are too few for a "
            "drafter that looks both ways: at least 8."
        )


def block_drafter_names(config: BlockDrafterConfig) -> Names:
    """(path in our parameters, a name, False) of every array."""
    yield from part("verifier", config.verifier)
    layers = [path for path, _, _ in t5.parameter_names(config.layer) if path[:1] == ("decoder",)]
    yield from plain(("drafter", "layers", *path[1:]) for path in layers)
    yield from plain(("drafter", name) for name in ("bias", "masks"))
    yield from plain([("drafter", "mix", "kernel"), *(("drafter", n, "scale") for n in ("mix_norm", "norm"))])


def part(name: str, config: T5Config | DecoderConfig) -> Names:
    """The arrays of a model that is a part of a network."""
    yield from plain((name, *path) for path, _, _ in of(config).parameter_names(config))


def plain(paths: Any) -> Names:
    for path in paths:
        yield path, ".".join(map(str, path)), False
