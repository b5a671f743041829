"""scripts/benchmark.py on a tiny pair, and the basis of its figures."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import check_about, refusals
from toys import pair

from speccascade_jax import checkpoints
from speccascade_jax import config as configs
from speccascade_jax.commands import benchmark
from speccascade_jax.config import DEMO
from speccascade_jax.core import loop
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.evaluation import other_libraries, profiling, tpus
from speccascade_jax.evaluation.profiling import Timing
from speccascade_jax.evaluation.rates import relative_cost
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models.t5 import PRESETS, T5Config, T5Model
from speccascade_jax.settings import Settings

TINY = T5Config(
    vocab_size=96, d_model=16, d_kv=4, d_ff=24, num_heads=4, num_encoder_layers=2, num_decoder_layers=3
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_reads_the_decoder_and_the_head(dtype):
    """Not the encoder, the embedding it indexes, nor the projections of cross-attention's keys."""
    model = T5Model(TINY, dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), model.init(0))
    square, layers = 16 * 16, TINY.num_decoder_layers
    entries = layers * (6 * square + 3 * 16 * 24 + 3 * 16) + 16 + 16 * 96  # norms; the last one; the head
    # The position table is read by prefill, which lays it out by distance.
    assert profiling.bytes_read(model, params) == entries * np.dtype(dtype).itemsize


@pytest.mark.full
def test_times_of_parts_are_printed_and_saved_with_their_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "PRESETS", {"tiny": TINY})
    monkeypatch.setattr(profiling, "read_bandwidth", lambda: 1e9)
    path = tmp_path / "figures.jsonl"
    benchmark.benchmark(benchmark.Arguments(preset=("tiny", "tiny"), block_sizes=(2,), output=str(path)))
    lines = list(map(json.loads, path.read_text().splitlines()))
    figures = figures_of(path)["parts, batch 1, speculative, block size 2"]
    wanted = {
        "drafter step, ms",
        "verifier step, ms",
        "scoring 3 tokens, ms",
        "round, ms",
        "drafter prefill, ms",
        "verifier prefill, ms",
        f"{profiling.OVERHEAD}, ms",
    }
    assert wanted <= set(figures)
    assert 0 < figures[f"{profiling.OVERHEAD}, share of a round"] < 1.5
    assert all(line["jax"] == jax.__version__ and line["dtype"] == "float32" for line in lines)
    assert "round, ms" in capsys.readouterr().out


def figures_of(path) -> dict[str, dict[str, object]]:
    """Table -> figure -> value, of the JSON lines."""
    tables: dict[str, dict[str, object]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        tables.setdefault(line["of"], {})[line["figure"]] = line["value"]
    return tables


@pytest.mark.full
def test_whole_decodings_on_a_machine_of_known_speed(tmp_path, monkeypatch):
    """On a machine whose prefill takes 0.5 s plus 0.1 s per column of the padded input, a drafter step 0.1 s,
    a verifier step 1 s and a round 2 s, exactly these must be reported, whatever the texts' lengths."""

    def timed(cascade, settings, index, text):
        output = next(iter(cascade.generate([text], settings, first_index=index)))
        passes = {"verifier": 1.0, "drafter": 0.1}.get(settings.method, 0.0) * len(output.tokens)
        prefill = 0.5 + 0.1 * cascade.bucket(len(text) + 1)
        return prefill + passes + 2.0 * output.counts.get("rounds", 0), output

    def peer(cascade, decode, index, text):  # twice as slow as the verifier, and it writes one token more
        seconds, output = timed(cascade, Settings(method="verifier"), index, text)
        return 2 * seconds, dataclasses.replace(output, tokens=[*output.tokens, 0])

    known = {
        "drafter step": 0.1,
        "verifier step": 1.0,
        profiling.scoring(2): 1.5,
        profiling.OVERHEAD: 0.2,
        "round": 2.5,
    }
    cascade = dataclasses.replace(pair(), max_source_length=64, max_new_tokens=12)
    monkeypatch.setattr(type(cascade.verifier), "dtype", "float32", raising=False)
    monkeypatch.setattr(benchmark, "timed", timed)
    monkeypatch.setattr(benchmark, "timed_elsewhere", peer)
    monkeypatch.setattr(other_libraries, "check_installed", lambda vs: None)
    monkeypatch.setattr(benchmark, "decoders_elsewhere", lambda *_: {"peer": None})
    monkeypatch.setattr(benchmark.Cascade, "from_config", lambda *_: cascade)
    monkeypatch.setattr(profiling, "measure", lambda *_, **__: {n: Timing(t, t, t) for n, t in known.items()})
    texts = [f"{a}{b}" * (1 + 9 * b) for a in range(4) for b in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"source": t, "target": t}) + "\n" for t in texts))
    path = tmp_path / "figures.jsonl"
    benchmark.benchmark(
        benchmark.Arguments(
            input=str(tmp_path / "in.jsonl"),
            vs=("hf",),
            min_tokens=1,
            method="token_v3",
            alpha=0.3,
            block_sizes=(2,),
            output=str(path),
        )
    )
    tables = figures_of(path)
    assert tables["one model alone"]["verifier step, ms"] == pytest.approx(1000)
    assert tables["one model alone"]["drafter step, ms"] == pytest.approx(100)
    figures = tables["token_v3, block size 2, temperature 0.0"]
    acceptance, calls = figures["acceptance per tested position"], figures["tokens_per_verifier_call"]
    assert figures["round, ms"] == pytest.approx(2000)
    assert figures["relative cost without prefill, measured"] == pytest.approx(2 / calls)
    assert figures["predicted, a scoring call as one step"] == pytest.approx(
        relative_cost(acceptance, 2, 0.1)
    )
    assert figures["predicted, with scoring 3 tokens and the rules as timed"] == pytest.approx(
        relative_cost(acceptance, 2, 0.1, 0.7)
    )
    assert figures["the same, with the counted tokens per call"] == pytest.approx(2 / calls)
    assert figures["and with whole rounds as timed"] == pytest.approx(2.5 / calls)
    assert tables["the verifier alone here"]["times as fast as peer"] == "2.00 (2.00 .. 2.00)"
    assert tables["outputs equal to the verifier's here"]["peer"] == "0.0%"


@pytest.mark.full
def test_models_alone_write_as_many_tokens_as_other_libraries(tmp_path, monkeypatch):
    asked, written = [], []

    def transformers_decoders(path, max_new_tokens, **sizes):
        asked.append({"max_new_tokens": max_new_tokens, **sizes})
        return {"slow": lambda source: (1e6, [])}

    def generate(*args, real=loop.generate, **options):
        result = real(*args, **options)
        jax.debug.callback(lambda length: written.append(int(length)), result.length[0])
        return result

    monkeypatch.setattr(benchmark, "PRESETS", {"tiny": dataclasses.replace(TINY, vocab_size=2048)})
    monkeypatch.setattr(profiling, "read_bandwidth", lambda: 1e9)
    monkeypatch.setattr(other_libraries, "check_installed", lambda vs: None)
    monkeypatch.setattr(benchmark.other_libraries, "transformers_decoders", transformers_decoders)
    monkeypatch.setattr(benchmark.loop, "generate", generate)
    path = tmp_path / "figures.jsonl"
    benchmark.benchmark(
        benchmark.Arguments(preset=("tiny", "tiny"), vs=("hf",), tokens=7, repetitions=2, output=str(path))
    )
    jax.effects_barrier()
    assert asked == [{"max_new_tokens": 7, "min_new_tokens": 7}] * 2
    assert written == [7] * 6
    figures = figures_of(path)["tiny alone, 7 tokens"]
    assert float(figures["times as fast as slow"].split()[0]) > 1e6
    assert figures["slow, ms per token"].startswith(f"{1e9 / 7:.2f}")


@pytest.mark.full
def test_transformers_writes_the_same_texts_alone_and_assisted(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tokenizer = checkpoints.load(str(DEMO / "verifier")).tokenizer_file()
    models = [T5Model(dataclasses.replace(TINY, vocab_size=2048, num_decoder_layers=n)) for n in (1, 3)]
    params = [model.init(n) for n, model in enumerate(models)]
    small, large = (
        other_libraries.exported(checkpoints.Checkpoint(model, weights, tokenizer, ""), tmp_path / str(n))
        for n, (model, weights) in enumerate(zip(models, params, strict=True))
    )
    source = [5, 6, 7, 1]
    ours = loop.generate(
        Autoregressive(models[1]),
        params[1],
        jax.random.key(0)[None],
        jnp.array([source]),
        jnp.array([4]),
        SamplingOptions(jnp.float32(0)),
        jnp.zeros(0),
        max_new_tokens=8,
        eos_id=1,
    )
    decoders = other_libraries.transformers_decoders(large, 8, drafter=small, block_size=3)
    assert [name.split()[-1] for name in decoders] == ["verifier", "assisted"]
    for decode in decoders.values():
        seconds, tokens = decode(source)
        assert tokens == ours.tokens[0, : int(ours.length[0])].tolist() and seconds > 0


def test_a_missing_library_is_reported_before_any_work(monkeypatch):
    monkeypatch.setattr(other_libraries, "find_spec", lambda name: None if name == "transformers" else name)
    monkeypatch.setattr(profiling, "random_model", lambda *_: pytest.fail("made weights"))
    with pytest.raises(FieldError) as refused:
        benchmark.benchmark(benchmark.Arguments(preset=("t5_1_1_small", "t5_1_1_large"), vs=("hf",)))
    assert (refused.value.field, refused.value.value) == ("vs", "hf")
    assert refused.value.remedy == "pip install torch transformers"  # which versions is pip's to say


BAD = [
    (["--vs", "hf"], "vs", ("hf",)),
    (["--method=none"], "method", "none"),
    (["--preset", "t5_1_1_small", "huge"], "preset", "huge"),
    (["--preset", "t5_1_1_small", "t5_1_1_large", "--input=x"], "preset", ("t5_1_1_small", "t5_1_1_large")),
    (["--block-sizes", "0"], "block_sizes", 0),
    (["--block-sizes", "3", "-2"], "block_sizes", -2),
    (["--block-sizes"], "block_sizes", ()),
    (["--batch-sizes", "0"], "batch_sizes", 0),
    (["--batch-sizes"], "batch_sizes", ()),
    (["--repetitions=0"], "repetitions", 0),
    (["--tokens=0"], "tokens", 0),
    (["--min-tokens=-1"], "min_tokens", -1),
    (["--limit=0"], "limit", 0),
    (["--join=0"], "join", 0),
    (["--alpha=nan"], "alpha", float("nan")),
    (["--alpha=-1"], "alpha", -1.0),
    (["--temperature=nan"], "temperature", float("nan")),
    (["--dtype=float8"], "dtype", "float8"),
    (["--config=demo_verifier"], None, "demo_verifier"),
    (["--output=/no/such/folder/x"], "output", "/no/such/folder/x"),
    (["--block-sizes", "1000000"], "block_sizes", 1000000),
    (["--batch-sizes", "1000000"], "batch_sizes", 1000000),
    (["--tokens=1000000000"], "tokens", 10**9),
    (["--repetitions=1000000000"], "repetitions", 10**9),
    (["--input=/no/such/file.jsonl"], None, "/no/such/file.jsonl"),
    (["--output=/dev/null"], "output", "/dev/null"),
    (["--output=."], "output", "."),
    (["--tpu=v5e"], "tpu", "v5e"),
    (["--tpu=h100:8"], "tpu", "h100:8"),
    (["--tpu=v5e:2x2", "--input=x.jsonl"], "tpu", "v5e:2x2"),
    (["--tpu=v5e:2x2", "--acceptance=2"], "acceptance", 2.0),
    (["--tpu=v5e:2x2", "--source-length=0"], "source_length", 0),
    (["--tpu=v5e:2x2", "--tensor-parallel", "4", "0"], "tensor_parallel", 0),
    (["--tpu=v5e:2x2", "--new-tokens=9999999"], "new_tokens", 9999999),
    (["--preset", "gemma2_2b", "gemma2_9b", "--vs", "hf"], "vs", ("hf",)),
    (["--config=demo_foreign", "--vocabulary=slem", "--method=opt", "--input=x"], "method", "opt"),
]


@pytest.mark.parametrize(
    "arguments,field,value", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_bad_flags_are_one_sentence(arguments, field, value, monkeypatch, capsys):
    """Also where no other library is installed: none is asked for by what cannot be compared. field: None
    where an error has none, and its sentence is looked at."""
    monkeypatch.setattr(other_libraries, "find_spec", lambda name: None)
    for home, name in (
        (Cascade, "load"),
        (profiling, "measure"),
        (profiling, "random_model"),
        (profiling, "read_bandwidth"),
    ):
        monkeypatch.setattr(home, name, lambda *_, **__: pytest.fail("work began"))
    with refusals() as errors:
        assert benchmark.main(arguments) == 2
    if field is not None:
        check_about(errors[0], field, value)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and (field is not None or value in said)


def test_what_cannot_be_compiled_is_reported_before_compiling(monkeypatch, capsys):
    """None of this needs the TPU compiler."""
    monkeypatch.setattr(tpus, "find_spec", lambda name: None)
    with refusals() as errors:
        assert benchmark.main(["--tpu=v5e:2x2"]) == 2
    check_about(errors[0], "tpu", "v5e:2x2")
    assert errors[0].remedy == "pip install 'speccascade_jax[tpu]'."
    capsys.readouterr()
    monkeypatch.setattr(tpus, "find_spec", lambda name: name)
    monkeypatch.setattr(tpus, "devices_of", lambda name: [None] * 4)
    monkeypatch.setattr(tpus, "Pair", lambda *_: pytest.fail("compiled"))
    for flags, field, value in (
        (["--config=wmt_small_large", "--tensor-parallel", "1", "8"], "tensor_parallel", 8),
        (["--preset", "t5_1_1_small", "gemma2_2b"], "tpu", [32128, 256000]),
        (["--config=gemma2_2b_9b"], "preset", configs.load("gemma2_2b_9b").drafter),
        (["--config=demo_shared"], "tpu", configs.load("demo_shared").roles[0][1]),
    ):
        with refusals() as errors:
            assert benchmark.main(["--tpu=v5e:2x2", *flags]) == 2
        check_about(errors[0], field, value)
        assert capsys.readouterr().err.count("\n") == 1


def test_shapes_come_from_the_training_configs_of_missing_folders():
    shapes = tpus.shapes_of(configs.load("wmt_small_large"))
    assert shapes == [PRESETS["t5_1_1_small"], PRESETS["t5_1_1_large"]]


def test_an_output_that_is_the_input_is_refused(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"source": "a"}\n')
    with refusals() as errors:
        assert benchmark.main([f"--input={path}", f"--output={tmp_path}/./in.jsonl"]) == 2
    check_about(errors[0], "output", f"{tmp_path}/./in.jsonl")
    assert path.read_text() == '{"source": "a"}\n'


def test_inputs_need_no_targets(tmp_path):
    """As the flag says: a field `source`. Blank inputs and those too long are left out."""
    lines = [json.dumps({"source": text}) + "\n" for text in ("1", "", "12" * 20)]
    (tmp_path / "in.jsonl").write_text("".join(lines))
    texts = benchmark.read_texts(str(tmp_path / "in.jsonl"), 1, 3)
    inputs = benchmark.with_widths(texts, pair())
    assert len(texts) == 3 and [text for text, _ in inputs] == ["1"]


def test_other_libraries_are_for_t5(monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda *_: pytest.fail("exported"))
    arguments = benchmark.Arguments(input="in.jsonl", vs=("hf",), config="e2e_gemma")
    with pytest.raises(FieldError) as refused:
        benchmark.decoders_elsewhere(arguments, configs.load("e2e_gemma"), pair())
    assert (refused.value.field, refused.value.value) == ("vs", ("hf",))
