"""Chat templates: a conversation as the text that the model continues."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints import is_remote, split_member
from speccascade_jax.serving.protocol import Refused

LARGEST = 2**20  # bytes of a template's file


class ChatTemplate:
    """A Jinja template in Hugging Face's form, and the special tokens that it may name."""

    def __init__(self, source: str, specials: dict[str, str]):
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self.template, self.specials = environment.from_string(source), specials

    @classmethod
    def find(cls, checkpoint: str) -> "ChatTemplate | None":
        """The template in a checkpoint's folder (chat_template.jinja, or in tokenizer_config.json), if any.

        Raises ValueError for one that cannot be read.
        """
        folder = Path(split_member(checkpoint)[0])
        if is_remote(checkpoint):
            return None
        config: dict[str, Any] = {}
        file, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            if file.is_file():
                config = json.loads(file.read_bytes()[:LARGEST])
            source = own.read_text()[:LARGEST] if own.is_file() else config.get("chat_template")
            if not isinstance(source, str):
                return None
            specials = {name: _text(config[name]) for name in ("bos_token", "eos_token") if config.get(name)}
            return cls(source, specials)
        except ImportError:
            raise ValueError("a chat template needs Jinja: pip install 'speccascade_jax[serve]'.") from None
        except Exception as error:  # Jinja's errors, JSON's, the file system's
            raise ValueError(f"cannot read the chat template of {checkpoint}: {error}") from None

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation, and the beginning of the answer; without <bos>, which the tokenizer adds.

        Raises Refused where the template does not take such a conversation.
        """
        try:
            text = self.template.render(messages=[dict(one) for one in messages], add_generation_prompt=True,
                                        **self.specials)
        except Refused:
            raise
        except Exception as error:  # whatever a template may raise
            raise Refused(f"the chat template does not take these messages: {error}", "messages") from None
        return text.removeprefix(self.specials.get("bos_token", "<bos>"))


def _refuse(message: str) -> None:
    raise Refused(f"the chat template says: {message}", "messages")


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
