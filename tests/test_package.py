"""The wheel: its contents, and that it works from another directory without a checkout."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from processes import REPOSITORY

import speccascade_jax

SENTENCE = "Good morning."
LARGEST = 75 * 10**6
"""Bytes of the wheel."""


def test_the_version_is_spelt_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", speccascade_jax.__version__)
    assert f"## {speccascade_jax.__version__}\n" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert speccascade_jax.__version__ not in (REPOSITORY / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, as pip would from a checkout: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (REPOSITORY / name).is_file() and not name.startswith("tests/"):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((REPOSITORY / name).read_bytes())
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            str(folder),
            str(folder / "source"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel in it; what it depends on comes from this one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--no-index", str(wheel)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(ours))  # after its own: the wheel comes first
    return folder


def run(installed, *command, code=0):
    """A command of the environment's, in a folder that is no checkout: its output; where it ends with another
    code than 0, what it says."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPECCASCADE_DATA")
    }
    done = subprocess.run(
        [installed / "venv" / "bin" / command[0], *command[1:]],
        cwd=installed,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.full
def test_the_wheel_holds_what_it_needs_and_no_more(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {
        "speccascade_jax",
        f"speccascade_jax-{speccascade_jax.__version__}.dist-info",
    }
    configs = {path.name for path in (REPOSITORY / "configs").glob("*.py")}
    assert {f"speccascade_jax/configs/{name}" for name in configs} <= names
    package = REPOSITORY / "speccascade_jax"
    assert {f"speccascade_jax/{path.relative_to(package)}" for path in package.rglob("*.py")} <= names
    assert {f"speccascade_jax/serving/page/{name}" for name in ("index.html", "page.css", "page.js")} <= names
    demo = {name.removeprefix("speccascade_jax/demo/") for name in names if "/demo/" in name}
    assert {name.partition("/")[0] for name in demo} == {"README.md", "router.json", "drafter", "verifier"}
    for model in ("drafter", "verifier"):
        assert {path.name for path in (package / "demo" / model).iterdir()} == {
            name.partition("/")[2] for name in demo if name.startswith(f"{model}/")
        }
    assert wheel.stat().st_size < LARGEST
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


@pytest.mark.full
def test_an_installed_package_decodes_from_anywhere(installed):
    code = (
        "import speccascade_jax as sc; assert sc.__file__.startswith({place!r}), sc.__file__\n"
        "print(next(iter(sc.load('demo').generate([{text!r}]))).text)"
    )
    said = run(installed, "python", "-c", code.format(place=str(installed / "venv"), text=SENTENCE))
    assert said.split() and said.strip() != SENTENCE
    assert said.strip() in run(installed, "speccascade", "decode", "--text", SENTENCE)
    for flags, code in (
        (["decode", "--config=e2e", "--text=x"], 2),
        (["decode", "--config=demo_shared", "--text=x"], 2),
        (["finetune", "--config=e2e_gemma_foreign_drafter"], 2),
    ):
        assert "clone of the repository" in run(installed, "speccascade", *flags, code=code)
    listed = run(installed, "speccascade", "decode", "--list")
    assert "demo" in listed and "wmt_small_large" in listed
    data = run(installed, "python", "-c", "from speccascade_jax.config import DATA; print(DATA)").strip()
    assert data == "data"
    metadata = run(
        installed,
        "python",
        "-c",
        "import importlib.metadata as m\n"
        "print(m.version('speccascade_jax'), m.metadata('speccascade_jax')['License-Expression'])",
    )
    assert metadata.split() == [speccascade_jax.__version__, "Apache-2.0"]
    assert sorted(path.name for path in installed.iterdir()) == ["venv"]
