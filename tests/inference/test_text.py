"""The text API, on a tiny random pair."""

import dataclasses
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import SENTENCES
from processes import devices

from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.methods import Method
from speccascade_jax.core.rules import METHODS, target_probs
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.inference import text
from speccascade_jax.inference.text import Cascade
from speccascade_jax.inference.vocabulary_checks import check_methods
from speccascade_jax.scheduling.programs import crowded
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import train_tokenizer

SENTENCES = [*SENTENCES[:2], "", *SENTENCES[2:]]
NAN = float("nan")
UNLIKE = [
    Settings(method="token_v3", alpha=0.3, temperature=1.0, top_p=0.8),
    Settings(),
    Settings(method="opt", alpha=0.1, temperature=0.7, top_k=7, seed=3, max_new_tokens=5),
    Settings(method="lossy", alpha=0.2, temperature=1.0, min_p=0.1),
    Settings(method="verifier"),
    Settings(method="sequence", alpha=0.9, temperature=1.0),
    Settings(block_size=2, temperature=1.2),
    Settings(method="token_cascade", alpha=0.7, temperature=1.0),
    Settings(block_size="adaptive", max_block_size=4, stop_below=0.02, temperature=0.8),
    Settings(method="chow", alpha=0.4, temperature=1.0, stop=("a",)),
]


@pytest.fixture(scope="module")
def cascade(t5_pair):
    return Cascade.load(t5_pair / "drafter", t5_pair / "verifier", max_source_length=32, max_new_tokens=24)


@pytest.mark.full(quick=["token_v3"])
@pytest.mark.parametrize("method", ["speculative", "token_v3", "verifier"])
def test_rows_alone_in_a_batch_and_in_another_slot(cascade, method):
    def tokens(texts, batch_size, first_index=0):
        return [
            o.tokens
            for o in cascade.generate(
                texts,
                method=method,
                alpha=0.2,
                block_size=3,
                temperature=0.8,
                batch_size=batch_size,
                first_index=first_index,
            )
        ]

    together = tokens(SENTENCES, 6)
    assert together == tokens(SENTENCES, 1)
    assert together[3:] == tokens(SENTENCES[3:], 6, first_index=3)


@pytest.mark.full
def test_adaptive_blocks_that_never_stop_are_fixed_ones(cascade):
    """The same program, then: a pair whose models are so small that deciding costs more than drafts do."""
    fixed = Settings(block_size=4, temperature=0.8)
    never, once = (
        dataclasses.replace(fixed, block_size="adaptive", max_block_size=4, stop_below=stop)
        for stop in (0.0, 1.0)
    )
    assert cascade.lane_of(never) == cascade.lane_of(fixed) != cascade.lane_of(once)

    def decoded(settings):
        outputs = [o for o in cascade.generate(SENTENCES, settings, batch_size=6) if o.counts]
        drafted, rounds = (sum(o.counts[name] for o in outputs) for name in ("drafted", "rounds"))
        return [o.tokens for o in outputs], drafted / rounds

    assert decoded(never) == decoded(fixed)
    assert decoded(once)[1] < decoded(fixed)[1]


EIGHT = """
import json, sys
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from speccascade_jax.inference.text import Cascade
from speccascade_jax.parallel import make_mesh

pair, texts, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
cascade = Cascade.load(f"{pair}/drafter", f"{pair}/verifier", max_source_length=32, max_new_tokens=24,
                       mesh=make_mesh())
assert cascade.devices == 8
outputs = [o.tokens for o in cascade.generate(texts, **options)]
[programs] = cascade.programs.values()
made = {key[0]: program.as_text() for key, program in programs.compiled.items()}
assert "while(" in made["run"] and "refill" in made
def exchanges(program):
    return any(name in program for name in ("all-reduce", "all-gather", "permute("))

assert not any(map(exchanges, made.values()))
[axis] = cascade.mesh.axis_names
total = jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=cascade.mesh, in_specs=P(axis), out_specs=P())
assert exchanges(jax.jit(total).lower(np.zeros(8)).compile().as_text())  # the control
del options["batch_size"]
print(json.dumps([outputs, list(cascade.stream(texts[0], **options))[-1]]))
"""


@pytest.mark.full
def test_eight_devices_decode_as_one(t5_pair, cascade):
    """No device waits for another's rows, because their programs exchange nothing."""
    texts = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]  # 36: the last batch is not full
    options = {"method": "token_v3", "alpha": 0.2, "block_size": 3, "temperature": 0.8, "batch_size": 2}
    done = subprocess.run(
        [sys.executable, "-c", EIGHT, str(t5_pair), json.dumps(texts), json.dumps(options)],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": devices(8)},
    )
    assert done.returncode == 0, done.stderr
    outputs, streamed = json.loads(done.stdout)
    expected = list(cascade.generate(texts, **options))
    assert outputs == [o.tokens for o in expected]
    assert streamed == expected[0].text


def test_streaming_ends_with_the_text_of_generate(cascade):
    options = {"method": "token_v3", "alpha": 0.3, "block_size": 2, "temperature": 1.0, "seed": 5}
    parts = list(cascade.stream(SENTENCES[0], **options))
    assert parts[-1] == next(iter(cascade.generate([SENTENCES[0]], **options))).text
    assert len(parts) > 1


def test_a_sweep_compiles_once(cascade):
    before = cascade.clock.compilations
    for alpha in np.linspace(0, 1, 20):
        for temperature in (0.0, 0.5, 1.0):
            list(
                cascade.generate(
                    ["the cat"], method="diff", alpha=float(alpha), block_size=4, temperature=temperature
                )
            )
    assert cascade.clock.compilations == before + 2  # begin and run


@pytest.mark.full
def test_the_least_recently_used_programs_are_dropped(cascade, monkeypatch):
    """On CPUs every program takes memory maps, and the process dies when they run out."""
    asked = [("verifier", "chow"), ("verifier", "chow", "verifier", "opt")]
    kept = {}
    for limit, methods in zip((3, 2), asked, strict=True):
        cascade.programs.clear()
        monkeypatch.setattr(text, "crowded", lambda limit=limit: len(cascade.programs) >= limit)
        for method in methods:
            list(cascade.generate(SENTENCES[:1], method=method))
        kept[limit] = list(cascade.programs)
    assert [len(plans) for plans in kept.values()] == [2, 2]
    assert [plan == kept[3][0] for plan in kept[2]] == [True, False]  # chow's, used longer ago, has gone


def test_crowded_counts_memory_maps():
    assert not crowded()
    limit, held = int(Path("/proc/sys/vm/max_map_count").read_text()), []
    for n in range(limit // 2 + 1):  # maps next to each other with equal protection are one
        held.append(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | (n % 2 and mmap.PROT_WRITE)))
    assert crowded()


@pytest.mark.full
def test_greedy_speculative_is_the_verifier(cascade):
    for block_size in (1, 5):
        for batch_size in (1, 6):
            alone, together = (
                [
                    o.tokens
                    for o in cascade.generate(
                        SENTENCES, method=method, block_size=block_size, batch_size=batch_size
                    )
                ]
                for method in ("verifier", "speculative")
            )
            assert alone == together


@pytest.mark.full
def test_precompiled_settings_compile_nothing_more(t5_pair):
    cascade = Cascade.load(t5_pair / "drafter", t5_pair / "verifier", max_source_length=32, max_new_tokens=24)
    settings = {"method": "opt", "block_size": 2, "top_p": 0.9, "batch_size": 2}
    cascade.precompile(**settings)
    before = cascade.clock.compilations
    texts = [" ".join(SENTENCES[:n]) for n in (1, 2, 4)]  # of several lengths
    list(cascade.generate(texts, alpha=0.4, temperature=0.7, seed=3, **settings, truncate=True))
    assert cascade.clock.compilations == before


def written(output):
    return output.text, output.tokens, output.origin, output.counts


def law_of(output):
    """All but the drafter's passes: next to other methods, a lossless one cannot spare its bonus pass."""
    return *written(output)[:3], {k: v for k, v in output.counts.items() if k != "drafter_passes"}


@pytest.mark.full
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_request_of_a_mixed_batch_writes_the_same_as_alone(cascade, batch_size):
    """Whatever the methods, leniences, options, limits and stop sequences of its neighbours."""
    texts = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
    settings = [UNLIKE[n % len(UNLIKE)] for n in range(len(texts))]
    together = list(cascade.generate(texts, settings, batch_size=batch_size))
    for n, (source, row_settings) in enumerate(zip(texts, settings, strict=True)):
        [alone] = cascade.generate([source], row_settings, first_index=n)
        assert law_of(together[n]) == law_of(alone), row_settings
    assert max(len(o.tokens) for o, s in zip(together, settings, strict=True) if s.max_new_tokens) == 5


@pytest.mark.full
def test_a_method_object_is_a_method(cascade):
    """Under another name it writes what METHODS' own one does; of one's own it is followed."""
    options = {"alpha": 0.2, "temperature": 1.0}
    copy = Method(METHODS["opt"].target, 0, 1, "a copy")
    named, given = (list(cascade.generate(SENTENCES, method=method, **options)) for method in ("opt", copy))
    assert list(map(written, named)) == list(map(written, given))
    drafters = Method(
        lambda s, alpha: (target_probs(s.q_sampled, s.p_sampled, s.q < 0), s.q < 0), 0, 1, "never defer"
    )
    never = cascade.generate(SENTENCES, method=drafters, **options)
    assert all("correction" not in output.origin for output in never)


@pytest.mark.parametrize(
    "given,field,value",
    [
        ({"texts": "one text"}, "texts", "one text"),
        ({"batch_size": 0}, "batch_size", 0),
        ({"first_index": -1}, "first_index", -1),
        ({"seed": 2**63}, "seed", 2**63),
        ({"top_k": 0}, "top_k", 0),
        ({"settings": [Settings()]}, "settings", 1),
        ({"max_new_tokens": 25}, "max_new_tokens", 25),
        ({"alpha": NAN}, "alpha", NAN),
        ({"temperature": NAN}, "temperature", NAN),
        ({"method": "opts"}, "method", "opts"),
        ({"stop": ("a", "")}, "stop", ("a", "")),
    ],
)
def test_invalid_settings_are_refused_before_decoding(cascade, given, field, value):
    with pytest.raises(FieldError) as refused:
        list(cascade.generate(**{"texts": SENTENCES, **given}))
    assert (refused.value.field, refused.value.value) == (field, value)


WITHOUT_TYPE_CHECKER = """
import sys
import speccascade_jax as sc
cascade = sc.Cascade.load(f"{sys.argv[1]}/drafter", f"{sys.argv[1]}/verifier")
for given in ({"texts": ["a", None]}, {"method": 3}, {"stop": "a"}):
    try:
        list(cascade.generate(**{"texts": ["the cat"], **given}))
    except ValueError as error:
        print(error)
"""


@pytest.mark.full
def test_values_of_a_wrong_type_are_refused(t5_pair):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TYPE_CHECKER, str(t5_pair)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [
        words in line
        for words, line in zip(("input 1 is None", "method is 3", "stop is 'a'"), said, strict=True)
    ] == [True] * 3


@pytest.mark.full
def test_a_batch_that_exceeds_memory_is_refused_with_its_size(t5_pair):
    long = Cascade.load(t5_pair / "drafter", t5_pair / "verifier", max_new_tokens=2**17)
    with pytest.raises(FieldError) as refused:
        list(long.generate(["the cat"] * 1024, batch_size=1024))
    assert (refused.value.field, refused.value.value) == ("max_new_tokens", 2**17)


@pytest.mark.full
def test_batches_are_no_larger_than_their_inputs_need(cascade):
    outputs = list(cascade.generate(SENTENCES, batch_size=10**9, method="diff"))
    assert [o.tokens for o in outputs] == [o.tokens for o in cascade.generate(SENTENCES, method="diff")]


def test_from_pretrained_is_load(t5_pair, cascade, monkeypatch):
    options = {"max_source_length": 32, "max_new_tokens": 24}
    pair = Cascade.from_pretrained(t5_pair / "verifier", t5_pair / "drafter", **options)
    assert pair.models == cascade.models and pair.max_new_tokens == 24
    alone = Cascade.from_pretrained(t5_pair / "verifier", **options)
    assert alone.models == cascade.models[1:]
    monkeypatch.setattr(Cascade, "load", lambda *paths, **_: paths)
    monkeypatch.chdir(t5_pair.parent)
    names = "google/flan-t5-large", f"{t5_pair.name}/drafter"  # at the hub, and a folder
    assert Cascade.from_pretrained(*names) == (names[1], f"hf://{names[0]}")


@pytest.mark.parametrize("limit", [1, 32, 80, 1000, 2**12, 2**17])
def test_a_short_text_has_short_buffers(cascade, limit):
    """For any limit: few widths are compiled, each text fits its width, and no width is twice its length."""
    longer = dataclasses.replace(cascade, max_source_length=limit)
    widths = [longer.bucket(n) for n in range(1, limit + 1)]
    assert widths == sorted(widths) and widths[-1] == limit and len(set(widths)) <= 16
    assert all(n <= width < 2 * n + 512 for n, width in enumerate(widths, 1))


def test_a_samplers_name_is_known_where_vocabularies_differ(t5_pair, tmp_path):
    """Before any model is read."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    train_tokenizer(SENTENCES * 20, folder / "spiece.model", 280)
    samplers = {"mine": lambda models: Autoregressive(models[-1])}
    run = DecodeConfig(drafter=str(folder), verifier=str(t5_pair / "verifier"), samplers=samplers)
    check_methods(run, [Settings(method="mine"), Settings()])
    with pytest.raises(FieldError) as refused:
        check_methods(run, [Settings(method="other")])
    assert (refused.value.field, refused.value.value) == ("method", "other")
