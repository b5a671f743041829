"""Training EAGLE-3 heads: what is forced is what is drafted, and drafts get better next to one verifier."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import EAGLE_VERIFIER, LENGTH, SOURCE, TINY_EAGLE
from tiny_models import prefill, random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.config import ExitTraining, Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.loop import generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import EaglePairConfig, model_of
from speccascade_jax.parallel import make_mesh
from speccascade_jax.training.checks import check
from speccascade_jax.training.data import Batch
from speccascade_jax.training.exits import member_loss, split, weights
from speccascade_jax.training.loop import train
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.steps import make_steps

AHEAD = 3
PAIR = EaglePairConfig(EAGLE_VERIFIER, TINY_EAGLE)


def run_of(model=PAIR, **changes):
    usual = {"steps": 100, "optimizer": "adamw", "learning_rate": 0.01, "dtype": "float32"}
    exits = ExitTraining(ahead=AHEAD)
    return TrainConfig("", "", model, Task("", "", ""), exits=exits, distillation=1.0, **usual | changes)


@pytest.fixture(scope="module")
def network():
    """A pair whose head is fresh and whose verifier is sure of itself."""
    model = model_of(PAIR)
    full = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, model.full.init(0))
    params = dict(nnx.to_flat_state(model.around(full, 1)))
    offsets = random_checkpoint(PAIR).params["drafter"]["offsets"][...]
    params["drafter", "offsets"] = params["drafter", "offsets"].replace(jnp.asarray(offsets))
    return model, nnx.from_flat_state(params)


def batch_of(model, params, seed, rows=16):
    """Texts that the verifier writes."""
    source = np.random.default_rng(seed).integers(2, 97, (rows, 6)).astype(np.int32)
    length = np.random.default_rng(seed).integers(1, 7, rows).astype(np.int32)
    output = generate(
        Autoregressive(model.full),
        params["verifier"],
        jax.random.split(jax.random.key(seed), rows),
        source,
        length,
        SamplingOptions(0.7),
        jnp.zeros(0),
        max_new_tokens=12,
        eos_id=-1,
    )
    return Batch(source, length, np.asarray(output.tokens), np.full(rows, 12, np.int32))


@pytest.mark.full
def test_forced_logits_equal_drafted_ones(network):
    """Logits of the n-th token of a draft, wherever it began; none for tokens that it cannot draft."""
    model, params = network
    target = np.random.default_rng(1).integers(2, 97, (3, 7)).astype(np.int32)
    *member_logits, full = jax.jit(partial(model.forced_members, ahead=AHEAD))(params, SOURCE, LENGTH, target)
    draft, read = (jax.jit(partial(member.extend, params)) for member in model.members)
    _, cache = prefill(model, params, SOURCE, LENGTH, 48)
    begin = np.asarray(cache.length)
    tokens = np.concatenate([SOURCE[np.arange(3), LENGTH - 1][:, None], target[:, :-1]], axis=1)
    for at in range(7):
        logits, ahead = draft(tokens[:, at : at + AHEAD], cache)
        for number in range(min(AHEAD, 7 - at)):
            np.testing.assert_allclose(member_logits[number][:, at + number], logits[:, number], atol=1e-4)
            if at == 0:  # a draft that began with the first of them
                for more in range(number, AHEAD):
                    np.testing.assert_allclose(member_logits[more][:, number], logits[:, number], atol=1e-4)
        expected, cache = read(tokens[:, at : at + 1], model.roll_back(ahead, begin + at))
        can = np.asarray(logits[0, 0]) > -1e8
        np.testing.assert_allclose(full[:, at, can], expected[:, 0, can], atol=1e-4)
        assert can.sum() == 50 and (full[:, at, ~can] < -1e8).all()


@pytest.mark.full
def test_the_loss(network):
    """The mean of the divergences over a draft's places, each weighted 0.8 times the one before."""
    model, params = network
    batch = batch_of(model, params, 0)
    *small, full = jax.jit(partial(model.forced_members, ahead=AHEAD))(params, *batch[:3])
    target = np.asarray(jax.nn.log_softmax(full), np.float64)
    shares = 0.8 ** np.arange(AHEAD)
    shares /= shares.sum()
    np.testing.assert_allclose(weights(run_of(), None), [*shares, 0], rtol=1e-6)
    for divergence in ("kl", "lk"):
        expected = 0.0
        for share, logits in zip(shares, small, strict=True):
            drafter = np.asarray(jax.nn.log_softmax(logits), np.float64)
            far = (np.exp(target) * (target - drafter)).sum(axis=-1)
            if divergence == "lk":
                far = -np.log(np.minimum(np.exp(target), np.exp(drafter)).sum(axis=-1))
            expected += share * far.sum()
        loss, count = member_loss(model, run_of(divergence=divergence), params, batch)
        assert count == 16 * 12
        np.testing.assert_allclose(loss, expected, rtol=1e-4)


def tokens_a_call(model, params):
    drafter, verifier = model.members
    source = np.random.default_rng(99).integers(2, 97, (64, 6)).astype(np.int32)
    result = generate(
        Speculative(Autoregressive(drafter), verifier, METHODS["speculative"], AHEAD),
        params,
        jax.random.split(jax.random.key(0), 64),
        source,
        np.full(64, 6),
        SamplingOptions(0.7),
        jnp.zeros(1),
        max_new_tokens=16,
        eos_id=-1,
    )
    counts = result.counts[1]
    return float(jnp.sum(counts.emitted) / jnp.sum(counts.rounds))


@pytest.mark.full
@pytest.mark.parametrize("divergence", ["kl", "lk"])
def test_drafts_get_better(divergence, network):
    """Tokens a call rise, the verifier and the table of tokens stay as they are, bit for bit."""
    model, params = network
    config = run_of(divergence=divergence)
    optimizer = make_optimizer(config)
    steps = make_steps(model, config, optimizer, make_mesh())
    new, state = jax.tree.map(jnp.copy, params), None
    state = optimizer.init(split(config, new)[0])
    batches = [batch_of(model, params, seed) for seed in range(8)]
    for number in range(config.steps):
        grads, _, count = steps.gradients(new, batches[number % 8], jnp.uint32(number), None)
        new, state, _ = steps.update(new, state, grads, count)
    jax.tree.map(np.testing.assert_array_equal, new["verifier"], params["verifier"])
    np.testing.assert_array_equal(new["drafter"]["offsets"][...], params["drafter"]["offsets"][...])
    before, after = tokens_a_call(model, params), tokens_a_call(model, new)
    assert after > 1.08 * before, (before, after)


@pytest.fixture(scope="module")
def toy(number_words, tmp_path_factory):
    """The config of a head for a verifier in a folder, and that folder."""
    folder = tmp_path_factory.mktemp("head")
    verifier = dataclasses.replace(EAGLE_VERIFIER, vocab_size=300)
    config = dataclasses.replace(number_words, task=dataclasses.replace(number_words.task, suffix=" ="))
    base = dataclasses.replace(
        config,
        model=verifier,
        output_dir=str(folder / "verifier"),
        tokenizer=str(folder / "tokenizer.model"),
        steps=2,
        validation_examples=0,
        export_dir=str(folder / "full"),
    )
    train(base)
    head = dataclasses.replace(TINY_EAGLE, vocab_size=300, draft_vocab_size=20)
    return dataclasses.replace(
        base,
        model=EaglePairConfig(verifier, head),
        init=str(folder / "full"),
        tokenizer=None,
        distillation=1.0,
        steps=3,
        exits=ExitTraining(ahead=2),
        output_dir=str(folder / "run"),
        export_dir=str(folder / "head"),
    ), folder


@pytest.mark.full
def test_a_run_is_exported_next_to_its_verifier(toy):
    """From a config: its head can draft the most frequent tokens, and its folder has no copy of the
    verifier."""
    config, folder = toy
    train(config)
    drafter, verifier = checkpoints.load_all([f"{folder}/head@drafter", f"{folder}/head"])
    assert drafter.model.member_of.config == config.model and drafter.params is verifier.params
    full = checkpoints.load(folder / "full").params
    jax.tree.map(np.testing.assert_array_equal, full, drafter.params["verifier"])
    assert json.loads((folder / "head" / "model.json").read_text())["full_at"] == "full"
    offsets = np.asarray(drafter.params["drafter"]["offsets"][...])
    from speccascade_jax.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer(drafter.tokenizer_file())
    frequent = set(np.arange(20) + offsets)
    assert tokenizer.eos_id in frequent
    assert set(tokenizer.encode_batch(["eins zwei drei"])[0]) <= frequent


@pytest.mark.parametrize(
    "changes,field,value",
    [
        ({"exits": ExitTraining(frozen=False)}, "frozen", False),
        ({"exits": ExitTraining(ahead=0)}, "ahead", 0),
        ({"distillation": 0.5}, "distillation", 0.5),
        ({"init": None}, "init", None),
    ],
)
def test_what_cannot_be_trained_is_refused_in_advance(changes, field, value, number_words, tmp_path):
    usual = {"model": PAIR, "init": str(tmp_path), "distillation": 1.0, "output_dir": str(tmp_path / "run")}
    with pytest.raises(FieldError) as error:
        check(dataclasses.replace(number_words, **usual | changes))
    assert (error.value.field, error.value.value) == (field, value)
