"""Chat templates, which turn a conversation into a text for the model to continue."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from speccascade_jax.checkpoints.files import exists, parse_json, read
from speccascade_jax.checkpoints.tokenizer_files import LARGEST_COMPANION
from speccascade_jax.tokenizers import chat_worker

LARGEST = 2**20  # characters of a template
STARTING = 60.0  # seconds for Python and Jinja to start, even on a busy machine
SLOW = f"it takes more than {chat_worker.SECONDS} s"


class ChatTemplate:
    """A Jinja template in Hugging Face's form, with the special tokens that it may use.

    It is compiled and rendered in a separate process, with limits on time, memory and length: see
    chat_worker. Threads can share it and take turns. Raises ValueError for an invalid template.
    """

    def __init__(self, source: str, specials: Mapping[str, str]):
        if importlib.util.find_spec("jinja2") is None:
            raise ValueError("a chat template needs Jinja: pip install 'speccascade_jax[chat]'.")
        self.source, self.specials = source, dict(specials)
        self.turn = threading.Lock()
        self.worker: Worker | None = self._started()

    @classmethod
    def find(cls, folder: Any, specials: Mapping[str, str]) -> "ChatTemplate | None":
        """The template in a checkpoint's folder (chat_template.jinja, chat_template.json or
        tokenizer_config.json), if any. Raises ValueError if it cannot be read."""
        source: Any = None
        for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
            if source is None and exists(folder / name):
                content = read(folder / name, LARGEST_COMPANION)
                if name.endswith(".jinja"):
                    source = content.decode(errors="replace")
                else:
                    source = parse_json(folder / name, content).get("chat_template")
        if source is None:
            return None
        if isinstance(source, list):
            source = default_of(source, folder)
        if not isinstance(source, str):
            raise ValueError(f"the chat template in {folder} is not text: fetch it again, or remove it.")
        if len(source) > LARGEST:
            raise ValueError(
                f"the chat template in {folder} has {len(source):,} characters: that is not a template."
            )
        try:
            return cls(source, specials)
        except ValueError as error:
            raise ValueError(f"cannot read the chat template in {folder}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders the conversation and the beginning of the answer.

        Raises ValueError if the template refuses the conversation.
        """
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._turn() as in_time:
            answer = self._answer(values) if in_time else {"fault": SLOW}
        if "refusal" in answer:
            raise ValueError(f"the chat template says: {answer['refusal']}")
        if "fault" in answer:
            raise ValueError(
                f"the chat template cannot render these messages: {answer['fault'].rstrip('.')}."
            )
        return answer["text"]

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Waits for the worker; yields whether it became free within the time limit of a conversation."""
        in_time = self.turn.acquire(timeout=chat_worker.SECONDS)
        try:
            yield in_time
        finally:
            if in_time:
                self.turn.release()

    def _answer(self, values: dict[str, Any]) -> dict[str, str]:
        """The worker's answer. A worker that does not answer in time is ended, and the next call starts
        another."""
        worker = self.worker = self.worker or self._started()
        try:
            return worker.ask(values, chat_worker.SECONDS)
        except OSError as error:
            worker.end()
            self.worker = None
            return {"fault": SLOW if isinstance(error, TimeoutError) else "it ended its process"}

    def _started(self) -> "Worker":
        """Starts a worker that has compiled the template. Raises ValueError for an invalid template."""
        worker = Worker()
        try:
            answer = worker.ask({"source": self.source, "specials": self.specials}, STARTING)
        except OSError:
            answer = {"fault": "it cannot be compiled in time"}
        if "fault" in answer:
            worker.end()
            raise ValueError(f"the chat template is damaged: {answer['fault'].rstrip('.')}.")
        return worker


class Worker:
    """A process that runs chat_worker, and a socket to it."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        script = str(Path(__file__).with_name("chat_worker.py"))
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", script],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, self.connection, process)

    def ask(self, message: Any, seconds: float) -> dict[str, str]:
        """The answer to a message. Raises OSError if the worker fails, and TimeoutError after `seconds`."""
        deadline, answer = monotonic() + seconds, bytearray()
        self.connection.settimeout(seconds)
        self.connection.sendall(json.dumps(message).encode() + b"\n")
        while not answer.endswith(b"\n"):
            self.connection.settimeout(max(deadline - monotonic(), 1e-3))
            received = self.connection.recv(2**16)
            if not received:
                raise ConnectionError("the process has ended")
            answer += received
        return json.loads(answer)


def _end(connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    process.kill()
    process.wait()


def default_of(templates: Sequence[Any], folder: Any) -> str:
    """The template named `default` in a list. Raises ValueError if there is none."""
    named = [template for template in templates if isinstance(template, dict)]
    for template in named:
        if template.get("name") == "default" and isinstance(template.get("template"), str):
            return template["template"]
    names = ", ".join(template["name"] for template in named if isinstance(template.get("name"), str))
    raise ValueError(
        f"the chat template in {folder} is a list without a template named default"
        f"{f'; it names {names}' if names else ''}: name the one to use so."
    )


def specials_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by role (bos_token, eos_token, pad_token, ...) of a tokenizer_config.json."""
    specials = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            specials[name] = content
    return specials


def read_companion(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file next to a tokenizer; {} if it is missing. Raises ValueError if it is invalid."""
    where = folder / name
    return parse_json(where, read(where, LARGEST_COMPANION)) if exists(where) else {}
