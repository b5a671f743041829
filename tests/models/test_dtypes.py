"""What `auto` means as a dtype."""

import dataclasses

import jax
import pytest

from speccascade_jax.config import DecodeConfig, dtype_of
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import dtypes

PAIR = DecodeConfig(drafter="small", verifier="large")
CORE = "processor\t: {n}\nmodel name\t: A CPU\nflags\t\t: {flags}\npower management:\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that gives this machine a processor with these flags, or without any an unknown one."""
    monkeypatch.delenv("SPECCASCADE_DTYPE", raising=False)

    def have(flags=None):
        path = tmp_path / "cpuinfo"
        if flags is not None:
            path.write_text("\n".join(CORE.format(n=n, flags=flags) for n in range(2)))
        monkeypatch.setattr(dtypes, "CPUINFO", path)

    return have


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx512f avx512_bf16 amx_tile", "bfloat16"),
        ("fpu amx_bf16", "bfloat16"),
        ("fpu avx512f avx512_bf16_not", "float32"),
        ("", "float32"),
        (None, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(flags, dtype, machine):
    machine(flags)
    assert dtype_of(PAIR) == dtype
    assert dtypes.processor().get("model name") == (None if flags is None else "A CPU")


def test_accelerators_have_bfloat16(machine, monkeypatch):
    machine("")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert dtype_of(PAIR) == "bfloat16"


def test_the_environment_overrides_auto_only(machine, monkeypatch):
    machine("avx512_bf16")
    monkeypatch.setenv("SPECCASCADE_DTYPE", "float32")
    assert dtype_of(PAIR) == "float32"
    assert dtype_of(dataclasses.replace(PAIR, dtype="int8")) == "int8"
    monkeypatch.setenv("SPECCASCADE_DTYPE", "float8")
    with pytest.raises(FieldError) as refused:
        dtype_of(PAIR)
    assert (refused.value.field, refused.value.value) == ("dtype", "float8")
    assert "SPECCASCADE_DTYPE is 'float8'" in str(refused.value)
