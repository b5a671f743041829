"""The memory and time that a pair of models needs on TPUs, according to the TPU compiler. This needs no TPU
and no weights, and runs nothing. Times are lower bounds.

The compiled programs are the prefill of both models, the decode loop (rounds until texts are finished) and,
separately, one step of each model and the call that scores a draft.
"""

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints.arrays import Placement, head_of
from speccascade_jax.config import ConfigError, DecodeConfig, TrainConfig, available, load
from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.protocols import ability_of
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Speculative
from speccascade_jax.core.samplers.block import drafting
from speccascade_jax.core.verification import TOKEN, VERIFICATIONS
from speccascade_jax.evaluation.compiled import Program
from speccascade_jax.evaluation.profiling import bytes_read, local_bytes, scoring
from speccascade_jax.inference.progress import track
from speccascade_jax.models import Config, model_of
from speccascade_jax.models.assistant import AssistedCache
from speccascade_jax.models.block_drafter import BlockDrafterCache
from speccascade_jax.models.eagle import EagleCache
from speccascade_jax.models.stacking import stackable
from speccascade_jax.parallel import shared_by, tensor_mesh, tensor_sharding
from speccascade_jax.planning.prediction import expected_tokens
from speccascade_jax.scheduling.programs import Clock, Plan, Programs, shardings

PREFILL, LOOP = "prefill", "decode loop"  # names of two programs
PROGRAMS = 5  # number of programs compiled for a pair
KINDS = {"float32": "f32", "bfloat16": "bf16", "int8": "s8"}  # the compiler's names for dtypes


class Chip(NamedTuple):
    """Published figures of one chip."""

    memory: float  # bytes of HBM
    bandwidth: float  # bytes per second
    rate: float  # bfloat16 FLOP per second


CHIPS = {
    "v4": Chip(32e9, 1228e9, 275e12),
    "v5e": Chip(16e9, 819e9, 197e12),
    "v5p": Chip(95e9, 2765e9, 459e12),
    "v6e": Chip(32e9, 1640e9, 918e12),
}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The programs to compile: the shapes of a drafter and a verifier, and their settings."""

    drafter: Config
    verifier: Config
    source_length: int
    max_new_tokens: int
    block_size: int
    method: str = "token_v3"
    rows: int = 1
    devices: int = 1  # devices that share each model's parameters
    dtype: str = "bfloat16"
    stacked: bool = True  # layers in a loop, as on accelerators
    verification: str = TOKEN.name


def checked(name: str) -> Chip:
    """The chip of a topology such as v5e:2x2. Raises ValueError for an unknown chip, and without libtpu."""
    kind, _, size = name.partition(":")
    if kind not in CHIPS or not re.fullmatch(r"[1-9]\d?(x[1-9]\d?){1,2}", size):
        raise FieldError(
            "tpu",
            name,
            f"give the kind of chip, one of {', '.join(CHIPS)}, and the topology: v5e:2x2, v5p:2x2x1.",
            f"--tpu is {name!r}",
        )
    if find_spec("libtpu") is None:
        raise FieldError(
            "tpu",
            name,
            "pip install 'speccascade_jax[tpu]'.",
            "the TPU compiler is missing",
        )
    return CHIPS[kind]


def devices_of(name: str) -> list[Any]:
    """The described devices of a topology. Raises ValueError if the compiler does not know the topology."""
    # Do not look for a TPU in this machine, and let several processes compile.
    os.environ.update(
        {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
        }
    )
    jax.config.update("jax_platforms", "cpu")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        said = str(error).split("\n")[0]
        raise FieldError(
            "tpu",
            name,
            "give an existing topology.",
            f"--tpu is {name!r}, which the TPU compiler does not know ({said[:200]})",
        ) from None


def check_pair(shapes: Shapes, devices: list[Any]) -> None:
    """Raises ValueError for different vocabularies, a drafter for another verifier, and too few devices."""
    if shapes.devices > len(devices):
        raise FieldError(
            "tensor_parallel",
            shapes.devices,
            "name a larger topology.",
            f"{shapes.devices} chips share the parameters, and the topology has {len(devices)}",
        )
    check_vocabularies([shapes.drafter, shapes.verifier])
    wholes_of(shapes.drafter, shapes.verifier)


def check_vocabularies(configs: Sequence[Config]) -> None:
    """Raises FieldError for models with different vocabularies."""
    sizes = [config.vocab_size for config in configs]
    if len(set(sizes)) > 1:
        raise FieldError(
            "tpu",
            sizes,
            "--tpu compiles models of one vocabulary.",
            f"the models have {', '.join(map(str, sizes))} tokens",
        )


class Described(Programs):
    """Programs for described devices, whose free memory is unknown."""

    def _check_memory(self, rows: int, state: Any) -> None:
        return


class DescribedDevices:
    """Described devices that share the parameters of models, which are shapes without values."""

    def __init__(self, count: int, devices: list[Any]):
        self.mesh = None if count == 1 else tensor_mesh(count, devices)
        self.whole = SingleDeviceSharding(devices[0]) if self.mesh is None else NamedSharding(self.mesh, P())

    def params(self, model: Any, dtype: str) -> nnx.State:
        """The shapes and shardings of a model's parameters."""
        mesh = self.mesh
        place = Placement(
            dtype,
            lambda path, shape: (
                self.whole if mesh is None else tensor_sharding(mesh, model.config, path, shape)
            ),
        )
        flat = dict(nnx.to_flat_state(model.abstract_params()))

        def placed(path: Any, x: Any) -> Any:
            if jnp.issubdtype(x.dtype, jnp.integer):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.whole)
            return place.described(path, x.shape, head_of(path) not in flat)

        return nnx.from_flat_state({path: x.replace(placed(path, x)) for path, x in flat.items()})


def model_for(config: Config, dtype: str) -> Any:
    """The model that decodes in `dtype`, with separate layers."""
    return model_of(config, dtype=dtype, cache_dtype="bfloat16" if dtype == "int8" else dtype)


class Pair:
    """A drafter and a verifier on described devices, as shapes without values. A drafter that reads its
    verifier's states forms one network with it, with common parameters and cache."""

    def __init__(self, shapes: Shapes, devices: list[Any]):
        check_pair(shapes, devices)
        self.shapes = a = shapes
        described = DescribedDevices(a.devices, devices)
        self.whole = described.whole
        separate = [model_for(config, a.dtype) for config in wholes_of(a.drafter, a.verifier)]
        wholes = separate, [stackable(model) for model in separate] if a.stacked else separate
        self.plain, self.models = (
            tuple(part for model in models for part in getattr(model, "members", (model,)))
            for models in wholes
        )
        self.plain_params, of_wholes = (
            tuple(described.params(model, a.dtype) for model in models) for models in wholes
        )
        self.params: Any = of_wholes if len(of_wholes) > 1 else of_wholes[0]
        self.sampler = Speculative(
            drafting(self.models[0], a.block_size),
            self.models[1],
            METHODS[a.method],
            a.block_size,
            verification=VERIFICATIONS[a.verification],
        )
        self.programs = Described(
            Plan(self.sampler, a.max_new_tokens, a.verifier.eos_id, a.verifier.vocab_size),
            self.params,
            None,
            Clock(),
        )

    @cached_property
    def state(self) -> Any:
        """The shapes and shardings of the loop's state, known once the prefill is compiled."""
        return self.programs._state(self.shapes.rows, self.shapes.source_length)

    def part(self, nest: Any, number: int) -> Any:
        """The entry of the `number`-th model in the parameters or caches of all models."""
        return nest if self.sampler.shares else nest[number]

    def compiled(self) -> Iterator[tuple[str, float, Any]]:
        """Yields (name, seconds of tracing and compiling, program) for the prefill, the decode loop and the
        parts of a round. A program that does not fit is replaced by the compiler's message. Seconds are CPU
        seconds of all threads, on which other work on the machine has little influence."""
        a, count = self.shapes, scoring(self.shapes.block_size)

        def step(number: int, tokens: int) -> Any:
            read = jax.ShapeDtypeStruct((a.rows, tokens), jnp.int32, sharding=self.whole)
            cache = self.part(self.state.caches, number)
            with shared_by(self.params):
                return (
                    jax.jit(
                        self.models[number].extend, donate_argnums=2, out_shardings=(None, shardings(cache))
                    )
                    .lower(self.part(self.params, number), read, cache)
                    .compile()
                )

        for name, make in (
            (PREFILL, partial(self.programs.begin, a.rows, a.source_length)),
            (LOOP, partial(self.programs.run, a.rows, a.source_length)),
            ("drafter step", partial(step, 0, a.block_size + 1 if self.at_once else 1)),
            ("verifier step", partial(step, 1, 1)),
            (count, partial(step, 1, a.block_size + 1)),
        ):
            began = time.process_time()
            try:
                program = make()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                program = str(error).split("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
            yield name, time.process_time() - began, program

    @property
    def at_once(self) -> bool:
        """Whether the drafter writes a draft in one pass."""
        return ability_of(self.sampler.drafter, "at_once")

    @property
    def drafter_passes(self) -> int:
        """The number of drafter passes per round."""
        return 1 if self.at_once else self.shapes.block_size + (not METHODS[self.shapes.method].lossless)

    def least_read(self) -> tuple[float, float]:
        """The bytes that a device must read for one pass of the drafter and one of the verifier: the weights
        and all cache buffers."""
        drafter, verifier = (
            float(bytes_read(model, self.plain_params[0 if self.sampler.shares else number]))
            for number, model in enumerate(self.plain)
        )
        if self.sampler.shares:
            held = self.state.caches
            return drafter + read_by_drafter(held), verifier + read_of(buffers_of(held.verifier))
        small, large = (read_of(buffers_of(cache)) for cache in self.state.caches)
        return drafter + small, verifier + large

    def round_flops(self) -> float:
        """A device's share of the FLOP of a round's matrix products."""
        traced = jax.make_jaxpr(partial(loop.advance, self.sampler, eos_id=1))(self.params, self.state)
        return flops(traced.jaxpr) / self.shapes.devices

    def kept(self) -> set[tuple[str, int]]:
        """(dtype, number of entries) of a device's matrices and caches, and of one layer of stacked ones.
        Arrays no larger than the results of a call are excluded, because copies of results have such sizes,
        too."""
        matrices = [x for x in jax.tree.leaves(self.plain_params) if x.ndim > 1]
        computed = self.shapes.rows * (self.shapes.block_size + 1) * max(min(x.shape) for x in matrices)
        arrays = [*buffers_of(self.state.caches), *buffers_of(self.params), *matrices]
        sizes = {
            (KINDS[x.dtype.name], local_bytes(x) // x.dtype.itemsize // share)
            for x in arrays
            for share in (1, x.shape[0] if x.ndim > 2 else 1)
        }
        return {(kind, size) for kind, size in sizes if size > computed}


def dtype_of(run: DecodeConfig) -> str:
    """The dtype of a config's weights on TPUs."""
    return "bfloat16" if run.dtype == "auto" else run.dtype


def attached_of(config: Config) -> checkpoints.Attached | None:
    """The entry of a drafter with that config, if it only works as a member of one network with its
    verifier."""
    return checkpoints.ATTACHED.get(type(model_of(config)))


def wholes_of(drafter: Config, verifier: Config) -> list[Config]:
    """The configs with separate parameters: the two models, or the network formed by a drafter of
    checkpoints.ATTACHED and its verifier. Raises ValueError for a drafter of another verifier."""
    attached = attached_of(drafter)
    if attached is None:
        return [drafter, verifier]
    small, large = model_of(drafter), model_of(verifier)
    if not isinstance(large, attached.verifier):
        raise ValueError(
            f"{attached.name} only drafts for the {attached.verifier_name} that it was trained with."
        )
    return [attached.joined("the drafter", small, large).config]


def read_by_drafter(cache: AssistedCache | EagleCache | BlockDrafterCache) -> float:
    """Bytes of a network's cache that a device reads for one pass of the drafter."""
    if isinstance(cache, AssistedCache):  # one layer of each kind
        return sum(local_bytes(x) / x.shape[0] for x in buffers_of(cache.verifier))
    held = (cache.keys, cache.values) if isinstance(cache, EagleCache) else buffers_of(cache.drafter)
    return float(read_of(held))


def read_of(buffers: Iterable[Any]) -> int:
    """Bytes of all buffers on a device."""
    return sum(map(local_bytes, buffers))


def shapes_of(run: DecodeConfig) -> list[Config]:
    """The shapes of a config's models, from their folders or, if these are missing, from their training
    configs. Raises FieldError if both are missing."""
    trained: dict[str, Config] = {}
    for name in available():
        with contextlib.suppress(ConfigError):
            config = load(name)
            if isinstance(config, TrainConfig):
                trained |= dict.fromkeys(config.folders, config.model)
    configs = []
    for role, path in run.roles:
        folder, member = checkpoints.split_member(path)
        if member is not None:
            raise FieldError(
                "tpu",
                path,
                "--tpu compiles two models that share nothing.",
                f"{role} is a member of the network {folder}",
            )
        if not Path(folder).is_dir() and folder not in trained:
            raise FieldError(
                "preset",
                path,
                "give both shapes with --preset.",
                f"{role}, {folder}, is missing, and no config has its shape",
            )
        configs.append(checkpoints.config_of(folder) if Path(folder).is_dir() else trained[folder])
    return configs


def buffers_of(tree: Any) -> list[Any]:
    """The large arrays: keys and values of caches, matrices of stacked parameters."""
    return [x for x in jax.tree.leaves(tree) if x.ndim > 2 and x.dtype.name in KINDS]


def flops(jaxpr: Any) -> float:
    """The FLOP of a jaxpr's matrix products. A loop of unknown length counts once, and of branches only the
    most expensive one counts."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(shape[n] for n in contracted)
            continue
        inner = [
            flops(getattr(value, "jaxpr", value))
            for parameter in equation.params.values()
            for value in (parameter if isinstance(parameter, tuple | list) else [parameter])
            if hasattr(getattr(value, "jaxpr", value), "eqns")
        ]
        many = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += many * (max(inner, default=0.0) if equation.primitive.name == "cond" else sum(inner))
    return total


def memory_of(program: Any, text: Program) -> dict[str, float]:
    """The memory of a program per device, in MB. It is in HBM, except for temporaries in VMEM."""
    analysis, (temporary, fast) = program.memory_analysis(), text.temporaries()
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    sizes = {
        "arguments": analysis.argument_size_in_bytes,
        "temporaries in HBM": temporary,
        "temporaries in VMEM": fast,
        "code": analysis.generated_code_size_in_bytes,
        "HBM in all": held + temporary + analysis.generated_code_size_in_bytes,
    }
    return {f"{name}, MB": size / 1e6 for name, size in sizes.items()}


def figures(
    pair: Pair, name: str, acceptance: float, progress: str = "compiling"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields tables of a pair on the topology `name`, as (title, values by figure), as soon as they are
    known.

    acceptance: the assumed acceptance probability, for the time per token. progress: the name of the work for
    the progress display.
    """
    chip, shapes = checked(name), pair.shapes
    where = (
        f"{shapes.devices} of {name}, source {shapes.source_length}, batch {shapes.rows}, "
        f"block size {shapes.block_size}"
    )
    faults: dict[str, list[str]] = {}
    read, collectives = 0, 0
    for what, seconds, program in track(pair.compiled(), progress, PROGRAMS):
        if isinstance(program, str):
            yield f"{what}, {where}", {"trace and compile, CPU s": seconds, "fits": False, "why": program}
            return
        text = Program(program.as_text())
        memory = memory_of(program, text)
        if what == LOOP:
            body = text.rounds.body
            read, collectives = text.bytes_read(body), text.collectives(body)
            faults = text.faults(body, pair.kept())
        yield (
            f"{what}, {where}",
            {
                "trace and compile, CPU s": seconds,
                **memory,
                "fits": memory["HBM in all, MB"] * 1e6 <= chip.memory,
            },
        )
    drafter, verifier = pair.least_read()
    least, work = pair.drafter_passes * drafter + verifier, pair.round_flops()
    bound = max(least / chip.bandwidth, work / chip.rate)
    tokens = expected_tokens(acceptance, shapes.block_size)
    alone = verifier / chip.bandwidth
    yield (
        f"a round, {where}",
        {
            "to be read: drafter pass, MB": drafter / 1e6,
            "to be read: verifier pass, MB": verifier / 1e6,
            "to be read, MB": least / 1e6,
            "read from HBM by the program, MB": read / 1e6,
            "read / to be read": read / least,
            "GFLOP": work / 1e9,
            "collectives between chips": collectives,
            "lower bound, ms": 1e3 * bound,
            "with what the program reads, ms": 1e3 * max(read / chip.bandwidth, work / chip.rate),
            f"lower bound at acceptance {acceptance}, ms per token of a row": 1e3 * bound / tokens,
            "the verifier alone: lower bound, ms per token of a row": 1e3 * alone,
            **{f"in the loop: {kind}": len(lines) for kind, lines in faults.items()},
        },
    )
    for kind, lines in faults.items():
        if lines:
            yield f"{kind} in a round, {where}", {str(n): line for n, line in enumerate(lines)}
