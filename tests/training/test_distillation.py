"""Distillation from a teacher's distributions: every divergence, a rule's pi, and refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shapes import DECODERS, TINY_T5, TINY_T5GEMMA
from tiny_models import untrained

from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.core.divergences import DIVERGENCES
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.rules import METHODS, Scores
from speccascade_jax.models import ExitsConfig, NetworkConfig, SharedEncoderConfig, model_of
from speccascade_jax.parallel import make_mesh
from speccascade_jax.training import lora
from speccascade_jax.training.checks import check
from speccascade_jax.training.data import Batch
from speccascade_jax.training.distillation import distillation_loss
from speccascade_jax.training.exits import split
from speccascade_jax.training.loop import train
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.steps import make_steps

T5 = dataclasses.replace(TINY_T5, dropout_rate=0.0)
NARROW = dataclasses.replace(T5, d_model=16, num_encoder_layers=0, num_decoder_layers=1)
KINDS = {  # the model, and the rank of its adapters
    "t5": (T5, 0),
    "qwen3": (DECODERS["qwen3"], 0),
    "t5gemma": (TINY_T5GEMMA, 0),
    "lora": (DECODERS["qwen3"], 3),
    "lora t5": (T5, 3),
    "exits": (ExitsConfig(T5, (1,), "adapter", 8), 0),
    "own heads": (ExitsConfig(DECODERS["qwen3"], (1,), "own"), 0),
    "shared encoder": (SharedEncoderConfig(T5, NARROW), 0),
    "reads states": (SharedEncoderConfig(T5, NARROW, True), 0),
}


def run_of(kind, **changes):
    model, rank = KINDS[kind]
    usual = {
        "optimizer": "adamw",
        "learning_rate": 0.02,
        "dtype": "float32",
        "z_loss": 0.0,
        "distillation": 1.0,
        "steps": 3,
        "lora_rank": rank,
    }
    return TrainConfig("", "", model, Task("", "", ""), **usual | changes)


def batch_of(seed):
    rng = np.random.default_rng(seed)
    source, target = (rng.integers(3, 90, (4, 9)).astype(np.int32) for _ in range(2))
    return Batch(source, np.full(4, 9, np.int32), target, rng.integers(4, 10, 4).astype(np.int32))


class Student:
    """A config's steps and parameters, next to a teacher where it is no network."""

    def __init__(self, config):
        self.config, self.model = config, model_of(config.model)
        self.network = isinstance(config.model, NetworkConfig)
        self.params = self.model.init(0)
        if config.lora_rank:
            self.params = lora.with_adapters(self.params, lora.fresh(config, self.params))
        self.teacher = None if self.network else jax.tree.map(lambda x: 1.5 * x, self.model.init(1))
        self.optimizer = make_optimizer(config)
        teacher = None if self.network else self.model
        self.steps = make_steps(self.model, config, self.optimizer, make_mesh(), teacher)
        self.state = self.optimizer.init(split(config, self.params)[0])

    def laws(self, batch):
        """Log probabilities of teacher and student, float64 [tokens, V], at the real tokens."""
        params = lora.adapted(self.config, self.params)
        if self.network:
            student, teacher = jax.jit(self.model.forced_members)(params, *batch[:3])
        else:
            student, teacher = (jax.jit(self.model.forced)(x, *batch[:3]) for x in (params, self.teacher))
        real = np.arange(batch.target.shape[1]) < batch.target_length[:, None]
        return [np.asarray(jax.nn.log_softmax(x), np.float64)[real] for x in (teacher, student)]

    def loss(self, batch, number=0):
        _, loss, count = self.steps.gradients(self.params, batch, jnp.uint32(number), self.teacher)
        assert count == batch.target_length.sum()
        return float(loss)

    def step(self, batch, number=0):
        grads, _, count = self.steps.gradients(self.params, batch, jnp.uint32(number), self.teacher)
        self.params, self.state, _ = self.steps.update(self.params, self.state, grads, count)


def overlap_with_pi(p, q, method, alpha):
    """sum_v min(pi, q) [tokens] by core.rules, from log probabilities."""
    p, q = (jnp.asarray(np.exp(x)) for x in (p, q))
    pi = METHODS[method].target(Scores(q, p, q, p, jnp.array(False)), alpha)[0]
    return np.minimum(pi, q).sum(-1)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_drafter_learns_a_rules_pi(kind):
    """The first loss is -log of what the rule accepts, computed outside; later ones are smaller."""
    student = Student(run_of(kind, divergence="lk", method="token_v3", alpha=0.2))
    batch = batch_of(0)
    expected = -np.log(overlap_with_pi(*student.laws(batch), "token_v3", 0.2)).sum()
    first = student.loss(batch)
    np.testing.assert_allclose(first, expected, rtol=1e-4)
    held = student.steps.losses(student.params, batch, student.teacher)
    np.testing.assert_allclose(held[0], first, rtol=1e-5)  # it is judged by the same
    for number in range(12):
        student.step(batch, number)
    assert student.loss(batch) < 0.95 * first


@pytest.mark.full
@pytest.mark.parametrize("kind", ["t5", "exits"])
def test_the_schedule_counts_steps_not_batches(kind):
    """Three steps of two batches each: KL, the mean of both, LK; judged by LK."""
    losses = {name: Student(run_of(kind, divergence=name, accumulate=2)) for name in ("kl", "lk", "kl_to_lk")}
    batch = batch_of(1)
    kl, lk = (losses[name].loss(batch) for name in ("kl", "lk"))
    mixed = losses["kl_to_lk"]
    expected = [kl, kl, (kl + lk) / 2, (kl + lk) / 2, lk, lk]
    np.testing.assert_allclose([mixed.loss(batch, n) for n in range(6)], expected, rtol=1e-5)
    held = mixed.steps.losses(mixed.params, batch, mixed.teacher)[0]
    np.testing.assert_allclose(held, lk, rtol=1e-5)
    assert abs(kl - lk) > 0.1 * lk  # the control


@pytest.mark.full
def test_pi_is_held_while_the_drafter_learns():
    """The gradient is that of the divergence from a constant: pi reads the drafter, and has no gradient."""
    rng = np.random.default_rng(0)
    logits, teacher = (jnp.asarray(rng.normal(size=(2, 3, 7)), jnp.float32) for _ in range(2))
    length = jnp.array([3, 2])
    q, p = (jax.nn.softmax(x) for x in (logits, teacher))
    pi = METHODS["mixture"].target(Scores(q, p, q, p, jnp.array(False)), 0.4)[0]
    held = jnp.log(pi)  # whose softmax is pi
    for name in DIVERGENCES:
        gradient = jax.grad(distillation_loss)(logits, teacher, length, name, "mixture", 0.4, 0.5)
        constant = jax.grad(distillation_loss)(logits, held, length, name, progress=0.5)
        np.testing.assert_allclose(gradient, constant, atol=1e-6)
        assert not np.any(gradient[1, 2]) and np.abs(gradient).max() > 1e-3
        to_teacher = jax.grad(distillation_loss, argnums=1)(logits, teacher, length, name, "mixture", 0.4)
        np.testing.assert_array_equal(to_teacher, 0.0)


def test_the_loss_is_computed_in_float32():
    rng = np.random.default_rng(1)
    logits, teacher = (jnp.asarray(3 * rng.normal(size=(2, 3, 500)), jnp.bfloat16) for _ in range(2))
    for name in DIVERGENCES:
        loss = distillation_loss(logits, teacher, jnp.array([3, 3]), name)
        wide = distillation_loss(*(x.astype(jnp.float32) for x in (logits, teacher)), jnp.array([3, 3]), name)
        assert loss.dtype == jnp.float32
        np.testing.assert_array_equal(loss, wide)


@pytest.fixture(scope="module")
def base(number_words, tmp_path_factory):
    """A config of a short run, and a checkpoint of its model."""
    config = dataclasses.replace(
        number_words,
        model=dataclasses.replace(number_words.model, dropout_rate=0.0),
        export_dir=None,
        steps=20,
        eval_every=20,
        save_every=20,
        validation_examples=0,
    )
    return config, untrained(config, tmp_path_factory.mktemp("base") / "teacher")


@pytest.mark.full
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_run_is_evaluated_by_its_training_loss(base, tmp_path, lora_rank):
    """A student that is its teacher has nothing to learn from it; from the data it has."""
    config, teacher = base

    def evaluated(share):
        run = dataclasses.replace(
            config,
            output_dir=str(tmp_path / f"{share}"),
            tokenizer=None,
            init=str(teacher),
            teacher=str(teacher),
            distillation=share,
            divergence="lk",
            method="opt",
            alpha=0.1,
            learning_rate=0.0,
            steps=1,
            lora_rank=lora_rank,
        )
        lines = (train(run) / "metrics.jsonl").read_text().splitlines()
        return next(e["loss"] for e in map(json.loads, lines) if e["event"] == "evaluation")

    assert abs(evaluated(1.0)) < 1e-5 < 0.1 < evaluated(0.5)


@pytest.mark.parametrize(
    "changes,field,value",
    [
        ({"divergence": "lk"}, "divergence", "lk"),
        ({"method": "opt"}, "method", "opt"),
        ({"alpha": 0.2}, "alpha", 0.2),
        ({"teacher": "", "divergence": "lk", "distillation": 0.0}, "divergence", "lk"),
        ({"model": KINDS["exits"][0], "divergence": "lk", "distillation": 0.0}, "divergence", "lk"),
        ({"teacher": "", "divergence": "js"}, "divergence", "js"),
        ({"teacher": "", "method": "chows"}, "method", "chows"),
        ({"teacher": "", "method": "lookahead"}, "method", "lookahead"),
        ({"teacher": "", "method": "router"}, "method", "router"),
        ({"teacher": "", "method": "token_v3", "alpha": 1.5}, "alpha", 1.5),
        ({"teacher": "", "method": "opt", "alpha": float("nan")}, "alpha", float("nan")),
        ({"teacher": "", "method": "opt", "alpha": -0.1}, "alpha", -0.1),
    ],
)
def test_impossible_distillation_is_one_sentence(changes, field, value, base, tmp_path):
    config, folder = base
    named = {key: str(folder) for key in ("teacher",) if key in changes}
    with pytest.raises(FieldError) as error:
        check(dataclasses.replace(config, output_dir=str(tmp_path / "run"), **changes | named))
    assert (error.value.field, str(error.value.value)) == (field, str(value))
    assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")


def test_rules_that_can_be_learned_pass(base, tmp_path):
    config, folder = base
    for name, method in METHODS.items():
        if method.by_prefix and not method.trained:
            run = dataclasses.replace(
                config, output_dir=str(tmp_path / "run"), teacher=str(folder), method=name, alpha=0.5
            )
            check(run)
