"""Chat templates: a conversation as the text that the model continues."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from speccascade_jax.checkpoints.files import exists, parse_json, read
from speccascade_jax.checkpoints.tokenizer_files import LARGEST_COMPANION

LARGEST = 2**20  # bytes of a template


class ChatTemplate:
    """A Jinja template in Hugging Face's form, and the special tokens that it may name."""

    def __init__(self, source: str, specials: Mapping[str, str]):
        try:
            from jinja2 import nodes
            from jinja2.ext import Extension, loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ValueError("a chat template needs Jinja: pip install 'speccascade_jax[chat]'.") from None

        class Generation(Extension):
            """{% generation %}, which marks for training what an assistant wrote: here nothing but its
            text."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True),
                                   lineno=line)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self.template = environment.from_string(source)
        except Exception as error:  # of Jinja, and of Python where it compiles what Jinja made
            raise ValueError(f"the chat template is damaged: {error}.") from None
        self.specials = dict(specials)

    @classmethod
    def find(cls, folder: Any, specials: Mapping[str, str]) -> "ChatTemplate | None":
        """The template in a checkpoint's folder (chat_template.jinja, or in chat_template.json or
        tokenizer_config.json), if any. Raises ValueError for one that cannot be read."""
        source: Any = None
        for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
            if source is None and exists(folder / name):
                content = read(folder / name, LARGEST_COMPANION)
                if name.endswith(".jinja"):
                    source = content.decode(errors="replace")
                else:
                    source = parse_json(folder / name, content).get("chat_template")
        if isinstance(source, list):  # several by name
            named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        if len(source) > LARGEST:
            raise ValueError(f"the chat template in {folder} has {len(source):,} characters: it is none.")
        try:
            return cls(source, specials)
        except ValueError as error:
            raise ValueError(f"cannot read the chat template in {folder}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation, and the beginning of the answer.

        Raises ValueError where the template does not take such a conversation.
        """
        try:
            return self.template.render(
                messages=[dict(one) for one in messages], tools=None, documents=None,
                add_generation_prompt=add_generation_prompt, **self.specials)
        except Refusal as error:
            raise ValueError(f"the chat template says: {error}") from None
        except Exception as error:  # whatever a template may raise
            raise ValueError(f"the chat template does not take these messages: {error}") from None


class Refusal(Exception):
    """What a template itself objects to."""


def _refuse(message: str) -> None:
    raise Refusal(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own would escape what HTML does not like."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def specials_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by role (bos_token, eos_token, pad_token, ...) of a tokenizer_config.json."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def read_companion(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file next to a tokenizer; {} where there is none. Raises ValueError."""
    where = folder / name
    return parse_json(where, read(where, LARGEST_COMPANION)) if exists(where) else {}
