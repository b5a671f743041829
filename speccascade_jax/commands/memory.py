"""What a pair of models takes on each of several devices, from the compiled program: no weights are read.

    python scripts/memory.py --drafter=gemma2_2b --verifier=gemma2_27b --devices=8
"""

import dataclasses
import json
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.checkpoints.families import PRESETS
from speccascade_jax.commands.commandline import at_least, at_most, exit_code
from speccascade_jax.core.loop import generate
from speccascade_jax.core.methods import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.models import Model, model_of
from speccascade_jax.models.decoder import DecoderConfig
from speccascade_jax.models.vocabulary import Resized
from speccascade_jax.parallel import tensor_mesh, tensor_sharding

MOST = {"devices": 256, "rows": 2**16, "source_length": 2**20, "new_tokens": 2**20, "block_size": 2**10}
"""More than anybody has; beyond, compiling takes hours or overflows."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    drafter: str = "gemma2_2b"
    """A preset: qwen3_0.6b, llama3_1b, gemma3_270m, gemma2_2b, t5_1_1_small and so on; an unknown one names
    all."""
    verifier: str = "gemma2_27b"
    devices: int = 8
    """On a machine with CPUs only, so many virtual ones."""
    rows: int = 1
    source_length: int = 2048
    new_tokens: int = 320
    block_size: int = 1


def compiled_pair(drafter: Model, verifier: Model, devices: int, rows: int, source_length: int,
                  new_tokens: int, block_size: int) -> jax.stages.Compiled:
    """generate() for bfloat16 weights of these shapes, each model cut over the devices."""
    mesh = tensor_mesh(devices)
    drafts: Any = drafter
    if drafter.vocab_size != verifier.vocab_size:  # padded, or of another tokenizer
        drafts = Resized(drafter, verifier.vocab_size, min(drafter.vocab_size, verifier.vocab_size))
    sampler = Speculative(Autoregressive(drafts), verifier, METHODS["token_v3"], block_size)

    def weights(model: Model) -> nnx.State:
        return nnx.from_flat_state([
            (path, x.replace(jax.ShapeDtypeStruct(
                x.shape, jnp.bfloat16, sharding=tensor_sharding(mesh, model.config, path, x.shape))))
            for path, x in nnx.to_flat_state(model.abstract_params())])

    whole: Any = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    program = jax.jit(partial(generate, sampler, max_new_tokens=new_tokens, eos_id=verifier.config.eos_id))
    return program.lower(
        (weights(drafter), weights(verifier)), whole(keys.shape, keys.dtype),
        whole((rows, source_length), jnp.int32), whole((rows,), jnp.int32),
        SamplingOptions(whole((), jnp.float32)), whole((1,), jnp.float32)).compile()


def check(arguments: Arguments) -> None:
    """Raises ValueError for models that are unknown or no pair, and for numbers nothing can be made of."""
    for name in (arguments.drafter, arguments.verifier):
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}.")
    small, large = PRESETS[arguments.drafter], PRESETS[arguments.verifier]
    if small.vocab_size != large.vocab_size and not (
            isinstance(small, DecoderConfig) and isinstance(large, DecoderConfig)):
        raise ValueError(f"{arguments.drafter} has {small.vocab_size} tokens, {arguments.verifier} "
                         f"{large.vocab_size}; a cascade needs one vocabulary.")
    for name, most in MOST.items():
        at_least(1, **{name: getattr(arguments, name)})
        at_most(most, **{name: getattr(arguments, name)})


def memory(arguments: Arguments) -> None:
    check(arguments)
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    if jax.device_count() < arguments.devices:
        raise ValueError(f"--devices is {arguments.devices}; this machine has {jax.device_count()}.")
    drafter, verifier = (model_of(PRESETS[name], dtype="bfloat16", cache_dtype="bfloat16")
                         for name in (arguments.drafter, arguments.verifier))
    began = time.monotonic()
    found = compiled_pair(drafter, verifier, arguments.devices, arguments.rows, arguments.source_length,
                          arguments.new_tokens, arguments.block_size).memory_analysis()
    gigabytes = {name: round(getattr(found, f"{name}_size_in_bytes") / 1e9, 2)
                 for name in ("argument", "output", "temp", "generated_code")}
    print(json.dumps({**dataclasses.asdict(arguments), "gigabytes_a_device": gigabytes,
                      "platform": jax.default_backend(),
                      "compile_seconds": round(time.monotonic() - began, 1)}))


def main(argv: list[str]) -> int:
    return exit_code(lambda: memory(tyro.cli(Arguments, args=argv, prog="memory.py", description=__doc__)))
