"""What a Gemma 2 pair takes on each of several devices, from the compiled program: no weights are read.

    python scripts/memory.py --drafter=gemma2_2b --verifier=gemma2_27b --devices=8
"""

import dataclasses
import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.commands.commandline import exit_code
from speccascade_jax.core.decoding import Autoregressive, Speculative, generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.models.gemma import PRESETS, GemmaModel
from speccascade_jax.parallel import tensor_mesh, tensor_sharding


@dataclasses.dataclass(frozen=True)
class Arguments:
    drafter: str = "gemma2_2b"
    """A preset: gemma2_2b, gemma2_9b or gemma2_27b."""
    verifier: str = "gemma2_27b"
    devices: int = 8
    """On a machine with CPUs alone, so many virtual ones."""
    rows: int = 1
    source_length: int = 2048
    new_tokens: int = 320
    block_size: int = 1


def compiled_pair(drafter: GemmaModel, verifier: GemmaModel, devices: int, rows: int, source_length: int,
                  new_tokens: int, block_size: int) -> jax.stages.Compiled:
    """generate() for bfloat16 weights of these shapes, each model cut over the devices."""
    mesh = tensor_mesh(devices)
    sampler = Speculative(Autoregressive(drafter), verifier, METHODS["token_v3"], block_size)

    def weights(model: GemmaModel) -> nnx.State:
        return nnx.from_flat_state([
            (path, x.replace(jax.ShapeDtypeStruct(
                x.shape, jnp.bfloat16, sharding=tensor_sharding(mesh, model.config, path, x.shape))))
            for path, x in nnx.to_flat_state(model.abstract_params())])

    whole = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    lowered = generate.lower(
        sampler, (weights(drafter), weights(verifier)), whole(keys.shape, keys.dtype),
        whole((rows, source_length), jnp.int32), whole((rows,), jnp.int32),
        SamplingOptions(whole((), jnp.float32)), whole((1,), jnp.float32),
        max_new_tokens=new_tokens, eos_id=1)
    return lowered.compile()


def memory(arguments: Arguments) -> None:
    for name in (arguments.drafter, arguments.verifier):
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}: {', '.join(PRESETS)}.")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    models = [GemmaModel(PRESETS[name], dtype="bfloat16", cache_dtype="bfloat16")
              for name in (arguments.drafter, arguments.verifier)]
    began = time.monotonic()
    found = compiled_pair(*models, *dataclasses.astuple(arguments)[2:]).memory_analysis()
    gigabytes = {name: round(getattr(found, f"{name}_size_in_bytes") / 1e9, 2)
                 for name in ("argument", "output", "temp", "generated_code")}
    print(json.dumps({**dataclasses.asdict(arguments), "gigabytes_a_device": gigabytes,
                      "platform": jax.default_backend(),
                      "compile_seconds": round(time.monotonic() - began, 1)}))


def main(argv: list[str]) -> int:
    return exit_code(lambda: memory(tyro.cli(Arguments, args=argv, prog="memory.py", description=__doc__)))
