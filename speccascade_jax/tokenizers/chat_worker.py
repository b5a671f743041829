"""Renders a chat template in a separate process, which may be killed: a template is a program that came with
a checkpoint, and may loop or take all memory.

Run as a script with a socket as standard input. Lines of JSON pass over it: the template and its special
tokens first, then conversations; each line is answered by one. Nothing of the package is imported here: it
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

SECONDS = 5  # that one line may take before the caller gives up
MEMORY = 2**30  # bytes of this process
LONGEST = 2**24  # characters of a conversation


class Refusal(Exception):
    """A conversation that the template refuses."""


def compiled(source: str) -> Any:
    """The template, in a sandbox, with what Hugging Face's templates may use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, which marks for training what an assistant wrote: here nothing but its text."""

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
    """The template's text. Raises ValueError if it is too long, or cannot be written in UTF-8."""
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
    """Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def answers(lines: Iterable[bytes]) -> Iterable[dict[str, str]]:
    """An answer to each line: nothing in it for a template that can be compiled, a text for a conversation;
    or the `refusal` of the template itself, or the `fault` that it has."""
    template, specials = None, {}
    for line in lines:
        signal.alarm(2 * SECONDS)  # ends this process, should its caller be gone
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
        except Exception as error:  # whatever a template may raise
            yield {"fault": " ".join(str(error).split()) or type(error).__name__}
        signal.alarm(0)


def main() -> None:
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        with contextlib.suppress(OSError, ValueError):  # not every system has both
            resource.setrlimit(limit, (MEMORY, MEMORY))
    with socket.socket(fileno=sys.stdin.fileno()) as connection:
        for answer in answers(connection.makefile("rb")):
            connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
