"""Who may import whom (DESIGN), and that no file has grown past reading in one sitting."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "speccascade_jax"
CORE = {"typing": set(), "sampling": {"typing"}, "rules": set(), "verification": {"sampling"},
        "metrics": set(), "decoding": {"typing", "sampling", "rules", "verification", "metrics"}}


def imports(path: Path) -> set[str]:
    """The modules of this repository that a file imports, without the package's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = node.module == "speccascade_jax"
            found |= {f"{node.module}.{n.name}" for n in node.names} if inside else {node.module}
        elif isinstance(node, ast.Import):
            found |= {n.name for n in node.names}
    return {name.removeprefix("speccascade_jax.") for name in found
            if name.split(".")[0] in ("speccascade_jax", "scripts", "configs")}


def test_the_core_sees_models_through_the_protocol_alone():
    for name, allowed in CORE.items():
        assert imports(PACKAGE / f"{name}.py") <= allowed, name


def test_models_import_typing_and_each_other_only():
    for path in (PACKAGE / "models").glob("*.py"):
        assert all(m == "typing" or m.startswith("models") for m in imports(path)), path


def test_configs_import_config_and_model_shapes_only():
    for path in (PACKAGE.parent / "configs").glob("*.py"):
        assert imports(path) <= {"config", "models.t5", "models.gemma"}, path


def test_nothing_imports_scripts():
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "configs").glob("*.py")]:
        assert not any(m.startswith("scripts") for m in imports(path)), path


def test_sizes():
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lines.values()) <= 450
    assert sum(lines[PACKAGE / f"{name}.py"] for name in CORE if name != "metrics") <= 900
