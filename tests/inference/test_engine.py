"""Batches: rows that others refill, at their own widths, write what each writes alone."""

import dataclasses

import jax
import numpy as np
import pytest
from shapes import TINY_GEMMA, TINY_T5

from speccascade_jax.core.decoding import Autoregressive, Speculative
from speccascade_jax.core.methods import METHODS
from speccascade_jax.core.typing import SamplingOptions
from speccascade_jax.inference.engine import Engine, Job
from speccascade_jax.models import model_of

WIDTHS = (8, 24)


def bucket(length):
    return next(width for width in WIDTHS if width >= length)


@pytest.fixture(params=["t5", "gemma"])
def job(request):
    model = model_of({"t5": dataclasses.replace(TINY_T5, num_encoder_layers=1, num_decoder_layers=1),
                      "gemma": dataclasses.replace(TINY_GEMMA, num_layers=2)}[request.param])
    large = model.init(0)
    small = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, large, model.init(1))
    sampler = Speculative(Autoregressive(model), model, METHODS["token_v3"], 3)
    return Job(sampler, (small, large), SamplingOptions(0.8), 0.3, 0)


def decoded(engine, job, rows, batch_size):
    """The tokens of each row, and how many inputs every batch on the host held."""
    texts, sizes = {}, []
    for slots, result in engine.decode(job, rows, range(len(rows)), batch_size, bucket):
        sizes.append(len(slots))
        texts |= {n: (result.tokens[slot].tolist(), result.origin[slot].tolist(),
                      [x[slot].tolist() for x in jax.tree.leaves(result.counts)])
                  for slot, n in slots.items()}
    assert sorted(texts) == list(range(len(rows)))
    return texts, sizes


def test_rows_of_all_widths_refill_each_other(job):
    draw = np.random.default_rng(1)
    rows = [draw.integers(3, 60, size).tolist() for size in draw.integers(1, WIDTHS[-1] + 1, 50)]
    engine = Engine(max_new_tokens=16, eos_id=1, pad_id=0)
    alone, _ = decoded(engine, job, rows, 1)
    engine.precompile(job, 8, WIDTHS)
    before, programs, called = engine.clock.compilations, engine._programs(job.sampler), []
    call = Engine._call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_call", lambda self, program, *rest: (
            called.append(programs._fields[programs.index(program)]), call(self, program, *rest))[1])
        together, sizes = decoded(engine, job, rows, 8)
    assert together == alone
    assert engine.clock.compilations == before
    assert called.count("narrow") == len(WIDTHS) - 1 and "generate" not in called and max(sizes) <= 8
    assert called.count("refill") + called.count("narrow") == (50 - 8) / 2
