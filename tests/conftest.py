"""Shared fixtures, and the two suites: quick by default, everything with `--full`."""

import dataclasses
import gc
import importlib.metadata
import json
import math
import os
import random
import shutil
import time
from pathlib import Path

# Most time here goes into compiling programs that are tiny and run few times, so nothing is optimised, and no
# program is cut into parts that are compiled side by side. What runs for long is optimised at LLVM's level 1,
# where it is as fast as at higher ones. Read when jax starts.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=1"
    # jaxlib 0.11 dropped this flag, and XLA ends a process that sets an unknown one.
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10."),
)
# So that the tests are the same on CPUs that multiply bfloat16.
os.environ.setdefault("SPECCASCADE_DTYPE", "float32")

import jax
import numpy as np
import pytest
import sentencepiece
from checking import check_signatures
from corpora import PROMPTS, SENTENCES, TURN, shuffled
from skips import OUT_OF_TIME, Skips, file_of, was_skipped


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="everything, at full size; otherwise a quick suite")
    parser.addoption(
        "--rest",
        action="store_true",
        help="with --full: not what the quick suite runs as well, unless it was skipped there",
    )
    parser.addoption(
        "--until",
        type=float,
        default=math.inf,
        help="seconds since 1970 after which no test begins; files then come in a random order",
    )


CHECKED = "core", "baselines", "models", "inference"
"""Packages in which the shapes and dtypes of signatures are checked whenever tests call or trace them, with
--full only, because the quick suite has no time for it."""

PROGRAMS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speccascade_jax_tests"
"""Programs that tests have compiled, unless $JAX_COMPILATION_CACHE_DIR names another folder: a second run, in
whichever clone, is faster. Tests that kill processes at any moment keep away from it, because JAX writes its
files in place."""
MOST_BYTES = 2 << 30
"""PROGRAMS is emptied before a run if there is more in it."""


def pytest_configure(config):
    if config.getoption("--full"):
        check_signatures([f"speccascade_jax.{name}" for name in CHECKED])
    if not hasattr(config, "workerinput"):  # the one process that hears of all tests
        config.pluginmanager.register(Skips(config.cache))
        keep_programs()


def keep_programs():
    """Has this process, and those that it starts, keep the programs they compile."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        if sum(file.stat().st_size for file in PROGRAMS.iterdir()) > MOST_BYTES:
            shutil.rmtree(PROGRAMS)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS)
        jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_runtest_setup(item):
    if time.time() > item.config.getoption("--until"):
        pytest.skip(OUT_OF_TIME)


def is_quick(item) -> bool:
    """False for tests marked `full`; `full(quick=[...])` names the parameters that run all the same."""
    mark = item.get_closest_marker("full")
    return mark is None or (hasattr(item, "callspec") and item.callspec.id in mark.kwargs.get("quick", ()))


def is_larger(item) -> bool:
    """Whether a test runs with --full only, or in another way."""
    return not is_quick(item) or not {"full", "rows"}.isdisjoint(item.fixturenames)


def is_rest(item) -> bool:
    """Whether the quick suite has not run a test as it is run with --full."""
    return is_larger(item) or was_skipped(item.nodeid, item.config.cache)


MOST_MAPS = 8_000
"""Memory maps between two modules: an eighth of what Linux allows, so that a module may add many."""

# A module is one worker's. Those that take longest begin first, or others wait for them at the end; unless
# time is limited, because then they would leave none for others.
LONGEST = (
    "tests/core/samplers/test_hierarchy.py",
    "tests/commands/test_cluster.py",
    "tests/vocabularies/test_translated.py",
    "tests/models/test_assistant_laws.py",
    "tests/commands/test_finetune.py",
    "tests/test_demo.py",
    "tests/core/samplers/test_block_loop.py",
    "tests/core/samplers/test_speculative.py",
)


def pytest_collection_modifyitems(config, items):
    wanted = is_quick
    if config.getoption("--full"):
        wanted = is_rest if config.getoption("--rest") else bool
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]
    order = list(dict.fromkeys((*LONGEST, *sorted({file_of(item.nodeid) for item in items}))))
    if (until := config.getoption("--until")) < math.inf:  # what runs out of time is not always the same
        random.Random(until).shuffle(order)
    places = {name: n for n, name in enumerate(order)}
    items.sort(key=lambda item: places[file_of(item.nodeid)])


def pytest_collection_finish():
    """All modules are there, and stay: the garbage collector does not look through them again. Nor does it
    look as often as usual: tracing makes many objects, few of them garbage in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def full(request) -> bool:
    """Whether everything runs: for tests that otherwise take fewer rows."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def rows(full) -> int:
    """Texts a chi-square is made of."""
    return 200_000 if full else 40_000


@pytest.fixture(autouse=True)
def compile_well(request):
    """Programs that run for long are worth it: those of tests marked `long`, and with --full all that `rows`
    counts."""
    counted = request.config.getoption("--full") and "rows" in request.fixturenames
    long = counted or request.node.get_closest_marker("long") is not None
    jax.config.update("jax_disable_most_optimizations", not long)


@pytest.fixture(autouse=True, scope="module")
def forget_programs(request):
    """A process that keeps every program it ever compiled runs out of memory maps; one that forgets them
    after every module compiles the small ones again and again. With --full some programs are compiled well
    and others are not, and no module may get another one's."""
    yield
    if request.config.getoption("--full") or memory_maps() > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def memory_maps() -> float:
    """How many this process has, where the system says so; otherwise more than it may have."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return math.inf


@pytest.fixture(scope="session")
def spiece(tmp_path_factory):
    """A spiece.model as T5's, of SENTENCES."""
    from speccascade_jax.tokenizers.tokenizer import train_tokenizer

    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_tokenizer(shuffled(SENTENCES), path, 320)
    return path


@pytest.fixture(scope="session")
def gemma_vocabulary(tmp_path_factory):
    """A tokenizer.model with Gemma's special pieces, which its text may hold."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(shuffled(PROMPTS)),
            model_writer=file,
            vocab_size=330,
            model_type="unigram",
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            eos_piece="<eos>",
            bos_piece="<bos>",
            user_defined_symbols=TURN,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            num_threads=1,
        )
    return path


@pytest.fixture(scope="session")
def t5_pair(spiece, tmp_path_factory):
    """Folders of a drafter and a verifier that half agree, so that every origin occurs, and of a model in
    the middle."""
    from speccascade_jax.checkpoints import huggingface
    from speccascade_jax.models.t5 import T5Config, T5Model

    folder = tmp_path_factory.mktemp("pair")
    model = T5Model(
        T5Config(
            vocab_size=320,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_heads=4,
            num_encoder_layers=1,
            num_decoder_layers=1,
        )
    )
    large = model.init(0)
    small, middle = (
        jax.tree.map(lambda a, b, share=share: share * a + (1 - share) * b, large, model.init(1))
        for share in (0.7, 0.85)
    )
    for name, params in (("drafter", small), ("middle", middle), ("verifier", large)):
        huggingface.save(folder / name, model, params, np.float32)
        (folder / name / "spiece.model").write_bytes(spiece.read_bytes())
    return folder


@pytest.fixture(scope="session")
def gemma_pair(gemma_vocabulary, tmp_path_factory):
    """Hugging Face folders of a drafter and a verifier that half agree, in several shards."""
    from shapes import TINY_GEMMA

    from speccascade_jax import checkpoints
    from speccascade_jax.checkpoints import Checkpoint, huggingface
    from speccascade_jax.models.decoder import DecoderModel

    folder = tmp_path_factory.mktemp("pair")
    model = DecoderModel(dataclasses.replace(TINY_GEMMA, vocab_size=352))
    large = model.init(0)
    small = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, large, model.init(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "SHARD_BYTES", 60_000)
        for name, params in (("drafter", small), ("verifier", large)):
            checkpoints.save(
                folder / name, Checkpoint(model, params, gemma_vocabulary, "memory"), "huggingface"
            )
    assert len(list((folder / "verifier").glob("model-0000?-of-0000?.safetensors"))) > 2
    return folder


@pytest.fixture(scope="session")
def number_words(tmp_path_factory):
    """A TrainConfig: number words from English to German, one to three pairs an example."""
    from speccascade_jax.config import Task, TrainConfig
    from speccascade_jax.models.t5 import T5Config

    folder = tmp_path_factory.mktemp("task")
    words = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fuenf", "six": "sechs"}
    rng = np.random.default_rng(0)
    for split, count in (("train", 400), ("validation", 40)):
        lines = []
        for _ in range(count):
            chosen = rng.choice(list(words), 2)
            lines.append({"source": " ".join(chosen), "target": " ".join(words[w] for w in chosen)})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = Task(
        train=str(folder / "train.jsonl"),
        validation=str(folder / "validation.jsonl"),
        test="",
        max_source_length=24,
        max_target_length=24,
        join=3,
    )
    model = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_encoder_layers=1, num_decoder_layers=1
    )
    return TrainConfig(
        name="toy",
        output_dir=str(folder / "run"),
        model=model,
        task=task,
        tokenizer=str(folder / "spiece.model"),
        tokenizer_size=300,
        steps=500,
        batch_tokens=256,
        optimizer="adamw",
        learning_rate=0.03,
        warmup_steps=10,
        decay="linear",
        clip_norm=1.0,
        dtype="float32",
        save_every=60,
        eval_every=100,
        validation_examples=16,
        export_dir=str(folder / "export"),
    )
