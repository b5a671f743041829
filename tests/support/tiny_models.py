"""Tiny models with random weights, ours and transformers', and how tests feed them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shapes import LENGTH, SOURCE

from speccascade_jax import checkpoints
from speccascade_jax.checkpoints import Checkpoint, decoder, t5
from speccascade_jax.checkpoints.families import MODEL_FAMILIES
from speccascade_jax.core.loop import generate
from speccascade_jax.core.samplers import Autoregressive
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.models import model_of
from speccascade_jax.training.preparation import find_tokenizer


def random_checkpoint(config, seed=0):
    """A checkpoint in memory; its weights are normal numbers, so that every one of them matters."""
    model, rng = model_of(config), np.random.default_rng(seed)

    def drawn(path, x):
        if not jnp.issubdtype(x.get_value().dtype, jnp.integer):
            return rng.standard_normal(x.shape, np.float32)
        if path[-1] == "offsets":
            tokens = rng.choice(model.vocab_size, x.size, replace=False)
            return (np.sort(tokens) - np.arange(x.size)).astype(np.int32)
        return rng.permutation(x.size).astype(np.int32)  # an order of the tokens

    flat = nnx.to_flat_state(model.abstract_params())
    params = nnx.from_flat_state([(path, x.replace(drawn(path, x))) for path, x in flat])
    return Checkpoint(model, params, None, "memory")


def untrained(config, folder):
    """A folder with the checkpoint that the runs of a training config begin with, and its tokenizer."""
    model = model_of(config.model)
    start = Checkpoint(model, model.init(config.seed), find_tokenizer(config), "memory")
    checkpoints.save(folder, start, "native")
    return folder


def prefill(model, *inputs):
    """What model.prefill(*inputs) returns, from one program."""
    return jax.jit(model.prefill, static_argnums=3)(*inputs)


def prefilled(model, params, max_length=64):
    """The cache after SOURCE."""
    _, cache = prefill(model, params, SOURCE, LENGTH, max_length)
    return cache


def in_blocks(model, params, tokens, sizes, cache):
    """Logits of `tokens` fed in blocks of the given sizes, and the cache after them."""
    extend, logits, begin = jax.jit(model.extend), [], 0
    for size in sizes:
        part, cache = extend(params, tokens[:, begin : begin + size], cache)
        logits.append(part)
        begin += size
    return np.concatenate(logits, axis=1), cache


def randomized(theirs):
    """A model of transformers in evaluation mode, its weights replaced by normal random numbers."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25)
    return theirs.eval()


def their_seq2seq_logits(theirs, sources, fed):
    """Logits [B, T, V] of an encoder-decoder of transformers after each token of `fed`. Rows run one by one,
    so that no source is padded."""
    torch, rows = pytest.importorskip("torch"), []
    for source, length, tokens in zip(sources, LENGTH, fed, strict=True):
        with torch.no_grad():
            output = theirs(
                input_ids=torch.tensor(source[None, :length].astype(np.int64)),
                attention_mask=torch.ones((1, int(length)), dtype=torch.long),
                decoder_input_ids=torch.tensor(tokens[None].astype(np.int64)),
                decoder_attention_mask=torch.ones((1, len(tokens)), dtype=torch.long),
            )
        rows.append(output.logits[0].numpy())
    return np.stack(rows)


PROMPTS = np.random.default_rng(2).integers(2, 97, (100, 20)).astype(np.int32)
PROMPT_LENGTHS = np.random.default_rng(3).integers(1, 21, 100).astype(np.int32)


def greedy(model, params, count=12):
    """The tokens [100, count] written after each of PROMPTS, -1 after a text's end."""
    keys = jax.random.split(jax.random.key(0), len(PROMPTS))
    return np.asarray(
        generate(
            Autoregressive(model),
            params,
            keys,
            PROMPTS,
            PROMPT_LENGTHS,
            SamplingOptions(0.0),
            jnp.zeros(0),
            max_new_tokens=count,
            eos_id=model.config.eos_id,
        ).tokens
    )


def their_texts(theirs, count=12):
    """What transformers' generate() writes for each of PROMPTS, as greedy() has it; those of one length at
    once, so that none is padded."""
    torch, tokens = pytest.importorskip("torch"), np.full((len(PROMPTS), count), -1)
    for length in np.unique(PROMPT_LENGTHS):
        rows = np.flatnonzero(length == PROMPT_LENGTHS)
        prompts = torch.tensor(PROMPTS[rows, :length].astype(np.int64))
        with torch.no_grad():
            texts = theirs.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=1,
                pad_token_id=0,
            ).numpy()
        texts = texts[:, 1 if theirs.config.is_encoder_decoder else length :]
        ended = np.cumsum(texts == 1, axis=1) - (texts == 1) > 0
        tokens[rows, : texts.shape[1]] = np.where(ended, -1, texts)
    return tokens


def transformers_t5(config, seed=0):
    """transformers' T5 with random weights: T5 1.1 with a head of its own, or T5 1.0."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    described = {theirs: getattr(config, ours) for ours, theirs in t5.CONFIG_KEYS.items()}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **described,
            feed_forward_proj="gated-gelu" if config.gated else "relu",
            tie_word_embeddings=config.tied_embeddings,
            decoder_start_token_id=config.pad_id,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():  # the defaults are too small or constant to test scales
            parameter.copy_(
                torch.randn_like(parameter) * (0.12 if parameter.ndim > 1 else 0.1)
                + (1.0 if parameter.ndim == 1 else 0.0)
            )
        model.shared.weight.copy_(torch.randn_like(model.shared.weight))
        if not config.tied_embeddings:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
    return model.eval()


def transformers_gemma4(config, seed=0):
    """transformers' Gemma 4 or assistant of that shape, with random weights, also of what is no parameter."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    described = MODEL_FAMILIES[config.family].describe(config)
    kind = getattr(transformers, described.pop("architectures")[0])
    model = kind(kind.config_class(**described, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (parameter.ndim == 1) * parameter)
        for layer in model.model.layers:
            layer.layer_scalar.copy_(0.5 + torch.rand(1))
        if getattr(model, "masked_embedding", None) is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
    return model.eval()


def transformers_decoder(config, seed=0):
    """transformers' model of that shape, with random weights that reach the soft-caps."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    described = decoder.describe(config)
    kind = getattr(transformers, described.pop("architectures")[0])
    model = kind(kind.config_class(**described, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (parameter.ndim == 1) * parameter)
    return model.eval()
