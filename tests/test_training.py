"""Training from scratch on a toy task: it learns, resumes exactly, and its checkpoints decode."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from speccascade_jax import checkpoints, training
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.data import TrainingBatches, joined_examples
from speccascade_jax.evaluation import bleu
from speccascade_jax.models.layers import Linear
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.text import Cascade


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Translate number words from English to German, one to three an example."""
    folder = tmp_path_factory.mktemp("task")
    words = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fuenf", "six": "sechs"}
    rng = np.random.default_rng(0)
    for split, count in (("train", 400), ("validation", 40)):
        lines = []
        for _ in range(count):
            chosen = rng.choice(list(words), 2)
            lines.append({"source": " ".join(chosen), "target": " ".join(words[w] for w in chosen)})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = Task(train=str(folder / "train.jsonl"), validation=str(folder / "validation.jsonl"), test="",
                max_source_length=24, max_target_length=24, join=3)
    model = T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_encoder_layers=1,
                     num_decoder_layers=1)
    return TrainConfig(name="toy", output_dir=str(folder / "run"), model=model, task=task,
                       tokenizer=str(folder / "spiece.model"), tokenizer_size=300, steps=500,
                       batch_tokens=256,
                       learning_rate=0.03, warmup_steps=10, dtype="float32", save_every=60, eval_every=100,
                       validation_examples=16, export_dir=str(folder / "export"))


@pytest.fixture(scope="module")
def trained(config):
    return training.train(config)


def events(run, kind):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_learns_and_records(trained, config):
    first, last = events(trained, "evaluation")[0], events(trained, "evaluation")[-1]
    assert last["loss"] < first["loss"] and last["bleu"] > 50
    assert events(trained, "start")[0]["config"]["name"] == "toy"


def test_run_and_export_decode_alike(trained, config):
    """bfloat16 rounding aside, the exported folder is the run's best checkpoint."""
    run, export = (checkpoints.load(path).params for path in (trained, config.export_dir))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), run)
    jax.tree.map(np.testing.assert_array_equal, rounded, export)
    cascade = Cascade.load(trained, config.export_dir, max_source_length=24, max_new_tokens=24)
    examples = joined_examples(config.task, config.task.validation)
    outputs = cascade.generate([s for s, _ in examples], batch_size=8)
    assert bleu([o.text for o in outputs], [r for _, r in examples]) > 50


def test_a_killed_run_ends_as_an_uninterrupted_one(trained, config, tmp_path, monkeypatch):
    again = dataclasses.replace(config, output_dir=str(tmp_path / "run"), export_dir=None)
    from_step = TrainingBatches.from_step

    def dying(self, step):
        yield from itertools.islice(from_step(self, step), 130)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "from_step", dying)
        with pytest.raises(KeyboardInterrupt):
            training.train(again)
    resumed = checkpoints.load(training.train(again)).params
    jax.tree.map(np.testing.assert_array_equal, resumed, checkpoints.load(trained).params)
    assert [e["step"] for e in events(tmp_path / "run", "start")] == [0, 120]


def test_batches_are_a_function_of_the_step(trained, config):
    tokenizer = training.prepare_tokenizer(config)
    batches = TrainingBatches(config.task, tokenizer, config.batch_tokens, seed=3)
    walked = list(itertools.islice(batches.from_step(0), 60))  # several epochs
    for step in (0, 1, 17, 59):
        for a, b in zip(next(batches.from_step(step)), walked[step], strict=True):
            np.testing.assert_array_equal(a, b)
    assert any((a.source.shape != b.source.shape) or (a.source != b.source).any()
               for a, b in itertools.pairwise(walked))


def test_a_student_learns_from_its_teacher_alone(trained, config, tmp_path):
    student = dataclasses.replace(config, output_dir=str(tmp_path / "run"), teacher=str(trained), steps=100,
                                  distillation=1.0, export_dir=None, seed=1)
    run = training.train(student)
    assert events(run, "evaluation")[-1]["loss"] < events(trained, "evaluation")[0]["loss"] + 0.3


def test_distillation_loss_is_a_masked_divergence():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32) for _ in range(2))
    length = jnp.array([3, 1])
    assert abs(training.distillation_loss(a, a, length)) < 1e-6
    p, q = (np.asarray(jax.nn.softmax(x)) for x in (b, a))
    expected = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(training.distillation_loss(a, b, length), expected[0].sum() + expected[1, 0],
                               rtol=1e-5)


def test_mixed_precision_gradients_are_those_of_float32():
    """bfloat16 operands, float32 sums: within bfloat16's rounding of the float32 gradient."""
    x = jax.random.normal(jax.random.key(0), (4, 6, 64))

    def gradients(dtype):
        layer = Linear(64, 32, std=0.1, dtype=dtype, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        return jax.grad(lambda s, x: jnp.sum(jnp.sin(nnx.merge(graph, s)(x))), argnums=(0, 1))(state, x)

    for half, full in zip(*(jax.tree.leaves(gradients(d)) for d in (jnp.bfloat16, jnp.float32)), strict=True):
        assert half.dtype == jnp.float32
        np.testing.assert_allclose(half, full, atol=0.02 * float(np.abs(full).max()))
