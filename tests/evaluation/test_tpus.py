"""The decoding loop compiled by the TPU compiler at tiny shapes; skipped if that is not installed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from speccascade_jax.commands import benchmark
from speccascade_jax.core.transforms import SamplingOptions, token_probs
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation import compiled, tpus
from speccascade_jax.models.assistant import ASSISTANT
from speccascade_jax.models.dflash import DFLASH
from speccascade_jax.models.eagle import EAGLE
from speccascade_jax.models.gemma4 import GEMMA4
from speccascade_jax.models.presets import GEMMA2, QWEN3_8B
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.parallel import TENSOR_AXIS

pytest.importorskip("libtpu")
T5 = T5Config(
    vocab_size=384, d_model=128, d_kv=32, d_ff=192, num_heads=4, num_encoder_layers=1, num_decoder_layers=2
)
GEMMA = dataclasses.replace(
    GEMMA2,
    vocab_size=384,
    d_model=128,
    d_kv=32,
    d_ff=192,
    num_heads=4,
    num_kv_heads=4,
    num_layers=2,
    window=16,
)
PAIRS = {
    "t5": (T5, dataclasses.replace(T5, num_decoder_layers=3)),
    "decoder-only": (GEMMA, dataclasses.replace(GEMMA, num_layers=3)),
}


@pytest.fixture(scope="module")
def devices():
    return tpus.devices_of("v5e:2x2")


@pytest.mark.full(quick=["1-t5"])
@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("chips", [1, 4])
def test_the_loop_neither_waits_for_the_host_nor_copies_a_cache(family, chips, devices):
    pair = tpus.Pair(tpus.Shapes(*PAIRS[family], 24, 8, 2, devices=chips), devices)
    program = compiled.Program(pair.programs.run(1, 24).as_text())
    rounds = program.rounds.body
    faults = program.faults(rounds, pair.kept())
    assert not any(faults.values())
    assert (program.collectives(rounds) > 0) == (chips > 1)
    # Layers are loops within the rounds: the drafter's read in each of its steps.
    assert sorted(loop.times for loop in program.loops if loop.times) == [2, 2, 2, 3]


@pytest.mark.full
@pytest.mark.parametrize("centroids", [None, 24])
def test_an_assistant_gets_states_and_keys_without_a_copy(centroids, devices):
    """From its verifier's cache, within the loop; it reads its layers' weights and one layer's keys and
    values of each kind."""
    heads = {"d_kv": 128, "d_kv_global": 256, "num_heads": 4, "num_kv_heads": 1, "num_kv_heads_global": 1}
    sizes = heads | {"vocab_size": 384, "d_ff": 192, "window": 16}
    verifier = dataclasses.replace(
        GEMMA4, **sizes, d_model=128, num_layers=6, num_readers=2, per_layer_width=32, local=(1, 0)
    )
    drafter = dataclasses.replace(
        ASSISTANT,
        **sizes,
        d_model=64,
        num_layers=2,
        num_readers=2,
        local=(1, 0),
        state_width=128,
        num_centroids=centroids,
        active_centroids=4,
    )
    pair = tpus.Pair(tpus.Shapes(drafter, verifier, 24, 8, 2, method="speculative"), devices)
    program = compiled.Program(pair.programs.run(1, 24).as_text())
    assert not any(program.faults(program.rounds.body, pair.kept()).values())
    small, large = pair.least_read()
    weights = 2 * sum(x.size for x in jax.tree.leaves(pair.plain_params[0]["drafter"]) if x.ndim > 1)
    table = 2 * drafter.vocab_size * drafter.d_model
    cache = sum(map(tpus.local_bytes, tpus.buffers_of(pair.state.caches.verifier)))
    assert small == pytest.approx(weights - (table if centroids else 0) + cache / 2, rel=0.02)
    assert large > 4 * small


STATES = {"vocab_size": 512, "d_model": 256, "d_kv": 128, "d_ff": 512, "num_heads": 4, "num_kv_heads": 2}
WIDE = STATES | {"d_model": 2048, "num_heads": 16, "num_kv_heads": 8}  # else no layout is worth changing
READERS = {
    "head": (WIDE, dataclasses.replace(EAGLE, **WIDE, draft_vocab_size=256, state_width=2048)),
    "dflash": (STATES, dataclasses.replace(DFLASH, **STATES, num_layers=2, states=(2, 4))),
}


@pytest.mark.full
@pytest.mark.parametrize("name,chips", [("head", 2), ("dflash", 1)])
def test_the_verifiers_states_are_read_in_place(name, chips, devices):
    """A head's features, keys and values, and a block drafter's: written and read in the loop without a copy,
    in one layout. One pass of a block drafter drafts."""
    sizes, drafter = READERS[name]
    verifier = dataclasses.replace(QWEN3_8B, **sizes, num_layers=8)
    shapes = tpus.Shapes(drafter, verifier, 24, 8, 3, method="speculative", devices=chips)
    pair = tpus.Pair(shapes, devices)
    program = compiled.Program(pair.programs.run(1, 24).as_text())
    assert not any(program.faults(program.rounds.body, pair.kept()).values())
    assert pair.drafter_passes == (1 if name == "dflash" else 3)
    small, large = pair.least_read()
    read = [  # but for what turns the verifier's states into the drafter's; DFlash's head is the verifier's
        x
        for path, x in nnx.to_flat_state(pair.plain_params[0])
        if len(x.shape) > 1 and path[:2] not in (("drafter", "projection"), ("drafter", "mix"))
        if path[0] == "drafter" or (name == "dflash" and "head" in path)
    ]
    held = tpus.read_by_drafter(pair.state.caches)
    assert small == pytest.approx(sum(map(tpus.local_bytes, read)) + held, rel=0.02)
    assert large > 2 * small


def test_a_drafter_of_another_verifier_is_not_compiled(devices):
    """Neither with another width nor of another kind."""
    for verifier in (dataclasses.replace(QWEN3_8B, **STATES | {"d_model": 128}, num_layers=8), T5):
        verifier = dataclasses.replace(verifier, vocab_size=512)
        with pytest.raises(ValueError, match=r"head of another verifier|head only drafts"):
            tpus.check_pair(tpus.Shapes(READERS["head"][1], verifier, 24, 8, 3), devices)


@pytest.mark.full(quick=["1"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_drafter_that_catches_up_keeps_the_layout_of_its_caches(rows, devices):
    """With lossless methods its first pass of a round reads two tokens, the others one."""
    pair = tpus.Pair(tpus.Shapes(*PAIRS["t5"], 24, 8, 3, method="speculative", rows=rows), devices)
    program = compiled.Program(pair.programs.run(rows, 24).as_text())
    caches = {
        ("bf16", x.size // share) for x in tpus.buffers_of(pair.state.caches) for share in (1, x.shape[0])
    }
    assert not any(program.faults(program.rounds.body, caches).values())


@pytest.mark.full
def test_block_verification_reads_no_more_than_token_verification(devices):
    """Of a vocabulary as large as Gemma's: what a block needs is computed from distributions that are on the
    chip. The models are the smallest, so that little else is read."""
    wide, read = dataclasses.replace(T5, vocab_size=256_000, num_decoder_layers=1), []
    for way in VERIFICATIONS:
        pair = tpus.Pair(tpus.Shapes(wide, wide, 24, 8, 3, verification=way), devices)
        program = compiled.Program(pair.programs.run(1, 24).as_text())
        assert not any(program.faults(program.rounds.body, pair.kept()).values())
        read.append(program.bytes_read(program.rounds.body))
    assert 2 * wide.vocab_size * wide.d_model < max(read) < 1.03 * read[0]


@pytest.mark.full
@pytest.mark.parametrize("family", PAIRS)
def test_int8_weights_are_widened_only_within_products(family, devices):
    pair = tpus.Pair(tpus.Shapes(*PAIRS[family], 24, 8, 2, dtype="int8"), devices)
    program, kept = compiled.Program(pair.programs.run(1, 24).as_text()), pair.kept()
    sizes = {size for kind, size in kept if kind == "s8"}
    assert sizes and not any(program.faults(program.rounds.body, kept).values())
    assert not [
        instruction.name
        for instruction, _, _ in program.within(program.rounds.body)
        for array in instruction.arrays
        if instruction.operation not in compiled.UNREAD
        and array.kind in ("bf16", "f32")
        and array.count in sizes
    ]


def steps(family, chips, devices, plant):
    """The faults of a loop over single steps of a model whose cache is as long as its heads are wide; `plant`
    stands between two of them."""
    config = PAIRS[family][1]
    pair = tpus.Pair(tpus.Shapes(config, config, 16, 8, 2, devices=chips, dtype="float32"), devices)
    model, params = pair.models[1], pair.params[1]

    def placed(x):
        of_heads = chips > 1 and x.ndim == 4  # [layers, H, L, K]
        where = NamedSharding(pair.whole.mesh, P(None, TENSOR_AXIS)) if of_heads else pair.whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    source = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.tree.map(
        placed, jax.eval_shape(lambda *given: model.prefill(*given, config.d_kv)[1], params, *source)
    )

    def decode(params, cache, limit):
        def step(carry):
            token, cache = carry
            logits, cache = model.extend(params, token, cache)
            return jnp.argmax(logits, -1).astype(jnp.int32), plant(cache)

        return jax.lax.while_loop(
            lambda carry: carry[1].length[0] < limit, step, (jnp.zeros((1, 1), jnp.int32), cache)
        )

    limit = placed(jax.ShapeDtypeStruct((), jnp.int32))
    program = compiled.Program(
        jax.jit(decode, donate_argnums=1)
        .trace(params, cache, limit)
        .lower(lowering_platforms=("tpu",))
        .compile()
        .as_text()
    )
    kept = {("f32", cache.keys.size // chips // n) for n in (1, cache.keys.shape[0])}
    return program.faults(program.rounds.body, kept)


def turned(cache):
    return cache._replace(keys=jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), cache.keys))


def told(cache):
    jax.debug.callback(lambda length: None, cache.length)
    return cache


@pytest.mark.full(quick=["turned-changes of layout-1-t5", "told-host transfers-1-decoder-only"])
@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("chips", [1, 4])
@pytest.mark.parametrize("plant,kind", [(turned, "changes of layout"), (told, "host transfers")])
def test_planted_faults_are_found(plant, kind, chips, family, devices):
    assert not any(steps(family, chips, devices, lambda cache: cache).values())
    assert steps(family, chips, devices, plant)[kind]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_command_reports_the_needs_of_a_pair(devices, tmp_path, monkeypatch, capsys):
    """benchmark.py --tpu, from flags to tables and JSON lines."""
    monkeypatch.setattr(benchmark, "PRESETS", {"drafter": PAIRS["t5"][0], "verifier": PAIRS["t5"][1]})
    path, figures = tmp_path / "figures.jsonl", {}
    try:
        assert (
            benchmark.main(
                [
                    "--tpu=v5e:2x2",
                    f"--tensor-parallel={devices}",
                    "--preset",
                    "drafter",
                    "verifier",
                    "--source-length=16",
                    "--new-tokens=8",
                    "--block-sizes",
                    "2",
                    "--method=token_v3",
                    f"--output={path}",
                ]
            )
            == 0
        )
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    for line in map(json.loads, path.read_text().splitlines()):
        title = line["of"].split(f", {devices} of v5e:2x2, source 16, batch 1, block size 2")[0]
        figures.setdefault(title, {})[line["figure"]] = line
    values = {
        title: {name: line["value"] for name, line in lines.items()} for title, lines in figures.items()
    }
    round_values = values.pop("a round")
    assert list(values) == ["prefill", "decode loop", "drafter step", "verifier step", "scoring 3 tokens"]
    assert all(
        program["fits"] and program["HBM in all, MB"] > program["arguments, MB"] > 0
        for program in values.values()
    )
    least = 3 * round_values["to be read: drafter pass, MB"] + round_values["to be read: verifier pass, MB"]
    assert round_values["to be read, MB"] == pytest.approx(least)
    assert round_values["lower bound, ms"] == pytest.approx(least * 1e9 / tpus.CHIPS["v5e"].bandwidth)
    assert not any(value for name, value in round_values.items() if name.startswith("in the loop"))
    assert {line["device"] for line in figures["decode loop"].values()} == {"v5e:2x2"}
    assert "to be read, MB" in capsys.readouterr().out


@pytest.mark.full
def test_a_program_that_does_not_fit_is_reported(devices):
    wide = dataclasses.replace(T5, vocab_size=2**26)  # 2 x 17 GB of 16
    [(title, figures)] = tpus.figures(tpus.Pair(tpus.Shapes(wide, wide, 24, 8, 2), devices), "v5e:2x2", 0.8)
    assert title.startswith("prefill, 1 of v5e:2x2") and not figures["fits"] and "exceeds" in figures["why"]


@pytest.mark.full
def test_truncation_sorts_nothing(devices):
    logits = jax.ShapeDtypeStruct((1, 3, 4096), jnp.float32, sharding=SingleDeviceSharding(devices[0]))

    def sorts(function):
        lowered = jax.jit(function).trace(logits).lower(lowering_platforms=("tpu",))
        return " sort(" in lowered.compile().as_text()

    assert sorts(lambda logits: jax.lax.top_k(logits, 64))  # what TPU's compiler makes of it
    options = SamplingOptions(1.0, top_p=0.9, top_k=40, min_p=0.01)
    assert not sorts(lambda logits: token_probs(logits, options))


@pytest.mark.full
def test_truncation_of_many_rows_reads_their_logits_once(devices):
    def described(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(devices[0]))

    logits = described(128, 2, 65_536)  # 67 MB: not all fits on the chip
    lowered = (
        jax.jit(lambda *given: token_probs(given[0], SamplingOptions(1.0, top_p=given[1])))
        .trace(logits, described(128))
        .lower(lowering_platforms=("tpu",))
    )
    program = compiled.Program(lowered.compile().as_text())
    assert program.bytes_read(program.entry) < 2 * logits.size * logits.dtype.itemsize


@pytest.mark.full
def test_caches_whose_heads_chips_do_not_divide_are_divided_by_rows(devices):
    two = dataclasses.replace(GEMMA, num_kv_heads=2)
    pair = tpus.Pair(tpus.Shapes(two, two, 24, 8, 2, rows=4, devices=4), devices)
    text = pair.programs.begin(4, 24).as_text()
    assert all(x.sharding.spec == P(None, TENSOR_AXIS) for x in tpus.buffers_of(pair.state.caches))
    shape = pair.state.caches[0].keys.shape
    assert f"bf16[{','.join(map(str, shape))}]" not in text
