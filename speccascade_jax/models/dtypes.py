"""The dtypes that weights may have, and the one that suits this machine."""

import os
import re
from pathlib import Path

import jax

DTYPES = "float32", "bfloat16", "int8"
BFLOAT16_PRODUCTS = "avx512_bf16", "amx_bf16"
"""The flags of processors that multiply bfloat16. Others convert it to float32 first."""
CPUINFO = Path("/proc/cpuinfo")


def processor() -> dict[str, str]:
    """The fields that Linux states about the first core, such as `model name` and `flags`; elsewhere none."""
    try:
        first = CPUINFO.read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    return dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", first, re.MULTILINE))


def automatic_dtype() -> str:
    """The dtype that `auto` means: bfloat16 on accelerators and on CPUs that multiply it, otherwise float32.
    $SPECCASCADE_DTYPE overrides it."""
    if chosen := os.environ.get("SPECCASCADE_DTYPE"):
        return chosen
    flags = processor().get("flags", "").split()
    fast = jax.default_backend() != "cpu" or any(flag in flags for flag in BFLOAT16_PRODUCTS)
    return "bfloat16" if fast else "float32"
