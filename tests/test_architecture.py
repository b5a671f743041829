"""The order of imports, and that scripts stay thin. Each rule has a planted violation."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "speccascade_jax"
COMMANDS = {path.stem for path in (REPOSITORY / "scripts").glob("*.py")}
SCRIPT = 8
"""Lines of a script at most."""

ROOMS = [
    "core",
    "models",
    "checkpoints",
    "tokenizers",
    "vocabularies",
    "baselines",
    "learned",
    "settings",
    "config",
    "parallel",
    "cluster",
    "scheduling",
    "inference",
    "serving",
    "planning",
    "training",
    "evaluation",
    "experiments",
    "commands",
]
"""The package's folders and files: each may import those before it, but for what EXCEPT names."""
MODELS = ["core.protocols", "core.nests"]
EXCEPT = {  # what may import less, or more, of ours than its place says, besides its own folder
    "models": MODELS,
    "checkpoints": [*MODELS, "core.errors", "models"],
    "baselines": ["core"],
    "settings": ["core", "baselines"],
    "config": ["settings", "vocabularies", "models", "core"],
    "parallel": ["core.errors"],
    "cluster": ["core.errors", "parallel"],
    "serving": [*ROOMS[:13], "__init__"],
    "planning": ROOMS[:13],
    "training": [*ROOMS[:13], "planning"],
    "evaluation": [*ROOMS[:13], "planning", "training"],
    "experiments": [*ROOMS[:13], "planning", "training", "evaluation"],
    "commands": [*ROOMS, "__init__"],
    "__init__": ROOMS[:13],
}
MAY_IMPORT = {room: EXCEPT.get(room, ROOMS[:n]) for n, room in enumerate(ROOMS)} | {"__init__": ROOMS[:13]}


def is_module(name: str) -> bool:
    path = REPOSITORY / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(path: str, source: str) -> set[str]:
    """The modules of this repository that a file imports, by their whole names."""
    modules, folder = set(), path.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            modules |= {
                f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module
                for alias in node.names
            }
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                modules.add(str(node.args[0].value))
    # What lies next to a script is imported by its bare name.
    modules = {f"scripts.{name}" if name in COMMANDS else name for name in modules}
    modules = {f"{PACKAGE}.__init__" if name == PACKAGE else name for name in modules}
    return {
        name
        for name in modules
        if name.split(".")[0] in (PACKAGE, "scripts", "configs", "tests")
        or name.split(".")[-1].startswith("test_")
    }


def lies_in(module: str, places: list[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def violations(path: str, source: str) -> list[str]:
    """What a file imports and should not."""
    modules, (top, *rest) = imports(path, source), path.removesuffix(".py").split("/")
    if top == "tests":
        return sorted(name for name in modules if name.split(".")[-1].startswith("test_"))
    if top == "scripts":
        allowed = [f"{PACKAGE}.commands"]
        return sorted(name for name in modules if name not in allowed)
    if top == "configs":
        return sorted(
            name for name in modules if not lies_in(name, [f"{PACKAGE}.config", f"{PACKAGE}.models"])
        )
    place = rest[0]
    if place not in MAY_IMPORT:
        return [f"{place} is in no row of MAY_IMPORT"]
    allowed = [*MAY_IMPORT[place], *([place] if len(rest) > 1 else [])]
    wrong = {name for name in modules if not lies_in(name, [f"{PACKAGE}.{other}" for other in allowed])}
    if place == "commands":  # commands share commands/commandline.py and such, never each other
        wrong |= {f"{PACKAGE}.commands.{name}" for name in COMMANDS} & modules
    return sorted(wrong)


def files() -> list[Path]:
    return [
        path
        for top in (PACKAGE, "scripts", "configs", "tests")
        for path in sorted((REPOSITORY / top).rglob("*.py"))
    ]


def test_imports_run_downwards():
    wrong = {
        name: faults
        for path in files()
        if (faults := violations(name := path.relative_to(REPOSITORY).as_posix(), path.read_text()))
    }
    assert not wrong


@pytest.mark.parametrize(
    "path,source",
    [
        ("core/rules.py", "from speccascade_jax.models import t5"),
        ("core/rules.py", "from ..models.t5 import T5Model"),
        ("core/rules.py", "import speccascade_jax.config"),
        ("core/rules.py", "def f():\n    from .. import parallel"),
        ("core/rules.py", "import speccascade_jax as sc"),
        ("core/loop.py", "from speccascade_jax.baselines.bild import Bild"),
        ("baselines/bild.py", "from speccascade_jax.models.t5 import T5Model"),
        ("models/t5.py", "from speccascade_jax.core.randomness import draw"),
        ("models/t5.py", "from speccascade_jax.core import protocols, rules"),
        ("models/t5.py", "from speccascade_jax import checkpoints"),
        ("models/__init__.py", "from ..tokenizers import tokenizer"),
        ("checkpoints/native.py", "from speccascade_jax.tokenizers.tokenizer import Tokenizer"),
        ("checkpoints/native.py", "from speccascade_jax import config"),
        ("inference/text.py", "import importlib\nimportlib.import_module('speccascade_jax.training.loop')"),
        ("inference/text.py", "from ..evaluation import quality"),
        ("inference/text.py", "from speccascade_jax import commands"),
        ("scheduling/scheduler.py", "from speccascade_jax.inference.text import Cascade"),
        ("scheduling/scheduler.py", "from speccascade_jax.serving.engine import Engine"),
        ("settings.py", "from speccascade_jax.config import DecodeConfig"),
        ("vocabularies/joining.py", "from speccascade_jax.settings import Settings"),
        ("learned/rules.py", "from speccascade_jax.settings import Settings"),
        ("serving/app.py", "from speccascade_jax.evaluation.load import ask"),
        ("training/loop.py", "from speccascade_jax.serving import protocol"),
        ("planning/planner.py", "from speccascade_jax.evaluation.profiling import in_turn"),
        ("training/loop.py", "from speccascade_jax.evaluation.quality import METRICS"),
        ("training/loop.py", "import speccascade_jax.commands.decode as decode"),
        ("evaluation/quality.py", "from speccascade_jax.commands.commandline import exit_code"),
        ("evaluation/turns.py", "from speccascade_jax.experiments.table import EXPERIMENTS"),
        ("experiments/table.py", "from speccascade_jax.commands.benchmark import benchmark"),
        ("commands/evaluate.py", "from speccascade_jax.commands.decode import main"),
        ("commands/evaluate.py", "from . import decode"),
        ("commands/evaluate.py", "from scripts.decode import main"),
        ("config.py", "from speccascade_jax.inference.text import Cascade"),
        ("config.py", "from . import parallel"),
        ("parallel.py", "from speccascade_jax.core.protocols import Params"),
        ("__init__.py", "from speccascade_jax.training import loop"),
        ("new_folder/file.py", "import jax"),
        ("../scripts/evaluate.py", "import decode"),
        ("../scripts/evaluate.py", "from decode import main"),
        ("../scripts/evaluate.py", "import scripts.decode"),
        ("../scripts/evaluate.py", "from speccascade_jax.commands.decode import main"),
        ("../scripts/evaluate.py", "import speccascade_jax"),
        ("../configs/demo.py", "from speccascade_jax.core.methods import METHODS"),
        ("../configs/demo.py", "from configs.demo_drafter import config"),
        ("../tests/core/test_rules.py", "from test_baselines import pair"),
        ("../tests/core/test_rules.py", "from tests.models.test_t5 import TINY"),
    ],
)
def test_a_planted_violation_is_detected(path, source):
    whole = path.removeprefix("../") if path.startswith("../") else f"{PACKAGE}/{path}"
    assert len(violations(whole, source)) == 1
    assert not violations(whole, "import jax") or path.startswith("new_folder")


@pytest.mark.parametrize(
    "path,source",
    [
        ("core/rules.py", "from speccascade_jax.core.protocols import Params\nfrom . import transforms"),
        ("models/t5.py", "from ..core.protocols import Prefix\nfrom speccascade_jax.models import cache"),
        ("config.py", "from speccascade_jax.settings import Settings"),
        ("inference/text.py", "from speccascade_jax import checkpoints, config, parallel"),
        ("commands/decode.py", "from speccascade_jax import __version__\nfrom .commandline import exit_code"),
    ],
)
def test_allowed_imports_are_no_violations(path, source):
    assert not violations(f"{PACKAGE}/{path}", source)


def overgrown(path: Path) -> list[str]:
    """What is wrong with a script: it calls commands.launch with its own name, in a few lines."""
    source = path.read_text()
    tree = ast.parse(source)
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    imported = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    wrong = []
    if len(source.splitlines()) > SCRIPT:
        wrong.append(f"more than {SCRIPT} lines")
    if called != {"launch"} or path.stem not in strings:
        wrong.append(f"calls something else than launch([{path.stem!r}, ...])")
    if sorted(imported) != ["from speccascade_jax.commands import launch", "import sys"]:
        wrong.append("imports something else than speccascade_jax.commands.launch")
    return wrong


def test_scripts_are_thin(tmp_path):
    scripts = sorted((REPOSITORY / "scripts").glob("*.py"))
    assert len(scripts) > 5 and not {path.name: wrong for path in scripts if (wrong := overgrown(path))}
    sound = scripts[0].read_text()
    for planted in (
        sound + "\n" * SCRIPT,
        sound.replace(scripts[0].stem, "other"),
        sound + "import json\n",
        sound + "print(1)\n",
    ):
        (tmp_path / scripts[0].name).write_text(planted)
        assert len(overgrown(tmp_path / scripts[0].name)) == 1
