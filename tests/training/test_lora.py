"""Adapters: they start without effect, train alone, are merged into saves, and are restored."""

import dataclasses
import itertools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from processes import devices, run
from shapes import DECODERS, LENGTH, SOURCE, TARGET, TINY_T5, TINY_T5GEMMA, TINY_T5GEMMA2

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint, native
from speccascade_jax.config import Task, TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference.text import Cascade
from speccascade_jax.models import ExitsConfig, model_of
from speccascade_jax.models.adapters import AdaptedKernel
from speccascade_jax.parallel import make_mesh
from speccascade_jax.tokenizers.tokenizer import train_tokenizer
from speccascade_jax.training import lora
from speccascade_jax.training.checks import check
from speccascade_jax.training.data import Batch, TrainingBatches
from speccascade_jax.training.exits import split
from speccascade_jax.training.loop import train
from speccascade_jax.training.optimizer import make_optimizer
from speccascade_jax.training.steps import make_steps

FAMILIES = {
    "qwen3": DECODERS["qwen3"],
    "t5": dataclasses.replace(TINY_T5, dropout_rate=0.0),
    "t5gemma": TINY_T5GEMMA,
    "t5gemma2": TINY_T5GEMMA2,
}  # one of each kind of network


def saved(folder):
    """What a run goes on from."""
    import orbax.checkpoint as ocp

    items = lora.ADAPTERS, "optimizer", "params"
    return native.manager(folder / "latest").restore(
        12, args=ocp.args.Composite(**{item: ocp.args.StandardRestore() for item in items})
    )


def trained_like(model, **fields):
    return TrainConfig(
        name="", output_dir="", model=model, task=Task("", "", ""), dtype="float32", lora_rank=3, **fields
    )


def flat(params):
    return {path: np.asarray(value) for path, value in nnx.to_flat_state(jax.tree.map(lambda x: x, params))}


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_the_laws_of_adapters(family):
    """Fresh ones leave the logits as they are, but for what another program rounds differently; others do
    what their merged products do; a step changes them only, and only they have a gradient and an
    optimizer's state."""
    config = trained_like(FAMILIES[family], optimizer="adamw", learning_rate=0.01, z_loss=0.0)
    model, mesh = model_of(config.model), make_mesh()
    base = model.init(0)
    forced = jax.jit(lambda params: model.forced(lora.adapted(config, params), SOURCE, LENGTH, TARGET))
    begun = lora.with_adapters(base, lora.fresh(config, base))
    alone = jax.jit(model.forced)(base, SOURCE, LENGTH, TARGET)
    np.testing.assert_allclose(forced(begun), alone, rtol=0, atol=1e-5)
    with jax.disable_jit():  # compiled, two programs round differently
        np.testing.assert_array_equal(forced(begun), model.forced(base, SOURCE, LENGTH, TARGET))

    adapters = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.shape[0]), x.shape) / 8, lora.split_adapters(begun)[0]
    )
    params = lora.with_adapters(base, adapters)
    whole, kernels = lora.merging(config, mesh)(params), set(lora.chosen(config))
    assert len(kernels) > 10 and not any("head" in path for path in kernels)
    given, low = flat(base), flat(adapters)
    for path, value in flat(whole).items():
        if path not in kernels:
            np.testing.assert_array_equal(value, given[path])
            continue
        a, b = (low[lora.ADAPTERS, *path[:-1], name].astype(np.float64) for name in ("a", "b"))
        assert a.shape[1] == len(b) == 3
        np.testing.assert_allclose(value, given[path] + 16 / 3 * a @ b, rtol=1e-5, atol=1e-6)
    merged_logits = jax.jit(model.forced)(whole, SOURCE, LENGTH, TARGET)
    np.testing.assert_allclose(forced(params), merged_logits, rtol=2e-4, atol=2e-4)
    assert np.abs(merged_logits - alone).max() > 0.1  # what is compared is no zero

    optimizer = make_optimizer(config)
    steps = make_steps(model, config, optimizer, mesh)
    state = optimizer.init(split(config, begun)[0])
    batch = Batch(SOURCE, LENGTH, TARGET, np.full(3, 30, np.int32))
    before = flat(begun)  # an update gives its arguments up
    grads, _, count = steps.gradients(begun, batch, jnp.uint32(0), None)
    assert set(flat(grads)) == set(low)
    sizes = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim)
    assert sizes == sorted(2 * [x.shape for x in low.values()])
    after = flat(steps.update(begun, state, grads, count)[0])
    for path, value in before.items():
        if path in low:
            assert (value != after[path]).any() or path[-1] == "a"  # b is 0: a has no gradient yet
        else:
            np.testing.assert_array_equal(value, after[path])


def test_chosen_kernels_only():
    config = dataclasses.replace(trained_like(DECODERS["llama"]), lora_kernels=("query", "head"))
    assert {path[-2] for path in lora.chosen(config)} == {"query", "head"} and len(lora.chosen(config)) == 3
    with pytest.raises(FieldError) as error:
        lora.chosen(dataclasses.replace(config, lora_kernels=("q_proj",)))
    assert (error.value.field, error.value.value) == ("lora_kernels", ("q_proj",))


@pytest.mark.parametrize(
    "change,field,value",
    [
        ({"init": None}, "lora_rank", 3),
        ({"lora_rank": 11}, "lora_rank", 11),
        ({"lora_kernels": ("cross",)}, "lora_kernels", ("cross",)),
        ({"lora_alpha": 0.0}, "lora_alpha", 0.0),
        ({"lora_base": "int8"}, "lora_base", "int8"),
        ({"lora_rank": -1}, "lora_rank", -1),
        ({"model": ExitsConfig(DECODERS["llama"], (1,))}, "lora_rank", 3),
    ],
)
def test_impossible_adapters_are_one_sentence(change, field, value, tmp_path):
    usual = {"init": str(tmp_path), "tokenizer": "x.model", "export_dir": None}
    with pytest.raises(FieldError) as error:
        check(dataclasses.replace(trained_like(DECODERS["llama"]), **usual | change))
    assert (error.value.field, error.value.value) == (field, value)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A TrainConfig: a small Qwen 3 of its own vocabulary in a Hugging Face folder, and what to adapt it
    to."""
    folder = tmp_path_factory.mktemp("lora")
    words = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fuenf", "six": "sechs"}
    pairs = [(a, b) for a in words for b in words]
    lines = [json.dumps({"source": f"{a} {b}", "target": f"{words[a]} {words[b]}"}) for a, b in pairs]
    (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines * 8))
    (folder / "validation.jsonl").write_text("".join(line + "\n" for line in lines))
    train_tokenizer((word for pair in words.items() for word in pair * 50), folder / "spiece.model", 290)
    shape = dataclasses.replace(
        DECODERS["qwen3"], vocab_size=300, d_model=32, d_kv=8, d_ff=48, rope_type="default", rope_factor=1.0
    )
    model = model_of(shape)
    checkpoints.save(
        folder / "base", Checkpoint(model, model.init(0), folder / "spiece.model", "memory"), "huggingface"
    )
    task = Task(
        train=str(folder / "train.jsonl"),
        validation=str(folder / "validation.jsonl"),
        test="",
        suffix=" =",
        max_source_length=12,
        max_target_length=12,
    )
    return TrainConfig(
        name="lora",
        output_dir=str(folder / "run"),
        model=checkpoints.config_of(str(folder / "base")),
        task=task,
        init=str(folder / "base"),
        steps=12,
        batch_tokens=192,
        optimizer="adamw",
        learning_rate=0.02,
        dtype="float32",
        save_every=4,
        eval_every=6,
        log_every=1,
        validation_examples=0,
        export_dir=str(folder / "export"),
        lora_rank=4,
    )


@pytest.mark.full
def test_a_killed_run_ends_as_an_uninterrupted_one_and_decodes(toy, tmp_path, monkeypatch):
    """What is saved, the latest and the best, is the merged model; what it began with is as it was."""
    whole = train(toy)
    from_step = TrainingBatches.from_step

    def dying(self, step):
        yield from itertools.islice(from_step(self, step), 6)
        raise KeyboardInterrupt

    again = dataclasses.replace(toy, output_dir=str(tmp_path / "run"), export_dir=None)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "from_step", dying)
        with pytest.raises(KeyboardInterrupt):
            train(again)
    for field, value in (("lora_alpha", 4.0), ("lora_rank", 0), ("init", str(whole))):
        with pytest.raises(FieldError) as error:
            train(dataclasses.replace(again, **{field: value}))
        assert (error.value.field, error.value.value) == (field, value)
    resumed = train(again)
    first, second = map(saved, (whole, resumed))
    for item in (lora.ADAPTERS, "optimizer", "params"):
        jax.tree.map(np.testing.assert_array_equal, first[item], second[item])
    base, best, export = (flat(checkpoints.load(path).params) for path in (toy.init, whole, toy.export_dir))
    kernels = set(lora.chosen(toy))
    for path, value in base.items():
        assert (value == best[path]).all() == (path not in kernels), path
        np.testing.assert_array_equal(export[path], best[path].astype(jnp.bfloat16).astype(np.float32))
    losses = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    evaluation_losses = [line["loss"] for line in losses if line["event"] == "evaluation"]
    assert evaluation_losses[-1] < evaluation_losses[0]
    started = next(line for line in losses if line["event"] == "start")
    assert started["trained"] < started["parameters"] / 3
    cascade = Cascade.load(toy.init, whole, max_source_length=12, max_new_tokens=4)
    assert len(list(cascade.generate(["one two ="], batch_size=1))) == 1


FSDP = """
import pickle, jax
from speccascade_jax.training import loop
config = pickle.load(open({path!r}, "rb"))
shares = []
update = loop.one_step
def one_step(steps, params, state, *rest):
    found = update(steps, params, state, *rest)
    leaves = [x for x in jax.tree.leaves(found[:2]) if x.ndim > 1]
    here = sum(s.data.nbytes for x in leaves for s in x.addressable_shards if s.device.id == 0)
    shares.append(here / sum(x.nbytes for x in leaves))
    return found
loop.one_step = one_step
loop.train(config)
print(max(shares))
"""


@pytest.mark.full
def test_eight_devices_split_adapters_and_base(toy, tmp_path):
    """FSDP, the base in bfloat16: each holds about an eighth of both, and what is trained is what one device
    trains."""
    config = dataclasses.replace(
        toy, export_dir=None, steps=3, lora_base="bfloat16", split_parameters=True, lora_rank=8
    )
    ends = []
    for count in (1, 8):
        run_config = dataclasses.replace(config, output_dir=str(tmp_path / str(count)))
        (tmp_path / "config").write_bytes(pickle.dumps(run_config))
        share = float(run(FSDP.format(path=str(tmp_path / "config")), XLA_FLAGS=devices(count)))
        assert share == 1 if count == 1 else share < 0.2
        ends.append(checkpoints.load(run_config.output_dir).params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *ends)


def test_an_adapted_kernel_is_one_leaf_to_the_model():
    """A planted bug, a missing scale, is detected."""
    from speccascade_jax.models.layers import project

    rng = np.random.default_rng(0)
    x, base, a, b = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 5, 8), (8, 6), (8, 2), (2, 6))
    )
    expected = x @ (base + 3.0 * a @ b)
    np.testing.assert_allclose(
        project(x, AdaptedKernel(base, a, b, 3.0), jnp.float32), expected, rtol=1e-4, atol=1e-4
    )
    off = project(x, AdaptedKernel(base, a, b, 1.0), jnp.float32)
    assert np.abs(off - expected).max() > 1
