"""Training a network's members, next to a frozen full model and together with it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import random_checkpoint, untrained

from speccascade_jax import checkpoints
from speccascade_jax.config import ExitTraining, Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import BlockDrafterConfig, ExitsConfig, SharedEncoderConfig, model_of
from speccascade_jax.models.presets import GEMMA2
from speccascade_jax.models.t5 import T5Config
from speccascade_jax.parallel import make_mesh
from speccascade_jax.training.checks import check
from speccascade_jax.training.data import Batch
from speccascade_jax.training.exits import layer_dropout, member_loss, split, weights
from speccascade_jax.training.loop import train
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.preparation import first_parameters
from speccascade_jax.training.slices import with_slice
from speccascade_jax.training.steps import make_steps

T5 = T5Config(
    vocab_size=300,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_heads=4,
    num_encoder_layers=1,
    num_decoder_layers=3,
    dropout_rate=0.1,
)
GEMMA = dataclasses.replace(
    GEMMA2,
    vocab_size=300,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_heads=4,
    num_kv_heads=2,
    num_layers=3,
    window=12,
    query_scalar=8,
)
DRAFTER = dataclasses.replace(T5, d_model=16, num_encoder_layers=0, num_decoder_layers=1)
FROZEN = {
    "adapters": ExitsConfig(T5, (1, 2), "adapter", 8),
    "heads": ExitsConfig(GEMMA, (1,), "own"),
    "drafter": SharedEncoderConfig(T5, DRAFTER),
    "reads states": SharedEncoderConfig(T5, DRAFTER, True),
    "blocks": BlockDrafterConfig(T5, (1, 3), 5, num_heads=4, d_kv=8, d_ff=64),
}


def run_of(model, **changes):
    usual = {
        "steps": 60,
        "optimizer": "adamw",
        "learning_rate": 0.03,
        "weight_decay": 0.1,
        "dtype": "float32",
        "distillation": 1.0,
    }
    return TrainConfig("", "", model, Task("", "", ""), **usual | changes)


def batch_of(seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(3, 20, (8, 10)).astype(np.int32)
    return Batch(
        source, np.full(8, 10, np.int32), np.sort(source, axis=1), rng.integers(5, 11, 8).astype(np.int32)
    )


def trained(config, params, steps):
    """The parameters after some steps."""
    optimizer = make_optimizer(config)
    made = make_steps(model_of(config.model), config, optimizer, make_mesh())
    params = jax.tree.map(jnp.copy, params)  # an update takes their memory
    state = optimizer.init(split(config, params)[0])
    for number in range(steps):
        grads, _, count = made.gradients(params, batch_of(number), jnp.uint32(number), None)
        params, state, _ = made.update(params, state, grads, count)
    return params


def member_losses(config, params, batch):
    """Each member's cross-entropy, and each small one's divergence from the full model, a token."""
    logits = model_of(config.model).forced_members(params, *batch[:3])
    laws = [np.asarray(jax.nn.log_softmax(x), np.float64) for x in logits]
    real = np.arange(batch.target.shape[1]) < batch.target_length[:, None]
    data = [-np.take_along_axis(x, batch.target[..., None], 2)[..., 0][real].mean() for x in laws]
    far = [(np.exp(laws[-1]) * (laws[-1] - x)).sum(-1)[real].mean() for x in laws[:-1]]
    return data, far


@pytest.mark.full
@pytest.mark.parametrize("name", FROZEN)
def test_the_full_model_is_unchanged_bit_for_bit(name):
    """Only what the small members have of their own is trained, and they come closer to the full model."""
    config = run_of(FROZEN[name])
    model, part = model_of(config.model), config.model.full_part
    params = model.around(model.full.init(0), 1)
    after = trained(config, params, 25)
    before, now = (dict(nnx.to_flat_state(x)) for x in (params, after))
    assert before.keys() == now.keys()
    for path, value in before.items():
        same = np.asarray(value[...]).tobytes() == np.asarray(now[path][...]).tobytes()
        assert same == (path[0] == part), path
    batch = batch_of(99)
    first, last = (jax.jit(model.forced)(x, *batch[:3]) for x in (params, after))
    np.testing.assert_array_equal(first, last)
    for old, new in zip(*(member_losses(config, x, batch)[1] for x in (params, after)), strict=True):
        assert new < 0.95 * old
    state = make_optimizer(config).init(split(config, params)[0])
    size = sum(x.size for path, x in before.items() if path[0] != part)
    assert sum(x.size for x in jax.tree.leaves(state)) < 2 * size + 20  # no moments of what is not trained


@pytest.mark.full
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_loss_beside_a_frozen_model(share):
    """The members' mean of (1 - share) times the data's loss plus share times KL(full || member)."""
    for name in ("adapters", "drafter"):
        config = run_of(FROZEN[name], distillation=share)
        model, batch = model_of(config.model), batch_of(3)
        params = model.init(0)
        data, far = member_losses(config, params, batch)
        total, count = member_loss(model, config, params, batch)
        assert count == batch.target_length.sum()
        mean = np.mean([(1 - share) * a + share * b for a, b in zip(data, far, strict=False)])
        np.testing.assert_allclose(total / count, mean, rtol=1e-4)


@pytest.mark.full
def test_exits_learn_from_the_full_model_without_dropout():
    """A training step's loss is that of validation: what is learnt from has no noise."""
    config = run_of(FROZEN["adapters"])
    model = model_of(config.model)
    params, batch = model.init(0), batch_of(0)
    quiet = member_loss(model, config, params, batch)[0]
    np.testing.assert_array_equal(member_loss(model, config, params, batch, jax.random.key(0))[0], quiet)
    together = dataclasses.replace(config, exits=ExitTraining(frozen=False))
    noisy = member_loss(model, together, params, batch, jax.random.key(0))[0]
    assert abs(noisy - member_loss(model, together, params, batch)[0]) > 1e-3  # the control


@pytest.mark.full
@pytest.mark.parametrize("model", [ExitsConfig(T5, (1, 2)), ExitsConfig(GEMMA, (1, 2))], ids=["t5", "gemma"])
def test_exits_and_full_model_learn_together(model):
    config = run_of(
        model, distillation=0.0, exits=ExitTraining(frozen=False, layer_dropout=0.1, curriculum="rotational")
    )
    params = model_of(model).init(0)
    after = trained(config, params, 60)
    first, last = (member_losses(config, x, batch_of(99))[0] for x in (params, after))
    assert all(new < 0.6 * old for old, new in zip(first, last, strict=True)), (first, last)
    alone = trained(
        dataclasses.replace(config, exits=dataclasses.replace(config.exits, exit_weight=0.0)), params, 60
    )
    data, _ = member_losses(config, alone, batch_of(99))
    assert data[0] > last[0] + 0.05  # the control: without their losses, exits learn less


def test_later_layers_are_left_out_more_often():
    rate, layers, rows = 0.4, 5, 20_000
    after = layer_dropout(jax.random.key(0), rate, layers, rows)
    left_out = [
        float(np.mean(after(n, jnp.zeros((rows, 2, 3)), jnp.ones((rows, 2, 3))) == 0)) for n in range(layers)
    ]
    np.testing.assert_allclose(left_out, rate * (2 ** (np.arange(layers) / 4) - 1), atol=0.015)
    assert left_out[0] == 0
    whole = after(4, jnp.zeros((rows, 2, 3)), jnp.ones((rows, 2, 3)))
    assert set(np.asarray(whole).mean(axis=(1, 2))) == {0.0, 1.0}  # of a row all positions
    assert (
        abs(
            np.corrcoef(
                *(
                    np.asarray(after(n, jnp.zeros((rows, 1, 1)), jnp.ones((rows, 1, 1)))).ravel()
                    for n in (3, 4)
                )
            )[0, 1]
        )
        < 0.03
    )


def test_weights_and_curricula():
    """Layers 2, 4 and 8 of 16 with weight 0.5: sums 3, 10 and 36; the full model 15 + 0.5 * 120."""
    config = run_of(
        ExitsConfig(dataclasses.replace(T5, num_decoder_layers=16), (2, 4, 8)),
        steps=60,
        accumulate=2,
        exits=ExitTraining(frozen=False, exit_weight=0.5),
    )
    whole = np.array([1.5, 5, 18, 75])

    def expected(*on):
        kept = whole * np.array([*on, 1])
        return kept / kept.sum()

    def at(step, curriculum):
        changed = dataclasses.replace(config, exits=dataclasses.replace(config.exits, curriculum=curriculum))
        pair = [weights(changed, jnp.uint32(2 * step + n)) for n in range(2)]
        np.testing.assert_array_equal(*pair)  # the batches of one step
        return pair[0]

    np.testing.assert_allclose(weights(config, None), expected(1, 1, 1), rtol=1e-6)
    for step, curriculum, on in (
        (0, "all", (1, 1, 1)),
        (0, "rotational", (1, 0, 0)),
        (1, "rotational", (0, 1, 0)),
        (5, "rotational", (0, 0, 1)),
        (0, "gradual", (0, 0, 0)),
        (9, "gradual", (0, 0, 0)),
        (10, "gradual", (0, 0, 1)),
        (20, "gradual", (0, 1, 1)),
        (29, "gradual", (0, 1, 1)),
        (30, "gradual", (1, 1, 1)),
    ):
        np.testing.assert_allclose(at(step, curriculum), expected(*on), rtol=1e-6)


# Runs


@pytest.fixture(scope="module")
def toy(tmp_path_factory, number_words):
    """A config of runs, and a checkpoint of the plain full model."""
    config = dataclasses.replace(number_words, model=T5, export_dir=None, validation_examples=0)
    return config, untrained(config, tmp_path_factory.mktemp("exits") / "full")


@pytest.mark.full
@pytest.mark.parametrize("name", ["adapters", "reads states"])
def test_a_run_fits_members_to_a_checkpoint(name, toy, tmp_path):
    """From the plain checkpoint, resumed in the middle, to a folder whose members load by name, and to one
    next to the plain checkpoint that holds what that has not."""
    base, full = toy
    out = full.with_name(f"exported {name}")
    config = dataclasses.replace(
        base,
        output_dir=str(tmp_path / "run"),
        model=FROZEN[name],
        init=str(full),
        tokenizer=None,
        distillation=1.0,
        steps=4,
        save_every=4,
        eval_every=4,
        export_dir=str(out),
    )
    train(config)
    run = train(dataclasses.replace(config, steps=8))  # it goes on, with another length
    small, whole = checkpoints.load_all([f"{run}@{model_of(config.model).names[0]}", str(run)])
    assert small.params is whole.params and small.tokenizer_file().is_file()
    plain = checkpoints.load(full)
    jax.tree.map(
        np.testing.assert_array_equal,
        plain.params,
        nnx.from_flat_state(nnx.to_flat_state(whole.params[config.model.full_part])),
    )
    exported = checkpoints.load(out).params
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), whole.params)
    mine, theirs = dict(nnx.to_flat_state(exported)), dict(nnx.to_flat_state(rounded))
    for path in mine:
        if path[0] != config.model.full_part:
            np.testing.assert_array_equal(mine[path][...], theirs[path][...])
    assert (out / "spiece.model").is_file()
    jax.tree.map(np.testing.assert_array_equal, exported[config.model.full_part], plain.params)
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "start"] == [0, 4]
    losses = [event["loss"] for event in events if event["event"] == "evaluation"]
    assert losses[1] < losses[0]


@pytest.mark.full
def test_a_drafter_starts_from_another_models_decoder(toy, tmp_path):
    """What is of the same name: all but the projections, which the other has not."""
    base, full = toy
    shape = dataclasses.replace(DRAFTER, num_encoder_layers=1)
    checkpoints.save(tmp_path / "drafter", random_checkpoint(shape), "native")
    config = dataclasses.replace(
        base,
        model=FROZEN["reads states"],
        init=str(full),
        tokenizer=None,
        exits=ExitTraining(drafter=str(tmp_path / "drafter")),
    )
    params = dict(nnx.to_flat_state(first_parameters(config, model_of(config.model), make_mesh())))
    other = dict(nnx.to_flat_state(random_checkpoint(shape).params))
    fresh = dict(nnx.to_flat_state(model_of(config.model).around(checkpoints.load(full).params, config.seed)))
    assert params.keys() == fresh.keys()
    for path, value in params.items():
        expected = other.get(path[1:]) if path[0] == "drafter" else None
        np.testing.assert_array_equal(value[...], fresh[path][...] if expected is None else expected[...])
        assert (path[0] == "drafter") == (expected is not None)
    wide = dataclasses.replace(config, model=SharedEncoderConfig(T5, dataclasses.replace(DRAFTER, d_ff=8)))
    with pytest.raises(ValueError, match="a different shape from the requested one: d_ff is 64, not 8"):
        first_parameters(wide, model_of(wide.model), make_mesh())


def test_a_drafter_starts_from_a_slice_of_its_verifier_otherwise(toy):
    base, full = toy
    config = dataclasses.replace(base, model=FROZEN["reads states"], init=str(full), tokenizer=None)
    params = dict(nnx.to_flat_state(first_parameters(config, model_of(config.model), make_mesh())))
    model = model_of(config.model)
    fresh = model.around(checkpoints.load(full).params, config.seed)
    for path, value in nnx.to_flat_state(with_slice(model, fresh)):
        np.testing.assert_array_equal(params[path][...], value[...])
    read = np.asarray(params["states", "kernel"][...])
    assert read.any() and not np.any(dict(nnx.to_flat_state(fresh))["states", "kernel"][...])


@pytest.mark.parametrize(
    "changes,field,value",
    [
        ({"init": None}, "init", None),
        ({"model": ExitsConfig(T5, (1,))}, "head", "shared"),
        ({"export_dir": "out"}, "export_dir", "out"),
        ({"exits": ExitTraining(layer_dropout=1.0)}, "layer_dropout", 1.0),
        ({"exits": ExitTraining(drafter="gone")}, "drafter", "gone"),
        ({"exits": ExitTraining(exit_weight=-1.0)}, "exit_weight", -1.0),
        ({"exits": ExitTraining(curriculum="none")}, "curriculum", "none"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_advance(changes, field, value, toy, tmp_path):
    base, full = toy
    usual = {"output_dir": str(tmp_path / "run"), "model": FROZEN["adapters"], "init": str(full)}
    with pytest.raises(FieldError) as error:
        check(dataclasses.replace(base, **usual | changes))
    assert (error.value.field, error.value.value) == (field, value)
    with pytest.raises(ValueError, match=r"layers is .3,., not the exits' numbers"):  # of the model's shape
        check(dataclasses.replace(base, **usual | {"model": ExitsConfig(T5, (3,), "norm")}))
