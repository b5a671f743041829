"""kept_epochs: what a frozen model computes is kept on disk, and changes nothing that is learned."""

import dataclasses
import itertools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import DECODERS, TINY_T5, TINY_T5GEMMA

from speccascade_jax import checkpoints
from speccascade_jax.config import ExitTraining, Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import (
    BlockDrafterConfig,
    EaglePairConfig,
    ExitsConfig,
    NetworkConfig,
    SharedEncoderConfig,
    model_of,
)
from speccascade_jax.models.eagle import EagleConfig
from speccascade_jax.parallel import make_mesh
from speccascade_jax.training.checks import check
from speccascade_jax.training.data import Batch, TrainingBatches
from speccascade_jax.training.kept_states import KeptStates
from speccascade_jax.training.loop import train
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.preparation import prepare_tokenizer
from speccascade_jax.training.reporting import read_events
from speccascade_jax.training.steps import make_steps

T5 = dataclasses.replace(TINY_T5, dropout_rate=0.0)
QWEN = DECODERS["qwen3"]
NARROW = dataclasses.replace(T5, d_model=16, num_encoder_layers=0, num_decoder_layers=1)
HEAD = EagleConfig(
    vocab_size=QWEN.vocab_size,
    d_model=QWEN.d_model,
    d_ff=32,
    num_heads=2,
    num_kv_heads=1,
    d_kv=8,
    draft_vocab_size=QWEN.vocab_size,
    state_width=QWEN.d_model,
    layers=(0, 1, QWEN.num_layers),
)
KINDS = {
    "t5": T5,
    "t5 with tied embeddings": dataclasses.replace(T5, tied_embeddings=True),
    "decoder only": QWEN,
    "capped logits": DECODERS["gemma2"],
    "t5gemma": TINY_T5GEMMA,
    "exits": ExitsConfig(T5, (1,), "adapter", 8),
    "own heads": ExitsConfig(QWEN, (1,), "own"),
    "shared encoder": SharedEncoderConfig(T5, NARROW),
    "reads states": SharedEncoderConfig(T5, NARROW, True),
    "blocks": BlockDrafterConfig(T5, (0, 1), 3, num_heads=4, d_kv=8, d_ff=64),
    "eagle": EaglePairConfig(QWEN, HEAD),
}


def batch_of(seed):
    rng = np.random.default_rng(seed)
    source, target = (rng.integers(3, 90, (4, 9)).astype(np.int32) for _ in range(2))
    lengths = [rng.integers(4, 10, 4).astype(np.int32) for _ in range(2)]
    return Batch(source, lengths[0], target, lengths[1])


def quick(kind):
    return kind if kind in ("t5", "reads states", "eagle") else pytest.param(kind, marks=pytest.mark.full)


@pytest.mark.parametrize("kind", [quick(kind) for kind in KINDS])
def test_gradients_with_kept_states_are_those_without(kind):
    """Those with another batch's states differ (the control)."""
    config = TrainConfig("", "", KINDS[kind], Task("", "", ""), dtype="float32", distillation=1.0)
    model = model_of(config.model)
    teacher = None if isinstance(config.model, NetworkConfig) else model
    params, held = model.init(0), model.init(1) if teacher else None
    steps = make_steps(model, config, make_optimizer(config), make_mesh(), teacher)
    batch, other = batch_of(0), batch_of(1)
    states, foreign = (steps.frozen_states(params, x, held) for x in (batch, other))
    expected, loss, _ = steps.gradients(params, batch, jnp.uint32(0), held)
    kept, same, _ = steps.gradients(params, batch, jnp.uint32(0), held, states)
    np.testing.assert_allclose(same, loss, rtol=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * largest)
    wrong = steps.gradients(params, batch, jnp.uint32(0), held, foreign)[1]
    assert abs(float(wrong - loss)) > 1e-3 * abs(float(loss))


@pytest.fixture(scope="module")
def student(number_words, tmp_path_factory):
    """A run that learns from a teacher for several epochs."""
    teacher = train(
        dataclasses.replace(
            number_words, output_dir=str(tmp_path_factory.mktemp("teacher")), steps=40, export_dir=None
        )
    )
    return dataclasses.replace(
        number_words,
        output_dir=str(tmp_path_factory.mktemp("student") / "run"),
        teacher=str(teacher),
        distillation=1.0,
        export_dir=None,
        steps=60,
        save_every=20,
        kept_epochs=1,
        validation_examples=0,
        seed=1,
    )


def test_a_run_learns_the_same_from_kept_states(student, tmp_path, monkeypatch):
    """Every epoch repeats the first one's batches; the teacher is run for each of them once."""
    calls = []
    of = KeptStates.of

    def counted(self, number, compute):
        return of(self, number, lambda: (calls.append(number), compute())[1])

    with monkeypatch.context() as patch:
        patch.setattr(KeptStates, "of", counted)
        run = train(student)
    tokenizer = prepare_tokenizer(student)
    data = TrainingBatches(student.task, tokenizer, student.batch_tokens, student.seed, epochs=1)
    count = len(data.shapes())
    assert 1 < count < 30
    assert calls == list(range(count))
    walked = list(itertools.islice(data.from_step(0), 2 * count))
    for first, again in zip(walked[:count], walked[count:], strict=True):
        np.testing.assert_array_equal(first.source, again.source)

    with monkeypatch.context() as patch:
        patch.setattr(KeptStates, "of", lambda self, number, compute: jax.device_get(compute()))
        anew = train(dataclasses.replace(student, output_dir=str(tmp_path / "anew")))
    jax.tree.map(np.testing.assert_array_equal, *(checkpoints.load(x).params for x in (run, anew)))
    assert not (run / "kept").exists()


@pytest.mark.full
def test_a_killed_run_with_kept_states_ends_as_an_uninterrupted_one(student, tmp_path, monkeypatch):
    """It computes none of the states again, except those of a file that was cut short."""
    whole = train(dataclasses.replace(student, output_dir=str(tmp_path / "whole")))
    killed = dataclasses.replace(student, output_dir=str(tmp_path / "killed"))
    from_step = TrainingBatches.from_step

    def dying(self, step):
        yield from itertools.islice(from_step(self, step), 33)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "from_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(killed)
    kept = tmp_path / "killed" / "kept"
    cut = sorted(kept.glob("*.bin"))[3]
    cut.write_bytes(cut.read_bytes()[:-1])
    calls = []
    of = KeptStates.of

    def counted(self, number, compute):
        return of(self, number, lambda: (calls.append(number), compute())[1])

    monkeypatch.setattr(KeptStates, "of", counted)
    run = train(killed)
    assert len(calls) == 1
    jax.tree.map(np.testing.assert_array_equal, *(checkpoints.load(x).params for x in (run, whole)))
    starts = [event["step"] for event in read_events(run / "metrics.jsonl") if event["event"] == "start"]
    assert starts == [0, 20]


@pytest.mark.full
@pytest.mark.parametrize("changed", ["teacher", "texts"])
def test_states_of_what_has_changed_under_its_name_are_not_used(changed, student, tmp_path, monkeypatch):
    """All states are computed anew, although every array has the shape that it had."""
    train_file, teacher = tmp_path / "train.jsonl", tmp_path / "teacher"
    lines = Path(student.task.train).read_text().splitlines()
    train_file.write_text("\n".join(lines))
    shutil.copytree(student.teacher, teacher)
    config = dataclasses.replace(
        student,
        output_dir=str(tmp_path / "run"),
        teacher=str(teacher),
        task=dataclasses.replace(student.task, train=str(train_file)),
    )
    calls, of, from_step = [], KeptStates.of, TrainingBatches.from_step

    def counted(self, number, compute):
        return of(self, number, lambda: (calls.append(number), compute())[1])

    def dying(self, step):
        yield from itertools.islice(from_step(self, step), 33)
        raise KeyboardInterrupt

    monkeypatch.setattr(KeptStates, "of", counted)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "from_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    count = len(calls)
    if changed == "texts":  # as many tokens in the same places
        train_file.write_text("\n".join(line.replace("eins", "zwei") for line in lines))
    else:
        other = dataclasses.replace(student, output_dir=str(tmp_path / "other"), teacher=None)
        shutil.rmtree(teacher)
        train(dataclasses.replace(other, steps=20, kept_epochs=0)).rename(teacher)
    calls.clear()
    train(config)
    assert len(calls) == count


def test_arrays_are_read_as_they_were_written(tmp_path):
    """In every dtype; numbers wrap around; other settings discard what is kept."""
    arrays = [
        {
            "a": np.arange(6, dtype=np.float32).reshape(2, 3) + n,
            "b": jnp.full((2, 0), 1.0),
            "c": jnp.ones(5, jnp.bfloat16) * n,
        }
        for n in range(3)
    ]
    shapes = [jax.eval_shape(lambda x: x, x) for x in arrays]
    kept = KeptStates(tmp_path / "kept", shapes, {"seed": 0})
    for number in range(3):
        kept.of(number, lambda number=number: arrays[number])

    def never():
        raise AssertionError("computed again")

    for number in (2, 3, 4, 8):
        again = KeptStates(tmp_path / "kept", shapes, {"seed": 0}).of(number, never)
        jax.tree.map(np.testing.assert_array_equal, again, arrays[number % 3])
        assert jax.tree.map(lambda x: x.dtype, again) == jax.tree.map(lambda x: x.dtype, arrays[number % 3])
    changed = KeptStates(tmp_path / "kept", shapes, {"seed": 1})
    with pytest.raises(AssertionError, match="computed again"):
        changed.of(0, never)


def test_a_disk_that_is_too_small_is_refused_before_work_starts(tmp_path, monkeypatch):
    shapes = [jax.ShapeDtypeStruct((1024, 1024), np.float32)] * 3  # 12 MiB
    free = 8 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free, free, free))
    with pytest.raises(FieldError, match=r"0.0 GiB"):
        KeptStates(tmp_path / "kept", shapes, {})
    assert not (tmp_path / "kept").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free, free, 2 * free))
    kept = KeptStates(tmp_path / "kept", shapes, {})
    kept.of(0, lambda: np.zeros((1024, 1024), np.float32))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 * free, free, free))
    KeptStates(tmp_path / "kept", shapes, {})  # what is there already needs no room


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_policy": 0.5}, "writes new texts in every epoch"),
        ({"teacher": None, "distillation": 0.0}, "a frozen teacher computes"),
        ({"distillation": 0.0}, "a frozen teacher computes"),
        ({"kept_epochs": -1}, "at least 0"),
    ],
)
def test_runs_without_anything_to_keep_are_refused(student, changes, message):
    with pytest.raises(FieldError, match=message):
        check(dataclasses.replace(student, **changes))


def test_runs_of_several_processes_are_refused_before_work_starts(student, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(FieldError, match="runs of one process"):
        train(student)


def test_a_full_model_that_is_trained_is_refused(student):
    config = dataclasses.replace(
        student, model=KINDS["exits"], teacher=None, exits=ExitTraining(frozen=False)
    )
    with pytest.raises(FieldError, match="a frozen full model computes"):
        check(config)
