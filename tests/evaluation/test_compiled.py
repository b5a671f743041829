"""The analysis of a compiled program's text, on one written by hand."""

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.evaluation import tpus
from speccascade_jax.evaluation.compiled import Array, Program

# Rounds, each with two passes over a stack of eight matrices; a cache is turned in HBM in every round.
TEXT = """HloModule jit_run, is_scheduled=true

%slice_of (param_0: bf16[8,128,128], param_1: s32[]) -> bf16[1,128,128] {
  %param_0 = bf16[8,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  ROOT %slice.1 = bf16[1,128,128]{2,1,0:T(8,128)(2,1)S(1)} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={1,128,128}
}

%pass_condition (state.1: (s32[], bf16[8,128,128])) -> pred[] {
  %two = s32[]{:T(128)} constant(2)
  %state.1 = (s32[]{:T(128)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %count.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%count.1, %two), direction=LT
}

%pass (state.2: (s32[], bf16[8,128,128])) -> (s32[], bf16[8,128,128]) {
  %state.2 = (s32[]{:T(128)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %count.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %weights.2 = bf16[8,128,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.2), index=1
  %own = bf16[1,128,128]{2,1,0:T(8,128)(2,1)S(1)} fusion(%weights.2, %count.2), kind=kLoop, calls=%slice_of
  ROOT %next.2 = (s32[]{:T(128)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) tuple(%count.2, %weights.2)
}

%round_condition (state.3: (bf16[4,96,64], bf16[8,128,128])) -> pred[] {
  %state.3 = (bf16[4,96,64]{2,1,0:T(8,128)(2,1)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %on = pred[]{:T(512)} custom-call(%state.3), custom_call_target="on"
}

%round (state.4: (bf16[4,96,64], bf16[8,128,128])) -> (bf16[4,96,64], bf16[8,128,128]) {
  %state.4 = (bf16[4,96,64]{2,1,0:T(8,128)(2,1)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %cache = bf16[4,96,64]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.4), index=0
  %weights.4 = bf16[8,128,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%state.4), index=1
  %zero = s32[]{:T(128)} constant(0)
  %begun = (s32[]{:T(128)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) tuple(%zero, %weights.4)
  %passes = (s32[]{:T(128)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) while(%begun), condition=%pass_condition, body=%pass
  %turned = bf16[4,96,64]{1,2,0:T(8,128)(2,1)} copy(%cache)
  %back = bf16[4,96,64]{2,1,0:T(8,128)(2,1)} copy(%turned)
  ROOT %next.4 = (bf16[4,96,64]{2,1,0:T(8,128)(2,1)}, bf16[8,128,128]{2,1,0:T(8,128)(2,1)}) tuple(%back, %weights.4)
}

ENTRY %main (cache.0: bf16[4,96,64], weights.0: bf16[8,128,128]) -> bf16[4,96,64] {
  %cache.0 = bf16[4,96,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %weights.0 = bf16[8,128,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %laid = bf16[8,128,128]{1,2,0:T(8,128)(2,1)} copy(%weights.0)
  %state.0 = (bf16[4,96,64]{2,1,0:T(8,128)(2,1)}, bf16[8,128,128]{1,2,0:T(8,128)(2,1)}) tuple(%cache.0, %laid)
  %done = (bf16[4,96,64]{2,1,0:T(8,128)(2,1)}, bf16[8,128,128]{1,2,0:T(8,128)(2,1)}) while(%state.0), condition=%round_condition, body=%round
  ROOT %cache.9 = bf16[4,96,64]{2,1,0:T(8,128)(2,1)} get-tuple-element(%done), index=0
}
"""  # noqa: E501
CACHE = 4 * 96 * 128 * 2  # the last axis fills a tile of 128
TURNED = 4 * 64 * 128 * 2
MATRIX = 128 * 128 * 2


def test_loops_and_what_they_read():
    program = Program(TEXT)
    assert [(loop.body, loop.times, loop.inside) for loop in program.loops] == [
        ("pass", 2, "round"),
        ("round", None, "main"),
    ]
    assert program.rounds.body == "round"
    assert program.bytes_read("round") == 2 * (MATRIX + 4) + CACHE + TURNED  # 4: which matrix
    assert program.temporaries() == (8 * MATRIX + TURNED, MATRIX)  # weights laid out anew, the cache turned


def test_faults():
    program, kept = Program(TEXT), {("bf16", 4 * 96 * 64), ("bf16", 8 * 128 * 128)}
    faults = program.faults("round", kept)
    assert len(faults.pop("changes of layout")) == 2 and not any(faults.values())
    assert not any(program.faults("round", {("f32", 4 * 96 * 64)}).values())
    copied = TEXT.replace("{1,2,0:T(8,128)(2,1)} copy(%cache)", "{2,1,0:T(8,128)(2,1)} copy(%cache)")
    assert len(Program(copied).faults("round", kept)["copies"]) == 2
    waits = TEXT.replace("copy(%turned)", 'custom-call(%turned), custom_call_target="xla_python_callback"')
    assert Program(waits).faults("round", kept)["host transfers"] == ["1 x custom-call back"]
    with pytest.raises(ValueError, match="no loop over rounds"):
        _ = Program(
            TEXT.replace(
                'ROOT %on = pred[]{:T(512)} custom-call(%state.3), custom_call_target="on"',
                "%n = s32[]{:T(128)} constant(3)\n  ROOT %on = pred[]{:T(512)} compare(%n, %n), direction=LT",
            )
        ).rounds


def test_sizes_are_those_of_whole_tiles():
    assert Array("bf16", (16, 80, 64), "1,2,0:T(8,128)(2,1)").bytes == 16 * 128 * 64 * 2
    assert Array("f32", (3,), "0:T(256)S(1)").bytes == 256 * 4
    assert Array("s32", (), ":T(128)").bytes == 4


def test_flops_of_loops_and_branches():
    def function(x, w):
        x = jax.lax.fori_loop(0, 5, lambda _, x: x @ w, x)
        x = jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)
        return jax.jit(lambda x: x @ w)(x)

    x, w = jnp.zeros((3, 8)), jnp.zeros((8, 8))
    assert tpus.flops(jax.make_jaxpr(function)(x, w).jaxpr) == (5 + 2 + 1) * 2 * 3 * 8 * 8
