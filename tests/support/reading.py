"""Reads files that may be damaged, as a script: a hang, a crash or a full memory ends this process only.

Arguments: whether its address space is bounded (True, False), then checkpoints to load first, so that every
library is there. Then each line of standard input is [what to read, path], and each line of standard output
is [kind, message, gigabytes].
"""

import contextlib
import io
import json
import re
import resource
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers  # noqa: F401 (loaded before time and memory are measured)

from speccascade_jax import checkpoints, commands
from speccascade_jax.commands import serve
from speccascade_jax.core.rules import Scores
from speccascade_jax.learned import rules as learned_rules
from speccascade_jax.tokenizers import chat_worker
from speccascade_jax.tokenizers.chat import ChatTemplate
from speccascade_jax.tokenizers.tokenizer import Tokenizer

ADDRESSES = 3 * 2**30  # bytes that a file may add to what the libraries take
TEXTS = [
    "the cat",
    "",
    "  Gr\u00fc\u00dfe,\n\u6771\u4eac \U0001f99c <think></s>",
    "a" * 1000,
    "\0\u202e\ufeff",
    "1 2,3.",
]
USER = [{"role": "user", "content": "Why?"}]
LAWS = jnp.array(np.random.default_rng(0).dirichlet(np.ones(5), (2, 3)), jnp.float32)


def use_tokenizer(path):
    """What decoding does with a tokenizer that has been read."""
    tokenizer = Tokenizer(path)
    rows = tokenizer.encode_batch(TEXTS)
    assert rows == [tokenizer.encode_batch([text])[0] for text in TEXTS]
    for row in rows:
        framed = tokenizer.framed(row)
        assert all(0 <= token < tokenizer.size for token in framed), framed
        assert tokenizer.framed(row, 8) == framed or len(tokenizer.framed(row, 8)) <= 8
        tokenizer.decode(framed).encode()
    assert 0 <= tokenizer.eos_id < tokenizer.size and 0 <= tokenizer.pad_id < tokenizer.size
    for token in range(tokenizer.size):
        tokenizer.decode([token]).encode()
    assert len(tokenizer.surfaces()) == len(tokenizer.pieces()) == tokenizer.size


def use_router(path):
    """A trained network's law, of laws that are any."""
    method = learned_rules.load(path)
    scores = Scores(*LAWS, *LAWS[::-1], jnp.array(False))
    for alpha in (0.0, 0.3, 1.0):
        law, _ = method.target(scores, alpha)
        np.testing.assert_allclose(np.sum(law, axis=-1), 1, atol=1e-4)


def use_template(folder):
    """A chat template's text of a conversation, twice: the second time after whatever the first one did."""
    template = ChatTemplate.find(Path(folder), {"bos_token": "<bos>"})
    if template is not None:
        try:
            template.render(USER)
        finally:
            template.render([*USER, {"role": "assistant", "content": "So."}, *USER]).encode()


def use_keys(path):
    """A file's API keys: each can be compared with what a client sends."""
    for key in serve.keys_in(path):
        assert key.encode() and key == key.strip() and "\ufeff" not in key, ascii(key)
        assert not any(character != "\t" and (character < " " or character == "\x7f") for character in key)


def run_command(line):
    """A command of this package, its flags in a JSON list: what it says on exit code 2 is a ValueError."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            code = commands.main(json.loads(line))
        except SystemExit as stopped:  # of the flags' parser
            code = stopped.code
    assert "Traceback" not in said.getvalue(), said.getvalue()
    if code == 2:
        sentence = said.getvalue().strip()
        if not sentence.startswith("error: "):  # by the flags' parser: several lines in a frame
            sentence = " ".join(re.sub(r"[\u2500-\u257f]+", " ", sentence).split())[:500]
        raise ValueError(sentence)
    assert code == 0, code


READERS = {
    "load": checkpoints.load,
    "config_of": checkpoints.config_of,
    "tokenizer": Tokenizer,
    "used tokenizer": use_tokenizer,
    "used router": use_router,
    "used template": use_template,
    "used keys": use_keys,
    "command": run_command,
}


def gigabytes(name):
    """A number of /proc/self/status; getrusage()'s would count the parent's memory, too."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) / 2**20


def main():
    for name in sys.argv[2:]:
        checkpoints.load(name)
    chat_worker.SECONDS = 2
    if sys.argv[1] == "True":
        addresses = int(gigabytes("VmSize") * 2**30) + ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    print("ready", flush=True)
    for line in sys.stdin:
        what, path = json.loads(line)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        try:
            READERS[what](path)
            kind, said = "loaded", ""
        except BaseException as error:
            kind, said = type(error).__name__, str(error)
            if isinstance(error, ValueError):  # FieldError is one
                kind = "ValueError"
        print(json.dumps([kind, ascii(said), gigabytes("VmHWM")]), flush=True)


if __name__ == "__main__":
    main()
