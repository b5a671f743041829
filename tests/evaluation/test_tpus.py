"""What TPU's own compiler makes of the decoding loop, at tiny shapes; skipped where it is not installed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from speccascade_jax.commands import benchmark
from speccascade_jax.evaluation import compiled, tpus
from speccascade_jax.models import model_of
from speccascade_jax.models.presets import GEMMA2
from speccascade_jax.models.t5 import T5Config

pytest.importorskip("libtpu")
T5 = T5Config(vocab_size=384, d_model=128, d_kv=32, d_ff=192, num_heads=4, num_encoder_layers=1,
              num_decoder_layers=2)
GEMMA = dataclasses.replace(GEMMA2, vocab_size=384, d_model=128, d_kv=32, d_ff=192, num_heads=4,
                            num_kv_heads=4, num_layers=1, window=16)
PAIRS = {"t5": (T5, dataclasses.replace(T5, num_decoder_layers=3)),
         "decoder-only": (GEMMA, dataclasses.replace(GEMMA, num_layers=2))}


@pytest.fixture(scope="module")
def devices():
    return tpus.devices_of("v5e:2x2")


@pytest.mark.full(quick=["1-t5"])
@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("chips", [1, 4])
def test_the_loop_waits_for_nobody_and_copies_no_cache(family, chips, devices):
    pair = tpus.Pair(tpus.Asked(*PAIRS[family], 24, 8, 2, devices=chips), devices)
    program = compiled.Program(pair.programs.run(1, 24).as_text())
    rounds = program.rounds.body
    faults = program.faults(rounds, pair.kept())
    assert not any(faults.values())
    assert (program.collectives(rounds) > 0) == (chips > 1)
    if family == "t5":  # its layers are loops within the rounds: the drafter's read in each of its steps
        assert sorted(loop.times for loop in program.loops if loop.times) == [2, 2, 2, 3]


def steps(model, devices, plant):
    """The text of a loop over single steps of a model whose cache is as long as its heads are wide; `plant`
    stands between two of them."""
    one = jax.sharding.SingleDeviceSharding(devices[0])

    def on_chip(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), tree)

    params = model.abstract_params()
    source = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.eval_shape(lambda *given: model.prefill(*given, T5.d_kv)[1], params, *source)

    def decode(params, cache, limit):
        def step(carry):
            token, cache = carry
            logits, cache = model.extend(params, token, cache)
            return jnp.argmax(logits, -1).astype(jnp.int32), plant(cache)

        return jax.lax.while_loop(lambda carry: carry[1].length[0] < limit, step,
                                  (jnp.zeros((1, 1), jnp.int32), cache))

    arguments = on_chip((params, cache, jax.ShapeDtypeStruct((), jnp.int32)))
    program = compiled.Program(jax.jit(decode, donate_argnums=1).trace(*arguments).lower(
        lowering_platforms=("tpu",)).compile().as_text())
    kept = {("f32", x.size // n) for x in jax.tree.leaves(cache.keys) for n in (1, x.shape[0])}
    return program.faults(program.rounds.body, kept)


def turned(cache):
    return cache._replace(keys=jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), cache.keys))


def told(cache):
    jax.debug.callback(lambda length: None, cache.length)
    return cache


@pytest.mark.parametrize("plant,kind", [(turned, "changes of layout"), (told, "host transfers")])
def test_planted_faults_are_found(plant, kind, devices):
    model = model_of(T5, stacked=True)
    assert not any(steps(model, devices, lambda cache: cache).values())
    assert steps(model, devices, plant)[kind]


def test_the_command_tells_what_a_pair_needs(tmp_path, monkeypatch, capsys):
    """benchmark.py --tpu, from flags to tables and JSON lines."""
    monkeypatch.setattr(benchmark, "PRESETS", {"drafter": PAIRS["t5"][0], "verifier": PAIRS["t5"][1]})
    path, figures = tmp_path / "figures.jsonl", {}
    try:
        assert benchmark.main(["--tpu=v5e:2x2", "--preset", "drafter", "verifier", "--source-length=16",
                               "--new-tokens=8", "--block-sizes", "2", "--method=token_v3",
                               f"--output={path}"]) == 0
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    for line in map(json.loads, path.read_text().splitlines()):
        figures.setdefault(line["of"].split(", 1 of v5e:2x2, batch 1, gamma 2")[0], {})[line["figure"]] = line
    values = {title: {name: line["value"] for name, line in own.items()} for title, own in figures.items()}
    own = values.pop("a round")
    assert list(values) == ["begin", "run", "drafter step", "verifier step", "scoring 3 tokens"]
    assert all(one["fits"] and one["HBM in all, MB"] > one["arguments, MB"] > 0 for one in values.values())
    least = 3 * own["to be read: drafter pass, MB"] + own["to be read: verifier pass, MB"]
    assert own["to be read, MB"] == pytest.approx(least)
    assert own["floor, ms"] == pytest.approx(least * 1e9 / tpus.CHIPS["v5e"].bandwidth)
    assert not any(value for name, value in own.items() if name.startswith("faults"))
    assert {line["device"] for line in figures["run"].values()} == {"v5e:2x2"}
    assert "to be read, MB" in capsys.readouterr().out
