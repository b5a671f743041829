"""Names are nouns of the field: no pronoun says what an object is, and a name means one thing.

`found`, `most` or `one` do not say what an object is. Each guard has planted violations.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "speccascade_jax"
PRONOUNS = {"found", "most", "one", "given", "own", "asked"}
HOMES = {
    "METHODS": "core/rules.py",
    "NO_LIMIT": "core/protocols.py",
    "spelled": "vocabularies/matching.py",
    "spellings": "vocabularies/matching.py",
}
"""The one module that gives each of these names a meaning."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """What a module names: variables, arguments, attributes, functions, classes and imports."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name


def pronouns(source: str) -> set[str]:
    return {name for name in identifiers(ast.parse(source)) if name.strip("_").lower() in PRONOUNS}


def defined(source: str) -> set[str]:
    """The names that a module itself gives a meaning, at its top."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def sources() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_no_identifier_is_a_pronoun():
    assert not {file: names for file, source in sources().items() if (names := pronouns(source))}


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "def f(most): pass",
        "def f(*, given=1): pass",
        "[x for one in y]",
        "f(asked=1)",
        "self._found = 1",
        "OWN = {}",
        "class Found: pass",
        "def found(): pass",
        "async def asked(): pass",
        "from x import y as own",
        "with f() as (one, other): pass",
        "match x:\n    case [one, *rest]: pass",
        "lambda one: 1",
    ],
)
def test_a_planted_pronoun_is_detected(source):
    assert len(pronouns(source)) == 1


@pytest.mark.parametrize(
    "source", ["x = 'found'", "# one\nx = 1", "most_servers = 1", "jax.nn.one_hot(x)", "owner = foundation"]
)
def test_other_words_are_no_pronouns(source):
    assert not pronouns(source)


@pytest.mark.parametrize("name", HOMES)
def test_a_name_means_one_thing(name):
    assert [file for file, source in sources().items() if name in defined(source)] == [HOMES[name]]


def test_a_second_meaning_is_detected():
    for source in ("METHODS = ('GET',)", "METHODS: tuple = ()", "def METHODS(): pass"):
        assert defined(source) == {"METHODS"}
    assert not defined("from speccascade_jax.core.rules import METHODS")
