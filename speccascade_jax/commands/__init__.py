"""What scripts/ and `speccascade` run: one module a command."""

import importlib
import sys

NAMES = ("decode", "finetune", "evaluate", "tradeoff", "benchmark", "convert", "fewshot", "memory")


def main(argv: list[str] | None = None) -> int:
    """Runs the command argv[0] with the rest as its flags, and returns its exit code.

    Commands are imported here, so that an interrupt while JAX loads ends as quietly as a later one.
    """
    name, *flags = (sys.argv[1:] if argv is None else argv) or ["--help"]
    said = ""
    if name not in NAMES:
        said = f"speccascade COMMAND [--FLAGS], where COMMAND is one of: {', '.join(NAMES)}."
        if name in ("-h", "--help"):
            print(said)
            return 0
        said = f"unknown command {name!a}; write {said}"
    for flag in flags:
        try:
            flag.encode()
        except UnicodeEncodeError:
            said = said or f"the argument {flag!a} is not valid UTF-8."
    if said:
        print(f"error: {said}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"speccascade_jax.commands.{name}").main(flags)
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return 130
