"""Every choice is declared once: no code asks for an entry by its name.

An entry is a line of a table: a method, a baseline, a few-shot task, a metric, a way to join vocabularies, a
truncation, a divergence. Its peculiarities are fields of the entry. Code that compares with its name, or
keeps a dict by such names, would have to be found and changed when an entry is added.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from speccascade_jax.baselines import BASELINES
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.divergences import DIVERGENCES
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers.lookup import MODEL_FREE
from speccascade_jax.core.samplers.named import SAMPLERS
from speccascade_jax.core.transforms import TRUNCATIONS
from speccascade_jax.core.verification import VERIFICATIONS
from speccascade_jax.evaluation.fewshot import TASKS
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.training.optimizer import OPTIMIZERS
from speccascade_jax.vocabularies import VOCABULARIES

PACKAGE = Path(__file__).resolve().parent.parent / "speccascade_jax"
DECLARED: tuple[Mapping[str, Any], ...] = (
    METHODS,
    BASELINES,
    SAMPLERS,
    MODEL_FREE,
    TASKS,
    METRICS,
    VOCABULARIES,
    VERIFICATIONS,
    TRUNCATIONS,
    DIVERGENCES,
    OPTIMIZERS,
)
ENTRIES = set().union(*DECLARED)
TABLES = {"METHODS", "BASELINES", "TRUNCATIONS", "VOCABULARIES", "DIVERGENCES", "OPTIMIZERS"}
"""The dict literals that declare entries."""

COLLECTIONS = "set", "frozenset", "tuple", "list", "dict.fromkeys"
ALLOWED = {  # what only looks like a comparison with an entry's name
    # Of the timings of those models that there are.
    "commands/benchmark.py": ["'drafter' in step"],
    # Values of --at-quality.
    "commands/tradeoff.py": ["a.at_quality not in (None, *QUALITIES)", "target in QUALITIES"],
    # The flags, and the parts of a network, that are called like a model by itself.
    "training/checks.py": ["{'drafter': config.exits.drafter}"],
    "models/eagle.py": ["{'verifier': self.full.segment(cache.verifier, row, start, size), **he"],
    # What is timed, as stored times call it.
    "experiments/verification.py": ["{('verifier',): dataclasses.replace(run.by('verifier'), block_size=1),"],
    # Fields of an answer.
    "serving/answers.py": [
        "{'token': piece.text, 'logprob': float(scores.logprobs[position]), 'of",
        "{'token': token, 'logprob': value, 'bytes': [*token.encode(errors='rep",
        "{'text': piece.text, 'token': piece.token, 'origin': piece.origin, 'le",
    ],
    "config.py": ["dtype == 'auto'", "self.dtype != 'auto'"],
    "evaluation/tpus.py": ["run.dtype == 'auto'"],  # no vocabulary, but a dtype
    "inference/ray_jobs.py": ["address in ('local', 'auto')"],
    "cluster.py": ["cluster == 'auto'"],
    # Values of these fields, not a choice by their names.
    "evaluation/sweep.py": ["{'temperature': temperature, 'top_p': top_p}"],
    # `speculative` is a field of a request.
    "serving/protocol.py": ["{'model': Field('A name from /v1/models; optional if there is only one"],
}

Constants = dict[str, set[str]]


def strings(node: ast.AST | None, constants: Constants) -> set[str]:
    """The strings that an expression is, or holds: a literal, a collection of literals, or a name for one. An
    entry that has a name of its own, such as VERIFIER, is the entry's string, and so is VERIFIER.name."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.Name):
        return constants.get(node.id, set())
    if isinstance(node, ast.Attribute):  # module.CONSTANT, ENTRY.name
        return (
            strings(node.value, constants)
            if node.attr == "name"
            else (constants.get(node.attr, set()) if node.attr.isupper() else set())
        )
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set().union(*(strings(element, constants) for element in node.elts))
    if isinstance(node, ast.Starred):
        return strings(node.value, constants)
    if isinstance(node, ast.Dict):
        return set().union(*(strings(key, constants) for key in node.keys))
    if isinstance(node, ast.Call):  # frozenset((..)), dict.fromkeys((..), value)
        return strings(node.args[0], constants) if _collects(node) else set()
    return set()


def _collects(call: ast.Call) -> bool:
    return bool(call.args) and ast.unparse(call.func) in COLLECTIONS


def constants_of(tree: ast.Module) -> Constants:
    """Name -> strings of a module's constants, the tables themselves left out."""
    constants: Constants = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in targets:
                if isinstance(target, ast.Name) and target.id not in TABLES:
                    constants[target.id] = strings(node.value, constants)
    return constants


def declarations(tree: ast.Module) -> set[ast.AST]:
    """The dict literals of TABLES."""
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in TABLES
    }


def violations(source: str, elsewhere: Constants | None = None) -> Iterator[str]:
    """Each comparison with an entry's name, and each dict by such names; `elsewhere`: other modules'
    constants."""
    tree = ast.parse(source)
    constants, allowed = {**(elsewhere or {}), **constants_of(tree)}, declarations(tree)
    for node in ast.walk(tree):
        named: set[str] = set()
        if isinstance(node, ast.Compare):
            named = set().union(*(strings(side, constants) for side in (node.left, *node.comparators)))
        elif isinstance(node, ast.MatchValue):
            named = strings(node.value, constants)
        elif (isinstance(node, ast.Dict) and node not in allowed) or (
            isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.fromkeys"
        ):
            named = strings(node, constants)
        if named & ENTRIES:
            yield " ".join(ast.unparse(node).split())[:70]


def named_entries() -> Constants:
    """Constant -> the entry's name, where an entry is an object that a module has given a name."""
    entries = {id(entry): name for table in DECLARED for name, entry in table.items()}
    constants: Constants = {}
    for name, module in [*sys.modules.items()]:
        for constant, value in vars(module).items() if name.startswith(PACKAGE.name) else ():
            if constant.isupper() and id(value) in entries:
                constants[constant] = {entries[id(value)]}
    return constants


def all_constants() -> Constants:
    constants: Constants = named_entries()
    for path in PACKAGE.rglob("*.py"):
        for name, values in constants_of(ast.parse(path.read_text(encoding="utf-8"))).items():
            if name.isupper():
                constants[name] = constants.get(name, set()) | values
    return constants


def found_in_package() -> dict[str, list[str]]:
    elsewhere = all_constants()
    return {
        path.relative_to(PACKAGE).as_posix(): codes
        for path in sorted(PACKAGE.rglob("*.py"))
        if (codes := list(violations(path.read_text(encoding="utf-8"), elsewhere)))
    }


def test_no_code_asks_for_an_entry_by_its_name():
    new = {
        name: rest
        for name, codes in found_in_package().items()
        if (rest := {*codes}.difference(ALLOWED.get(name, ())))
    }
    assert not new


def test_fixed_exceptions_are_no_longer_listed():
    package_codes = found_in_package()
    assert not {
        name: rest for name, codes in ALLOWED.items() if (rest := {*codes} - {*package_codes.get(name, ())})
    }


@pytest.mark.parametrize(
    "source",
    [
        "if metric == 'bleu': pass",
        "if 'bleu' != metric: pass",
        "found = task.name in ('mbpp', 'gsm8k')",
        "ok = name not in {'slem', 'union'}",
        "LOOKAHEAD = 'lookahead'\nfound = name is LOOKAHEAD",
        "ROUGES = ('rouge1', 'rouge2')\nfound = name in ROUGES",
        "X = 'opt'\nNAMES = (X, 'b')\nfound = n in NAMES",
        "match name:\n    case 'top_p':\n        pass",
        "match name:\n    case 'a' | 'token_v3':\n        pass",
        "LABELS = {'opt': 'OPT', 'chow': 'Chow'}",
        "BENDS = dict.fromkeys(('lossy', 'typical'), 1)",
        "scale = {'bild': 10.0}.get(name, 1.0)",
        "found = settings.LOOKAHEAD == name",
        "NAMES = frozenset(('sequence',))\nfound = name in NAMES",
        "x = 1 if kind == 'min_p' else 2",
        "METHODS = {'opt': 1}\nif name == 'opt': pass",
        "while vocabulary == 'slrs': pass",
        "[one for one in names if one != 'wmt']",
        "assert name == 'router'",
        "f(lambda name: name == 'oracle')",
        "far = lk if config.divergence == 'lk' else kl",
        "if name == 'verifier': pass",
        "blank = r.name == DRAFTER.name",
        "unusual = point.verification != verification.TOKEN.name",
        "ok = way not in (TOKEN.name, *ways)",
        "ok = entry is VERIFIER",
        "if way == 'block': pass",
        "if path == 'lookup': pass",
        "matrices = config.optimizer == 'muon'",
        "LOOKS = {'verifier': 1, 'drafter': 2}",
        "calls = {VERIFIER.name: 1}",
        "joined = UNION.name == vocabulary",
    ],
)
def test_a_planted_violation_is_detected(source):
    assert len(list(violations(source, {"LOOKAHEAD": {"lookahead"}, **named_entries()}))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "METHODS = {'opt': 1, 'chow': 2}",
        "BASELINES: dict[str, Any] = {'bild': 1}",
        "found = name in METHODS",
        "from x import METHODS\nfound = name in METHODS",
        "method = METHODS['speculative']",
        "METRICS = {metric.name: metric for metric in (Metric('bleu'),)}",
        "if method.lossless: pass",
        "COMPARED = ('opt', 'chow')\nfor name in COMPARED: pass",
        "if name == 'both': pass",
        "settings = replace(settings, method=VERIFIER.name)",
        "if point.name in SINGLE_MODEL: pass",
        "replace(settings, method='speculative', top_p=0.5)",
        "found = 'optimizer' in flags",
    ],
)
def test_naming_an_entry_without_comparing_is_no_violation(source):
    assert not list(violations(source))


def test_the_names_are_those_of_the_entries():
    """A name without an entry would never be found."""
    assert {"speculative", "lookahead", "bild", "gsm8k", "bleu", "slem", "min_p", "lk"} <= ENTRIES
    assert all(task.name == name and task.summary for name, task in TASKS.items())
    assert all(metric.name == name and metric.summary for name, metric in METRICS.items())
    assert {"token", "lookup", "drafter", "muon"} <= ENTRIES
    assert named_entries().keys() >= {"VERIFIER", "DRAFTER", "TOKEN", "BLOCK", "SLEM", "TLI"}


@pytest.mark.parametrize("flag,table", [("vocabulary", VOCABULARIES), ("drafter", MODEL_FREE)])
def test_a_flags_help_is_made_of_its_entries(flag, table):
    [about] = get_type_hints(DecodeConfig, include_extras=True)[flag].__metadata__
    for name, entry in table.items():
        assert re.search(rf"\b{name}[:`]", about.help) and entry.summary in about.help
