"""The kernels with which XLA multiplies matrices on CPUs.

Scoring a block multiplies a few vectors by every matrix of the verifier. For float32 XLA prefers YNNPACK to
Eigen. On CPUs with AVX2 but not AVX-512, Eigen takes less time for up to 63 vectors (docs/log.md, "Eigen or
YNNPACK"). On the CPU with AVX-512 that we tried, decoding with it was no faster.
"""

import functools
import math
import re
from typing import Any

import jax
from jax.stages import Lowered

from speccascade_jax.models.dtypes import processor

FEW = range(3, 64)
"""How many vectors Eigen multiplies faster."""
LARGE = 2**22
"""How many numbers the matrices hold at least. Programs with smaller ones gained nothing from Eigen."""
EIGEN: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""The compiler option that leaves YNNPACK out."""
SHAPES = r"\(tensor<([\dx]+)xf32>, tensor<([\dx]+)xf32>\) -> tensor<([\dx]+)xf32>"
PRODUCT = re.compile(rf"stablehlo\.dot_general (?!.*batching_dims).* : {SHAPES}")


def compiler_options(lowered: Lowered) -> dict[str, Any]:
    """The options to compile a program with, by the products of float32 that it consists of."""
    return dict(EIGEN) if _eigen_is_faster() and mostly_few(lowered.as_text()) else {}


def mostly_few(program: str) -> bool:
    """Whether most of the matrices in a StableHLO program, by size, are multiplied by a few vectors, and are
    large. Those that are multiplied by a single one do not count: XLA has another kernel for them."""
    few = several = 0
    for shapes in PRODUCT.findall(program):
        left, right, result = (math.prod(map(int, shape.split("x"))) for shape in shapes)
        vectors = math.isqrt(left * result // right)
        few += right * (vectors in FEW)
        several += right * (vectors > 1)
    return 2 * few > several and few >= LARGE


@functools.cache
def _eigen_is_faster() -> bool:
    flags = processor().get("flags", "").split()
    return jax.default_backend() == "cpu" and "avx2" in flags and "avx512f" not in flags and _is_an_option()


def _is_an_option() -> bool:
    """Whether this version of XLA has the option."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=EIGEN)
    except jax.errors.JaxRuntimeError:
        return False
    return True
