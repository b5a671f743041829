"""Prepares a training run: its tokenizer, parameters and teacher."""

import dataclasses
import itertools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import native, t5x, tokenizer_files
from speccascade_jax.checkpoints.arrays import Sharding
from speccascade_jax.checkpoints.families import MODEL_FAMILIES
from speccascade_jax.config import TrainConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.models import (
    Config,
    EaglePairConfig,
    Model,
    NetworkModel,
    SharedEncoderConfig,
    full_of,
    model_of,
)
from speccascade_jax.models.members import beneath
from speccascade_jax.models.shared_encoder import SharedEncoderModel
from speccascade_jax.parallel import parameter_sharding, tree_sharding
from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer
from speccascade_jax.training.data import texts
from speccascade_jax.training.distillation import distilled
from speccascade_jax.training.slices import with_slice


def find_tokenizer(config: TrainConfig) -> Path:
    """The file of the config's tokenizer. If none is named, it is that of config.init; a gs:// file is
    downloaded; a missing file is trained on the task's training split."""
    run = Path(config.output_dir)
    if config.tokenizer is None:
        return checkpoints.tokenizer_file(str(config.init))
    remote = config.tokenizer.startswith("gs://")
    path = run / tokenizer_files.name_for(config.tokenizer) if remote else Path(config.tokenizer)
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")  # a kill leaves no partial file
    try:
        if remote:
            beside.write_bytes(t5x.read_file(config.tokenizer))
        else:
            for _ in texts(config.task, config.task.train):  # read once first: SentencePiece hides exceptions
                pass
            train_tokenizer(
                (
                    text
                    for source, target, _ in texts(config.task, config.task.train)
                    for text in (source, target)
                ),
                beside,
                config.tokenizer_size,
                bos=MODEL_FAMILIES[full_of(config.model).family].bos,
                pieces=config.tokenizer_pieces,
            )
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def prepare_tokenizer(config: TrainConfig) -> Tokenizer:
    """Loads the config's tokenizer, and writes it and the model's config to where load() looks for them."""
    run = Path(config.output_dir)
    if any((run / "latest").glob("[0-9]*")):  # a resumed run keeps its model
        checkpoints.check_shape(str(run), native.read_config(run), config.model)
    path = find_tokenizer(config)
    tokenizer = Tokenizer(path)
    if tokenizer.size > config.model.vocab_size:
        raise FieldError(
            "model.vocab_size",
            config.model.vocab_size,
            "set it to at least that.",
            f"model.vocab_size is {config.model.vocab_size}, and the tokenizer {path} has "
            f"{tokenizer.size} pieces",
        )
    native.describe(run, config.model, path)
    return tokenizer


def first_parameters(config: TrainConfig, model: Model, mesh: Mesh) -> nnx.State:
    """The parameters of config.init, or newly initialised ones, placed on the mesh. If config.init has only a
    network's full model, the network's other parameters are newly initialised; a drafter that reads its
    verifier's encoder starts from config.exits.drafter or as a slice."""
    at = tree_sharding(mesh, model.abstract_params(), config.split_parameters)
    if config.init is None:
        return jax.jit(model.init, static_argnums=0, out_shardings=at)(config.seed)
    if isinstance(model, NetworkModel) and checkpoints.config_of(config.init).family != config.model.family:
        full = load_placed(config.init, config, mesh, full_of(config.model)).params
        params = with_decoder(model.around(full, config.seed), config, mesh)
        params = jax.device_put(with_frequent_tokens(params, config), at)
        if isinstance(model, SharedEncoderModel) and config.exits.drafter is None:
            return with_slice(model, params, at)
        return params
    held = config.lora_base if config.lora_rank else "float32"
    return load_placed(config.init, config, mesh, config.model, held).params


def with_decoder(params: nnx.State, config: TrainConfig, mesh: Mesh) -> nnx.State:
    """A network's parameters with its drafter replaced by the decoder of config.exits.drafter, if that is
    set."""
    path = config.exits.drafter
    if path is None or not isinstance(config.model, SharedEncoderConfig):
        return params
    network, drafter = checkpoints.config_of(path), config.model.drafter
    if isinstance(network, type(drafter)):
        drafter = dataclasses.replace(drafter, num_encoder_layers=network.num_encoder_layers)
    placed, flat = load_placed(path, config, mesh, drafter).params, dict(nnx.to_flat_state(params))
    flat |= {place: value for place, value in beneath("drafter", placed).items() if place in flat}
    return nnx.from_flat_state(flat)


def with_frequent_tokens(params: nnx.State, config: TrainConfig) -> nnx.State:
    """A network's parameters in which an EAGLE-3 head with a reduced vocabulary can draft the most frequent
    tokens of the training targets and the end-of-text tokens."""
    place, model = ("drafter", "offsets"), config.model
    flat = dict(nnx.to_flat_state(params))
    if not isinstance(model, EaglePairConfig) or place not in flat:
        return params
    task, counts = config.task, np.zeros(model.vocab_size)
    if config.teacher_outputs is not None:
        task = distilled(task, Path(config.teacher_outputs), config.teacher_singles)
    tokenizer, examples = Tokenizer(find_tokenizer(config)), texts(task, task.train)
    while chunk := [target for _, target, _ in itertools.islice(examples, 10_000)]:
        for row in tokenizer.encode_batch(chunk):
            counts += np.bincount(row, minlength=counts.size)
    counts[[model.eos_id, *getattr(model.full, "more_eos", ())]] = np.inf
    tokens = np.sort(np.argsort(-counts, kind="stable")[: model.drafter.draft_vocab_size])
    flat[place] = flat[place].replace(jnp.asarray(tokens - np.arange(tokens.size), jnp.int32))
    return nnx.from_flat_state(flat)


def placement(config: TrainConfig, mesh: Mesh) -> Sharding:
    """The sharding of each parameter on the mesh."""
    return lambda _, size: parameter_sharding(mesh, size, config.split_parameters)


def load_placed(
    path: str, config: TrainConfig, mesh: Mesh, shape: Config | None = None, dtype: str = "float32"
) -> checkpoints.Checkpoint:
    """Loads a checkpoint in `dtype`, with each array placed on the mesh."""
    return checkpoints.load(path, dtype, placement(config, mesh), config=shape)


def load_teacher(
    path: str, config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[Model, nnx.State, Tokenizer]:
    """The teacher in the training's dtype, and its tokenizer. Raises ValueError if its vocabulary differs and
    the run learns its distributions, not only its texts."""
    checkpoint = load_placed(path, config, mesh)
    teacher_tokenizer = Tokenizer(checkpoint.tokenizer_file())
    scores = config.distillation or config.on_policy
    if scores and teacher_tokenizer.pieces() != tokenizer.pieces():
        raise FieldError(
            "teacher",
            path,
            "train both with the same tokenizer, or learn from its texts alone: "
            "with teacher_outputs, and with distillation and on_policy 0.",
            f"the teacher {path} has another vocabulary than {config.name}",
        )
    if scores and checkpoint.model.vocab_size != config.model.vocab_size:
        raise FieldError(
            "model.vocab_size",
            config.model.vocab_size,
            "set it to the teacher's.",
            f"model.vocab_size of {config.name} is {config.model.vocab_size}, and the teacher "
            f"{path} has {checkpoint.model.vocab_size} logits",
        )
    return model_of(checkpoint.model.config, dtype=config.dtype), checkpoint.params, teacher_tokenizer
