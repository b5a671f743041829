"""load(path) recognises a checkpoint's format by what lies in its folder."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from speccascade_jax.checkpoints import huggingface, native
from speccascade_jax.models.t5 import T5Model


class Checkpoint(NamedTuple):
    model: T5Model
    params: nnx.State
    tokenizer: Path  # the SentencePiece file


def from_hub(name: str) -> str:
    """The local copy of a Hugging Face model, fetched where it is not there yet.

    Raises ValueError where the optional huggingface_hub or the hub itself is out of reach.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(f"to fetch {name} from the hub: pip install 'speccascade_jax[hub]'.") from None
    try:
        return snapshot_download(name, allow_patterns=["*.safetensors*", "config.json", "spiece.model"])
    except Exception as error:  # the hub's client raises many kinds, from DNS to authorisation
        reason = str(error).split("\n")[0]
        raise ValueError(f"cannot fetch {name} from the Hugging Face hub ({reason}); give a local folder "
                         "instead.") from None


def load(path: str | Path, dtype: Any = jnp.float32) -> Checkpoint:
    """A run of scripts/finetune.py (Orbax) or a Hugging Face folder (safetensors), in `dtype`.

    hf://ORGANISATION/NAME is fetched from the hub. Raises ValueError saying what is missing or damaged.
    """
    folder = Path(from_hub(str(path).removeprefix("hf://")) if str(path).startswith("hf://") else path)
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint folder {folder}.")
    if (folder / "model.json").is_file():
        model, params = native.load(folder)
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    elif (folder / "config.json").is_file():
        if not list(folder.glob("*.safetensors")):
            raise ValueError(f"{folder} has no .safetensors file; pickled weights (.bin) are never read: "
                             "save them again with safe_serialization=True.")
        model, params = huggingface.load(folder, dtype)
    else:
        raise ValueError(f"{folder} is no checkpoint: neither a model.json (ours) nor a config.json "
                         "(Hugging Face) is in it.")
    tokenizer = folder / "spiece.model"
    if not tokenizer.is_file():
        raise ValueError(f"{folder} has no spiece.model: copy the model's SentencePiece file there.")
    compute = "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else "float32"
    return Checkpoint(T5Model(model.config, dtype=compute), params, tokenizer)
