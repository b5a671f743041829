"""Trains only low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685): W + alpha / rank A B.

A run's parameters are those of `init`, which are frozen, and A [in, rank] and B [rank, out] for each chosen
kernel W [in, out]. Saves contain the sums, so they are ordinary checkpoints.
"""

import json
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from speccascade_jax.checkpoints import native
from speccascade_jax.checkpoints.files import read_json
from speccascade_jax.config import TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.outputs import write_whole
from speccascade_jax.models import Config, Model, model_of
from speccascade_jax.models.adapters import AdaptedKernel
from speccascade_jax.parallel import tree_sharding

Array = jax.Array
ParameterPath = tuple[Any, ...]
ADAPTERS = "adapters"  # the trained part of a run's parameters
FILE = "lora.json"  # in the run's folder: the base model and the adapters' settings


def kernels_of(model: Config) -> dict[str, list[ParameterPath]]:
    """name -> paths of the kernels that can have an adapter."""
    kernels: dict[str, list[ParameterPath]] = {}
    for path, _ in nnx.to_flat_state(model_of(model).abstract_params()):
        if path[-1] == "kernel":
            kernels.setdefault(str(path[-2]), []).append(path)
    return kernels


def chosen(config: TrainConfig) -> list[ParameterPath]:
    """The kernels that get an adapter. Raises ValueError if the model has no kernel of a given name."""
    kernels = kernels_of(config.model)
    names = config.lora_kernels or [name for name in kernels if name != "head"]
    for name in names:
        if name not in kernels:
            raise FieldError(
                "lora_kernels",
                names,
                f"known: {', '.join(kernels)}.",
                f"lora_kernels names {name!r}, which this model does not have",
            )
    return [path for name in dict.fromkeys(names) for path in kernels[name]]


def check_adapters(config: TrainConfig) -> None:
    """Raises ValueError if this config cannot train adapters."""
    shapes = dict(nnx.to_flat_state(model_of(config.model).abstract_params()))
    narrowest = min(chosen(config), key=lambda path: min(shapes[path].shape))
    if config.lora_rank > (least := min(shapes[narrowest].shape)):
        size = " by ".join(map(str, shapes[narrowest].shape))
        raise FieldError(
            "lora_rank",
            config.lora_rank,
            f"use at most {least}, or leave it out of lora_kernels.",
            f"lora_rank is {config.lora_rank}, but {narrowest[-2]} is a matrix of {size}",
        )


def fresh(config: TrainConfig, params: nnx.State) -> nnx.State:
    """New adapters: A has variance 1 / in and B is zero, so that a run starts as its base model."""
    flat, adapters = dict(nnx.to_flat_state(params)), {}
    for path in chosen(config):
        size, out = flat[path].get_value().shape
        key = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(native.dotted(path).encode()))
        adapters[ADAPTERS, *path[:-1], "a"] = nnx.Param(
            size**-0.5 * jax.random.normal(key, (size, config.lora_rank))
        )
        adapters[ADAPTERS, *path[:-1], "b"] = nnx.Param(jnp.zeros((config.lora_rank, out)))
    return nnx.from_flat_state(adapters)


def split_adapters(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Splits parameters into the adapters and their base."""
    parts: dict[bool, dict[ParameterPath, Any]] = {True: {}, False: {}}
    for path, value in nnx.to_flat_state(params):
        parts[path[0] == ADAPTERS][path] = value
    return nnx.from_flat_state(parts[True]), nnx.from_flat_state(parts[False])


def with_adapters(params: nnx.State, adapters: nnx.State) -> nnx.State:
    """Joins the parts that split_adapters() returns."""
    return nnx.from_flat_state(dict(nnx.to_flat_state(params)) | dict(nnx.to_flat_state(adapters)))


def shapes_of(config: TrainConfig, model: Model) -> nnx.State:
    """The shapes of a run's parameters."""
    shapes = model.abstract_params()
    if not config.lora_rank:
        return shapes
    return with_adapters(shapes, jax.eval_shape(partial(fresh, config, shapes)))


def adapted(config: TrainConfig, params: nnx.State) -> nnx.State:
    """A run's parameters in the form that its model reads, each chosen kernel with its adapter."""
    if not config.lora_rank:
        return params
    adapters, base = (dict(nnx.to_flat_state(part)) for part in split_adapters(params))
    for path in chosen(config):
        a, b = (adapters[ADAPTERS, *path[:-1], name].get_value() for name in ("a", "b"))
        base[path] = base[path].replace(
            AdaptedKernel(base[path].get_value(), a, b, config.lora_alpha / config.lora_rank)
        )
    return nnx.from_flat_state(base)


def merging(config: TrainConfig, mesh: Mesh) -> Callable[[nnx.State], nnx.State]:
    """A function from a run's parameters to those of a model without adapters, in float32: it adds the
    adapters' products to their kernels. If the run has no adapters, it returns its argument."""
    if not config.lora_rank:
        return lambda params: params
    at = tree_sharding(mesh, model_of(config.model).abstract_params(), config.split_parameters)

    def whole(kernel: Any) -> Array:
        if not isinstance(kernel, AdaptedKernel):
            return kernel.astype(jnp.float32)
        low = jnp.matmul(kernel.a, kernel.b, precision="highest")
        return kernel.base.astype(jnp.float32) + kernel.scale * low

    return jax.jit(
        lambda params: jax.tree.map(
            whole, adapted(config, params), is_leaf=lambda x: isinstance(x, AdaptedKernel)
        ),
        out_shardings=at,
    )


def describe(config: TrainConfig, base: nnx.State) -> None:
    """Writes the base model and the adapters' settings into the run. Raises ValueError if the run started
    with others."""
    run = Path(config.output_dir)
    where, resumed = run / FILE, any((run / "latest").glob("[0-9]*"))
    if resumed and where.is_file() != bool(config.lora_rank):
        raise FieldError(
            "lora_rank",
            config.lora_rank,
            "resume with that, or choose another output_dir.",
            f"lora_rank is {config.lora_rank}, but the run in {run} began "
            f"{'with' if where.is_file() else 'without'} adapters",
        )
    if not config.lora_rank:
        where.unlink(missing_ok=True)
        return
    sums = native.checksums(nnx.to_pure_dict(base))
    fields = {
        "rank": config.lora_rank,
        "alpha": config.lora_alpha,
        "kernels": sorted({str(path[-2]) for path in chosen(config)}),
        "base": config.lora_base,
    }
    if not resumed:
        if jax.process_index() == 0:
            write_whole(where, json.dumps(fields | {"init": config.init, "crc32": sums}, indent=1) + "\n")
        return
    begun = read_json(where)
    for name, value in fields.items():
        if begun.get(name) != value:
            raise FieldError(
                f"lora_{name}",
                value,
                "resume with that, or choose another output_dir.",
                f"lora_{name} is {value}, but the run in {run} began with {begun.get(name)}",
            )
    if begun.get("crc32") != sums:
        raise FieldError(
            "init",
            config.init,
            "resume with these, or choose another output_dir.",
            f"init is {config.init}, whose parameters are not those that the run in {run} began "
            f"with ({begun.get('init')})",
        )
