"""scripts/finetune.py in use: killed, on several devices, in several processes, with invalid flags."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from processes import SCRIPTS, devices

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import native
from speccascade_jax.commands import evaluate
from speccascade_jax.commands import finetune as finetune_script
from speccascade_jax.training.reporting import read_events

pytestmark = pytest.mark.full  # the quick suite trains in tests/training
SCRIPT = SCRIPTS / "finetune.py"
CONFIG = """
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.models.t5 import T5Config

task = Task(train="{folder}/train.tsv", validation="{folder}/train.tsv", test="", max_source_length=16,
            max_target_length=16)
config = TrainConfig(
    name="toy", output_dir="{folder}/run", task=task, tokenizer="{folder}/spiece.model", tokenizer_size=290,
    model=T5Config(vocab_size=296, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_encoder_layers=1,
                   num_decoder_layers=1),
    steps=20, batch_tokens=128, dtype="float32", eval_every=10, save_every=10, log_every=1,
    validation_examples=8)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a task of number words, and a config of its own."""
    folder = tmp_path_factory.mktemp("finetune")
    words = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier"}
    rng = random.Random(0)
    lines = []
    for _ in range(120):
        chosen = rng.choices(list(words), k=2)
        lines.append(" ".join(chosen) + "\t" + " ".join(words[w] for w in chosen) + "\n")
    (folder / "train.tsv").write_text("".join(lines))
    (folder / "toy.py").write_text(CONFIG.format(folder=folder))
    return folder


def command(toy, run, *flags):
    return [sys.executable, str(SCRIPT), f"--config={toy / 'toy.py'}", f"--output-dir={run}", *flags]


def environment(toy, count=1):
    return os.environ | {
        "XLA_FLAGS": devices(count),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(toy / "compiled"),
    }


def finetune(toy, run, *flags, devices=1):
    return subprocess.run(
        command(toy, run, *flags), env=environment(toy, devices), capture_output=True, text=True, timeout=300
    )


def parameters(run):
    return jax.tree.leaves(checkpoints.load(run).params)


def losses(run):
    return [event["loss"] for event in read_events(run / "metrics.jsonl") if event["event"] == "log"]


def test_evaluate_gives_the_quality_that_training_logged(toy, alone, tmp_path):
    """And greedy lossless decoding gives the verifier's."""
    best = min(
        (e for e in read_events(alone / "metrics.jsonl") if e["event"] == "evaluation"),
        key=lambda e: e["loss"],
    )
    pair = [f"--drafter={alone}", f"--verifier={alone}", "--max-source-length=16", "--max-new-tokens=16"]
    scored = ["--split=validation", "--limit=8", "--methods", "verifier", "speculative"]
    assert evaluate.main([*pair, f"--task={toy / 'toy.py'}", *scored, f"--summary={tmp_path / 'out'}"]) == 0
    single, lossless = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert single["examples"] == 8 and single["bleu"] == lossless["bleu"] == pytest.approx(best["quality"])
    assert single["tokens"] == lossless["tokens"] > 8
    assert evaluate.main(["--config=wmt_small_large"]) == 2


def last_step(run):
    return max((event["step"] for event in read_events(run / "metrics.jsonl")), default=0)


@pytest.fixture(scope="module")
def alone(toy):
    """One uninterrupted run on one device."""
    run = toy / "alone"
    done = finetune(toy, run)
    assert done.returncode == 0, done.stderr
    return run


def test_leaves_a_log_and_a_loss_curve(alone):
    assert len(losses(alone)) == 20 and losses(alone)[-1] < losses(alone)[0]
    assert (alone / "loss.png").stat().st_size > 5_000


def unfinished(run):
    """The saves that a kill left half-written."""
    return {path for path in run.glob("*/*") if "tmp" in path.name}


def test_killed_anywhere_it_ends_as_if_uninterrupted(toy, alone):
    """SIGKILL at random moments, most of them inside a save: bit-identical parameters."""
    run, rng = toy / "killed", random.Random(1)
    run.mkdir()
    points = 6
    often = ["--save-every=1", "--eval-every=5", f"--steps={15 * points}"]
    reference = toy / "often"
    assert finetune(toy, reference, *often).returncode == 0
    inside = 0
    for _ in range(points):
        step, left = last_step(run), unfinished(run)
        process = subprocess.Popen(command(toy, run, *often), env=environment(toy), stderr=subprocess.DEVNULL)
        while process.poll() is None and last_step(run) <= step:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
        inside += bool(unfinished(run) - left)
        if native.manager(run / "latest").latest_step() is not None:
            checkpoints.load(run)
    print(f"{points} kills, {inside} inside a save")
    assert inside
    assert finetune(toy, run, *often).returncode == 0
    for a, b in zip(parameters(run), parameters(reference), strict=True):
        np.testing.assert_array_equal(a, b)
    assert losses(run) == losses(reference)
    starts = [e["step"] for e in read_events(run / "metrics.jsonl") if e["event"] == "start"]
    assert len(starts) > 1 and starts[-1] > 0


@pytest.mark.parametrize("flags", [[], ["--split-parameters"]], ids=["data-parallel", "fsdp"])
def test_eight_devices_train_as_one(toy, alone, flags):
    run = toy / f"eight{len(flags)}"
    done = finetune(toy, run, *flags, devices=8)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(run), losses(alone), rtol=2e-5)
    for a, b in zip(parameters(run), parameters(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


MEMORY = """
import sys
import jax, jax.numpy as jnp
import dataclasses
from speccascade_jax import config as configs
from speccascade_jax.training.data import TrainingBatches
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.preparation import first_parameters, prepare_tokenizer
from speccascade_jax.training.steps import make_steps
from speccascade_jax.models.t5 import T5Model
from speccascade_jax.parallel import make_mesh, split_rows, tree_sharding

config = configs.load(sys.argv[1])
config = dataclasses.replace(config, split_parameters=True)
mesh, model, optimizer = make_mesh(), T5Model(config.model), make_optimizer(config)
params = first_parameters(config, model, mesh)
state = jax.jit(optimizer.init, out_shardings=tree_sharding(
    mesh, jax.eval_shape(optimizer.init, params), True))(params)
steps = make_steps(model, config, optimizer, mesh)
batch = next(TrainingBatches(config.task, prepare_tokenizer(config), 128, 0).from_step(0))
grads, _, count = steps.gradients(params, split_rows(mesh, batch), jnp.uint32(0), None)

def report(trees):
    leaves = jax.tree.leaves(trees)
    here = sum(s.data.nbytes for x in leaves for s in x.addressable_shards if s.device.id == 3)
    print(here / sum(x.nbytes for x in leaves))

report((params, state, grads))
report(steps.update(params, state, grads, count)[:2])
"""


def test_fsdp_splits_parameters_state_and_gradients(toy, alone):
    """Each of eight devices holds about an eighth, before and after an update."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(toy / "toy.py")],
        env=environment(toy, 8),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shares = [float(line) for line in done.stdout.split()]
    assert len(shares) == 2 and all(0.12 < share < 0.16 for share in shares), shares


def test_two_processes_train_as_one(toy, alone):
    run = toy / "two"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            command(toy, run, f"--cluster={address},2,{n}", "--split-parameters"),
            env=environment(toy, 2),
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    np.testing.assert_allclose(losses(run), losses(alone), rtol=2e-5)
    for a, b in zip(parameters(run), parameters(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def here(toy, run, *flags):
    """The exit code of a run inside this process: quicker, for what needs no process of its own."""
    return finetune_script.main(command(toy, run, *flags)[2:])


def test_accumulated_batches_are_one_step(toy, alone):
    """Two batches a step: the token-weighted mean of both, seen in the first step's loss."""
    run, single = toy / "accumulated", toy / "single"
    assert here(toy, run, "--accumulate=2", "--steps=1", "--dropout-rate=0") == 0
    assert here(toy, single, "--steps=2", "--dropout-rate=0", "--learning-rate=0") == 0
    low, high = sorted(losses(single))
    assert low < losses(run)[0] < high


def test_rematerialisation_changes_no_step(toy, alone):
    assert here(toy, toy / "remat", "--remat") == 0
    np.testing.assert_allclose(losses(toy / "remat"), losses(alone), rtol=1e-5)


@pytest.mark.parametrize(
    "flags,said",
    [
        (["--learning-rate=1e30"], "not a number at step"),
        (["--optimizer=sgd"], "unknown optimizer 'sgd'"),
        (["--train=missing.jsonl"], "missing.jsonl"),
        (["--source-field=text"], "line 1: no text in field 'text'"),
        (["--metric=accuracy"], "unknown metric 'accuracy'"),
        (["--max-target-length=2"], "raise the limits"),
        (["--divergence=js"], "unknown divergence"),
        (["--vocab-size=100"], "model.vocab_size"),
        (["--cluster=me"], "HOST:PORT,PROCESSES,NUMBER"),
        (["--init=/nowhere"], "no checkpoint folder"),
        (["--output-dir=/dev/null/run"], "Not a directory"),
    ],
    ids=lambda x: x[0].split("=")[0] if isinstance(x, list) else "",
)
def test_bad_input_is_one_sentence(toy, alone, tmp_path, capsys, flags, said):
    assert here(toy, tmp_path / "run", *flags) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_an_extra_column_is_named(toy, tmp_path, capsys):
    (tmp_path / "bad.tsv").write_text("one\teins\ntwo\tzwei\tzwo\n")
    assert here(toy, tmp_path / "run", f"--train={tmp_path / 'bad.tsv'}") == 2
    assert "bad.tsv, line 2: 3 columns" in capsys.readouterr().err


def test_divergence_keeps_the_last_good_checkpoint(toy, alone, tmp_path, capsys):
    run = tmp_path / "run"
    assert here(toy, run, "--steps=10") == 0
    before = parameters(run)
    assert here(toy, run, "--learning-rate=1e30") == 2
    assert "the checkpoint of step 10 is kept" in capsys.readouterr().err
    for a, b in zip(parameters(run), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_model_than_the_run_began_with_is_refused(toy, alone, capsys):
    before = (alone / "model.json").read_text()
    assert here(toy, alone, "--d-model=64") == 2
    assert "d_model is 32, not 64" in capsys.readouterr().err
    assert (alone / "model.json").read_text() == before


@pytest.mark.parametrize("item", ["params", "optimizer"])
def test_a_damaged_save_is_not_resumed_from(item, toy, alone, tmp_path, capsys):
    shutil.copytree(alone, tmp_path / "run")
    for path in (tmp_path / "run" / "latest" / "20" / item).glob("ocdbt.process_0/d/*"):
        os.truncate(path, path.stat().st_size // 2)
    assert here(toy, tmp_path / "run", "--steps=30") == 2
    error = capsys.readouterr().err
    assert "damaged" in error and len(error.splitlines()) == 1


def test_a_full_disk_loses_nothing(toy, alone, tmp_path):
    """A limit on file sizes simulates a full disk."""
    run = tmp_path / "run"
    assert here(toy, run, "--steps=10") == 0
    before = parameters(run)
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "limited", *command(toy, run)]
    done = subprocess.run(limited, env=environment(toy), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "error: " in done.stderr, done.stderr
    for a, b in zip(parameters(run), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_metrics_hold_the_config(alone):
    (start,) = [
        e
        for e in map(json.loads, (alone / "metrics.jsonl").read_text().splitlines())
        if e["event"] == "start"
    ]
    assert start["config"]["optimizer"] == "adafactor" and str(alone.parent) not in json.dumps(start)
