"""A model's early exits: each is a smaller model, none has a copy of anything."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from member_laws import check_full, check_interleaved, check_members, check_rows, products, reference, text_of
from shapes import LENGTH, SOURCE, TARGET, TINY_GEMMA, TINY_T5, TINY_T5_1_0
from tiny_models import in_blocks, prefilled, random_checkpoint

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import ExitsConfig, model_of
from speccascade_jax.models.layers import Linear
from speccascade_jax.models.quantization import PackedKernel

T5 = dataclasses.replace(TINY_T5, num_encoder_layers=1, num_decoder_layers=4)
NETWORKS = {
    "t5": ExitsConfig(T5, layers=(1, 3)),
    "t5, a table a layer": ExitsConfig(dataclasses.replace(T5, shared_position_bias=False), (2,), "own"),
    "t5 1.0": ExitsConfig(dataclasses.replace(TINY_T5_1_0, num_decoder_layers=3), (1,), "own"),
    "gemma": ExitsConfig(TINY_GEMMA, layers=(1, 2), head="adapter", rank=5),
}


@pytest.fixture(scope="module", params=NETWORKS.values(), ids=NETWORKS)
def network(request):
    """A network, and parameters of which every one matters."""
    model = model_of(request.param)
    flat, rng = dict(nnx.to_flat_state(model.init(0))), np.random.default_rng(0)
    for path, value in flat.items():
        if path[0] == "exits":
            flat[path] = value.replace(value[...] + 0.3 * rng.standard_normal(value.shape, np.float32))
        elif path[-1].endswith("_bias"):
            flat[path] = value.replace(10 * value[...])
    return model, nnx.from_flat_state(flat)


def up_to(number):
    return range(number + 1)


@pytest.mark.full
def test_every_member_obeys_the_laws(network):
    check_members(*network, up_to)


@pytest.mark.full
def test_members_may_read_in_any_order(network):
    check_interleaved(*network, up_to)


@pytest.mark.full
def test_rows_are_independent_and_can_be_replaced(network):
    check_rows(*network)


@pytest.mark.full
def test_the_full_member_is_the_plain_model_bit_for_bit(network):
    model, params = network
    check_full(model, params, "full", model.members[-1])


@pytest.mark.full(quick=["gemma", "t5 1.0"])
def test_an_exit_is_the_model_of_its_layers(network):
    """A plain model that has those layers and the exit's norm and head; an adapter is left out by zeros."""
    model, params = network
    stack, count, norm = (
        ("layers", "num_layers", "norm")
        if hasattr(model.config.full, "num_layers")
        else ("decoder", "num_decoder_layers", "decoder_norm")
    )
    text = text_of(model, 0)
    flat = {
        path: x.replace(0 * x[...]) if path[-2] == "widen" else x for path, x in nnx.to_flat_state(params)
    }
    logits = reference(model, nnx.from_flat_state(flat), text)
    for number, depth in enumerate(model.config.layers):
        small = {
            path[1:]: x
            for path, x in flat.items()
            if path[0] == "full" and not (path[1] == stack and path[2] >= depth)
        }
        tied, scale_path = model.config.full.tied_embeddings, ("exits", number, "norm", "scale")
        if scale_path in flat:
            small[norm, "scale"] = flat[scale_path]
        if model.config.head == "own":
            small["head", "kernel"] = flat["exits", number, "head", "kernel"]
        if (table := small.get(("decoder_bias",))) is not None and table.ndim == 3:
            small[("decoder_bias",)] = table.replace(table[:depth])
        shape = dataclasses.replace(model.config.full, **{count: depth})
        if tied and model.config.head == "own":  # T5 1.0 with a head is untied
            shape = dataclasses.replace(shape, tied_embeddings=False)
        target = np.pad(text[:, 1:], ((0, 0), (0, 1)))
        alone = jax.jit(model_of(shape).forced)(nnx.from_flat_state(small), SOURCE, LENGTH, target)
        np.testing.assert_allclose(logits[number], alone, atol=2e-5)


def test_an_adapter_matters():
    model = model_of(NETWORKS["gemma"])
    params = model.init(0)
    other = nnx.from_flat_state(
        {path: x.replace(x[...] + 0.1) if path[-2] == "widen" else x for path, x in nnx.to_flat_state(params)}
    )
    text = text_of(model, 0)
    a, b = reference(model, params, text), reference(model, other, text)
    assert np.abs(a[0] - b[0]).max() > 0.1
    np.testing.assert_array_equal(a[2], b[2])


@pytest.mark.full
@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_nothing_is_copied(config):
    """A network around a model has its arrays, and besides those what the exits have of their own."""
    model = model_of(config)
    full = model.full.init(0)
    params = model.around(full, 0)
    assert jax.tree.structure(params) == jax.tree.structure(model.abstract_params())
    mine = dict(nnx.to_flat_state(params))
    for path, value in nnx.to_flat_state(full):
        assert mine["full", *path].get_value() is value.get_value()
    width, vocabulary, exits = config.full.d_model, config.vocab_size, len(config.layers)
    exit_size = {
        "shared": 0,
        "norm": width,
        "own": width * (1 + vocabulary),
        "adapter": width * (1 + 2 * config.rank),
    }[config.head]
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (params, full)]
    assert sizes[0] - sizes[1] == exits * exit_size
    forced = jax.jit(model.forced_members)(params, SOURCE, LENGTH, TARGET)
    if config.head != "shared":  # it begins as the full model's norm and head, which the last layer has, too
        scale = mine["exits", 0, "norm", "scale"][...]
        np.testing.assert_array_equal(
            scale,
            model.full.init(0)["norm" if "num_layers" in dataclasses.asdict(config.full) else "decoder_norm"][
                "scale"
            ][...],
        )
    shared = model_of(dataclasses.replace(config, head="shared"))
    expected = jax.jit(shared.forced_members)(shared.around(full, 0), SOURCE, LENGTH, TARGET)
    np.testing.assert_allclose(forced[0], expected[0], atol=1e-5)


@pytest.mark.full(quick=["t5"])
def test_a_prompt_is_read_once(network):
    model, params = network
    once = products(model.full.prefill, params["full"], SOURCE, LENGTH)
    for member in (model, *model.members):
        assert products(member.prefill, params, SOURCE, LENGTH) == once > 10


@pytest.mark.full(quick=["t5"])
def test_a_member_runs_its_own_layers_only(network):
    model, params = network
    cache = prefilled(model, params)

    def size(member):
        return str(jax.make_jaxpr(member.extend)(params, TARGET[:, :1], cache)).count("dot_general")

    sizes = [size(member) for member in model.members]
    assert sizes == sorted(set(sizes))


# Checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("network") / "run"
    checkpoints.save(path, random_checkpoint(NETWORKS["t5"]), "native")
    return path


def test_members_are_loaded_by_name(folder):
    original = random_checkpoint(NETWORKS["t5"])
    for name, number in ((None, 2), ("4", 2), ("3", 1), ("1", 0)):
        path = str(folder) if name is None else f"{folder}@{name}"
        checkpoint = checkpoints.load(path)
        assert checkpoint.model == original.model.members[number]
        jax.tree.map(np.testing.assert_array_equal, original.params, checkpoint.params)
        assert checkpoints.config_of(path) == original.model.config
    first, second = checkpoints.load_all([f"{folder}@1", str(folder)])
    assert first.params is second.params
    assert (first.model, second.model) == (original.model.members[0], original.model.members[2])


@pytest.mark.parametrize("name", ["2", "5", "0", "-1", "x", "1 "])
def test_an_exit_there_is_none_of_is_one_sentence(name, folder, monkeypatch):
    monkeypatch.setattr(checkpoints.native, "read_params", None)  # said before anything large is read
    with pytest.raises(ValueError, match=f"has exits after 1 and 3 of its 4 layers, not after {name}: name"):
        checkpoints.load(f"{folder}@{name}")


@pytest.mark.parametrize("to", ["native", "huggingface", "t5x"])
def test_a_plain_checkpoint_has_no_exits(to, tmp_path):
    checkpoints.save(tmp_path / "plain", random_checkpoint(T5), to)
    with pytest.raises(ValueError, match="plain is a single model without a member '2'"):
        checkpoints.load(f"{tmp_path}/plain@2")


def test_a_folder_may_have_an_at_in_its_name(tmp_path):
    checkpoints.save(tmp_path / "run@4", random_checkpoint(NETWORKS["t5"]), "native")
    assert checkpoints.load(tmp_path / "run@4").model.number == 2
    assert checkpoints.load(f"{tmp_path}/run@4@1").model.number == 0


@pytest.mark.parametrize("to", ["huggingface", "t5x"])
def test_other_formats_hold_no_exits(to, tmp_path):
    with pytest.raises(FieldError) as refused:
        checkpoints.save(tmp_path / "out", random_checkpoint(NETWORKS["t5"]), to)
    assert (refused.value.field, refused.value.value) == ("to", to)
    assert "native" in refused.value.remedy


@pytest.mark.parametrize(
    "change,said",
    [
        ({"layers": [3, 1]}, "layers is"),
        ({"layers": [1, 4]}, "each from 1 to 3"),
        ({"layers": []}, "layers is"),
        ({"layers": [1, 1]}, "layers is"),
        ({"layers": 3}, "layers is 3"),
        ({"layers": [1.5]}, "layers is"),
        ({"head": "none"}, "head is 'none'"),
        ({"head": 3}, "head is 3"),
        ({"rank": 0}, "rank is 0"),
        ({"full": 3}, "full is 3, not the shape"),
        ({"depth": 3}, "exits has no field 'depth'"),
        ({"full": {"family": "exits"}}, "full is .*not the shape of one model"),
        ({"full": {"d_model": 0}}, "full: d_model is 0"),
        ({"full": {"wings": 2}}, "t5 has no field 'wings'"),
        ({"full": {"num_encoder_layers": 0}}, "full: num_encoder_layers is 0"),
        ({"full": {"family": "gpt2"}}, "full holds a 'gpt2' model"),
    ],
)
def test_damaged_shapes_are_named(change, said, tmp_path):
    shape = checkpoints.native.shape_of(NETWORKS["t5"])
    (tmp_path / "model.json").write_text(json.dumps(shape | change))
    with pytest.raises(ValueError, match=said):
        checkpoints.config_of(str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("dtype,within", [("bfloat16", 0.2), ("int8", 0.5)])
@pytest.mark.parametrize("name", ["t5", "gemma"])
def test_exits_decode_in_fewer_bits(name, dtype, within, tmp_path):
    model = model_of(NETWORKS[name])
    original = Checkpoint(model, model.init(0), None, "memory")
    checkpoints.save(tmp_path / "run", original, "native")
    text = text_of(model, 0)
    expected = reference(model, original.params, text)
    loaded = checkpoints.load(tmp_path / "run", jnp.dtype(dtype), packed=True)
    kernels = {path: x.get_value() for path, x in nnx.to_flat_state(loaded.params) if path[-1] == "kernel"}
    assert kernels and all(isinstance(x, PackedKernel) for x in kernels.values())
    network = loaded.model.member_of
    linears = [
        part
        for part in nnx.iter_graph(nnx.merge(network.graphdef(), loaded.params))
        if isinstance(part[1], Linear)
    ]
    assert linears and {str(part.dtype) for _, part in linears} == {dtype}
    for number, member in enumerate(network.members):
        logits, _ = in_blocks(member, loaded.params, text, [1, 23], prefilled(member, loaded.params))
        np.testing.assert_allclose(logits, expected[number], atol=within * np.abs(expected[number]).max())
        assert np.corrcoef(logits.ravel(), expected[number].ravel())[0, 1] > 0.99
