"""Which kernels multiply the matrices of a program."""

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.models import dtypes
from speccascade_jax.scheduling import kernels


def program(*vectors, dtype=jnp.float32, batched=False):
    """Products of so many vectors each, in turn."""
    axes = ((2,), (1,)), (((0,), (0,)) if batched else ((), ()))

    def multiply(inputs, matrix):
        return [jax.lax.dot_general(x, matrix, axes) for x in inputs]

    matrix = jax.ShapeDtypeStruct((2, 8, 16) if batched else (16, 8), dtype)
    inputs = [
        jax.ShapeDtypeStruct((2, count // 2, 8) if count > 1 else (1, 1, 8), dtype) for count in vectors
    ]
    return jax.jit(multiply).lower(inputs, matrix)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The matrices here count as large from a size that they have."""
    monkeypatch.setattr(kernels, "LARGE", 128)


@pytest.mark.parametrize(
    ("vectors", "few"),
    [
        ((), False),
        ((1,), False),
        ((2,), False),
        ((4,), True),
        ((62,), True),
        ((64,), False),
        ((1, 1, 1, 8), True),
        ((8, 2), False),
        ((8, 8, 64), True),
        ((8, 64, 64), False),
    ],
)
def test_a_program_is_judged_by_most_of_its_products(vectors, few):
    assert kernels.mostly_few(program(*vectors).as_text()) == few


def test_small_matrices_do_not_count(monkeypatch):
    monkeypatch.setattr(kernels, "LARGE", 129)
    assert not kernels.mostly_few(program(8).as_text())
    assert kernels.mostly_few(program(8, 8).as_text())


def test_products_of_other_dtypes_and_of_attention_do_not_count():
    assert not kernels.mostly_few(program(8, 8, dtype=jnp.bfloat16).as_text())
    assert not kernels.mostly_few(program(8, 8, batched=True).as_text())


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """A function that gives this machine a processor with these flags."""

    def have(flags):
        path = tmp_path / "cpuinfo"
        path.write_text(f"flags\t: {flags}\n")
        monkeypatch.setattr(dtypes, "CPUINFO", path)
        kernels._eigen_is_faster.cache_clear()

    yield have
    kernels._eigen_is_faster.cache_clear()


@pytest.mark.parametrize(
    ("has", "eigen"), [("fma avx2", True), ("avx2 avx512f", False), ("avx", False), ("", False)]
)
def test_eigen_multiplies_on_cpus_with_avx2_only(has, eigen, flags):
    flags(has)
    lowered = program(8)
    options = kernels.compiler_options(lowered)
    assert options == (kernels.EIGEN if eigen else {})
    if eigen:
        assert "ynn" not in lowered.compile(options).as_text()


def test_an_unknown_option_is_not_used(flags, monkeypatch):
    monkeypatch.setattr(kernels, "EIGEN", {"xla_cpu_no_such_option": ""})
    flags("avx2")
    assert kernels.compiler_options(program(8)) == {}
