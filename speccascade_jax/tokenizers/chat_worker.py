"""Renders a chat template in a separate process that can be killed: a template is a program from a
checkpoint, which may loop or use all memory.

Run it as a script with a socket as standard input. It reads lines of JSON, first the template and its special
tokens, then conversations, and answers each with one line. It imports nothing from the package, because that
would take seconds.
"""

import contextlib
import json
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from datetime import datetime
from typing import Any

SECONDS = 5  # per line, before the caller gives up
MEMORY = 2**30  # bytes that this process may use
LONGEST = 2**24  # most characters of a conversation


class Refusal(Exception):
    """The template refuses a conversation."""


def compiled(source: str) -> Any:
    """Compiles a template in a sandbox, with the functions that Hugging Face's templates may use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks an assistant's text for training; here it is ignored."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(source)


def rendered(template: Any, values: dict[str, Any]) -> str:
    """Renders a template. Raises ValueError if the text is too long or cannot be encoded in UTF-8."""
    pieces, size = [], 0
    for piece in template.generate(**values):
        pieces.append(piece)
        size += len(piece)
        if size > LONGEST:
            raise ValueError(f"it writes more than {LONGEST:,} characters")
    text = "".join(pieces)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("it writes an unpaired surrogate, which UTF-8 cannot encode")
    return text


def _refuse(message: str) -> None:
    raise Refusal(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def answers(lines: Iterable[bytes]) -> Iterable[dict[str, str]]:
    """Yields an answer to each line: {} for a template that compiles, a `text` for a conversation, otherwise
    a `refusal` by the template or its `fault`."""
    template, specials = None, {}
    for line in lines:
        signal.alarm(2 * SECONDS)  # ends this process if its caller is gone
        message = json.loads(line)
        try:
            if template is None:
                template, specials = compiled(message["source"]), message["specials"]
                yield {}
            else:
                yield {"text": rendered(template, {**message, **specials})}
        except Refusal as error:
            yield {"refusal": str(error)}
        except MemoryError:
            yield {"fault": "it takes too much memory"}
        except Exception as error:  # a template may raise anything
            yield {"fault": " ".join(str(error).split()) or type(error).__name__}
        signal.alarm(0)


def main() -> None:
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        with contextlib.suppress(OSError, ValueError):  # some systems lack one of them
            resource.setrlimit(limit, (MEMORY, MEMORY))
    with socket.socket(fileno=sys.stdin.fileno()) as connection:
        for answer in answers(connection.makefile("rb")):
            connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
