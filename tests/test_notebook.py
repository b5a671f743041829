"""The notebook of examples/ runs from its first cell to its last, as Jupyter would run it."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import flax.nnx  # noqa: F401 - it asks whether there is an IPython: before the tests' stands there
import matplotlib
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK, PAGE = ROOT / "examples" / "cascades.ipynb", ROOT / "docs" / "guide" / "notebook.md"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_it_is_stored_without_results():
    """They would become stale, and make diffs unreadable."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(
        notebook["cells"]
    )
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_its_page_shows_every_cell():
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"```python\n(.*?)\n```", page, re.DOTALL) == code_cells()


def installed(monkeypatch, folder, **modules):
    """What the notebook's first cell hands to pip in `folder`, where the package is not there."""
    calls = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: calls.append(command))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"google.{name}", module)
    exec(compile(code_cells()[0], "the cell that installs", "exec"), {})
    [command] = calls
    assert command[1:5] == ["-m", "pip", "install", "-q"]
    return command[5]


def test_its_first_cell_installs_the_clone_or_a_wheel(monkeypatch, tmp_path):
    """Never a name, because a registry may have another package of that name."""
    assert installed(monkeypatch, NOTEBOOK.parent) == ".."
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    colab = ModuleType("google.colab")
    colab.files = SimpleNamespace(upload=lambda: {"speccascade_jax-1-py3-none-any.whl": b""})
    assert installed(monkeypatch, tmp_path, colab=colab) == "speccascade_jax-1-py3-none-any.whl"


@pytest.mark.full
def test_it_runs(monkeypatch, capsys):
    displayed = []
    display = ModuleType("IPython.display")
    display.HTML, display.display = str, displayed.append
    ipython = ModuleType("IPython")
    ipython.get_ipython, ipython.version_info = lambda: None, (9, 0)  # as where no shell runs
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    matplotlib.use("agg")
    shared = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells()):
        exec(compile(cell, f"{NOTEBOOK.name}, code cell {number}", "exec"), shared)
    said = capsys.readouterr().out
    assert "Bahnhof" in said and said.count("deferred") == len(shared["TEXTS"])
    shown = "\n".join(re.findall(r"```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    assert shown.splitlines() == said.splitlines()  # its page is not stale
    [page] = displayed
    assert page in PAGE.read_text(encoding="utf-8")
    assert shared["COLOURS"]["draft"] in page and shared["COLOURS"]["correction"] in page
    assert shared["curve"][-1] > shared["curve"][0] >= 1 and len(shared["curve"]) == len(shared["ALPHAS"])
