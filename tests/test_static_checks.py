"""Planted mistakes: no misspelt name survives `ruff check . && mypy`, no wrong shape `pytest --full`."""

import ast
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest
from checking import shapeless_and_nested
from jaxtyping import Array, Float, TypeCheckError
from processes import REPOSITORY

from speccascade_jax.core.transforms import renormalized

FILES = ["core/transforms.py", "models/t5.py", "tokenizers/tokenizer.py"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        REPOSITORY / "speccascade_jax",
        folder / "speccascade_jax",
        ignore=shutil.ignore_patterns("demo", "__pycache__"),
    )
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    if (REPOSITORY / ".mypy_cache").is_dir():  # spares what no file of ours changes
        shutil.copytree(REPOSITORY / ".mypy_cache", folder / ".mypy_cache")
    return folder


def said(tool, folder):
    """The exit code and the words of a check of the whole copy."""
    done = subprocess.run([sys.executable, "-m", *tool], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def names(tree):
    """Two names to misspell: one in an annotation, one in a function's body."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.returns]
    yield next(
        name
        for function in functions
        for argument in function.args.args
        if argument.annotation
        for name in ast.walk(argument.annotation)
        if isinstance(name, ast.Name)
    )
    for function in functions:
        arguments = {argument.arg for argument in function.args.args} - {"self", "cls"}
        for statement in function.body:
            for name in ast.walk(statement):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load) and name.id in arguments:
                    yield name
                    return


@pytest.mark.full
def test_misspelt_names_are_detected(copy):
    """Each name by both tools; and nothing is found where nothing is planted."""
    assert said(["ruff", "check", "."], copy) == (0, "All checks passed!\n")
    assert said(["mypy"], copy)[0] == 0
    planted = []
    for file in FILES:
        path = copy / "speccascade_jax" / file
        lines = path.read_bytes().splitlines(keepends=True)
        for name in names(ast.parse(path.read_text())):
            line, at = lines[name.lineno - 1], name.col_offset
            planted.append(f"mispelt{len(planted)}_{name.id}")
            lines[name.lineno - 1] = line[:at] + planted[-1].encode() + line[at + len(name.id) :]
        path.write_bytes(b"".join(lines))
    assert len(planted) == 2 * len(FILES)
    for tool, message in (
        (["ruff", "check", "."], "Undefined name `{}`"),
        (["mypy"], 'Name "{}" is not defined'),
    ):
        code, words = said(tool, copy)
        assert code and all(message.format(name) in words for name in planted)


def test_everything_is_formatted():
    """What `ruff format` would write is what is there."""
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "."],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_wrong_shapes_and_dtypes_are_refused():
    """By what --full installs."""
    probs = jnp.full((2, 3), 1 / 3)
    for mask in jnp.ones((2, 4), bool), jnp.ones((2, 3)):
        with pytest.raises(TypeCheckError):
            renormalized(probs, mask)


def test_nested_functions_without_shapes_are_not_checked():
    def plain(x: int): ...

    def shaped(x: tuple[Float[Array, " B"], int]): ...

    verdicts = [shapeless_and_nested(function) for function in (plain, shaped, renormalized)]
    assert verdicts == [True, False, False]
