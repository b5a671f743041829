"""The documentation is correct: its code runs, and the things that it names exist."""

import ast
import datetime
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax.commands import main
from speccascade_jax.config import ConfigError, DecodeConfig, load
from speccascade_jax.core.divergences import DIVERGENCES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "speccascade_jax"
README, EXTENDING = ROOT / "README.md", ROOT / "docs" / "reference" / "extending.md"
PAGES = [README, ROOT / "speccascade_jax" / "demo" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ELSEWHERE = re.compile(r"\bSPEC\b|\bDESIGN\b|\bALGORITHMS\b|\bMODELS\.md\b|\bTPU\.md\b")


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def run(page: Path, modules: list[str]) -> dict[str, object]:
    """Runs a page's blocks one after the other. One that begins with the path of a file becomes that module,
    and its name is added to `modules`."""
    shared: dict[str, object] = {"__name__": page.stem}
    for number, code in enumerate(blocks(page), 1):
        program = compile(code, f"{page.name}, block {number}", "exec")
        path = re.match(r"# (speccascade_jax/\S+)\.py\n", code)
        if path is None:
            exec(program, shared)
            continue
        name = path[1].replace("/", ".")
        package, _, leaf = name.rpartition(".")
        module = sys.modules[name] = ModuleType(name)
        modules.append(name)
        exec(program, vars(module))
        setattr(sys.modules[package], leaf, module)
    return shared


@pytest.fixture
def modules():
    """Names of modules that a test makes; they are gone after it."""
    made: list[str] = []
    yield made
    for name in made:
        package, _, leaf = name.rpartition(".")
        del sys.modules[name]
        if hasattr(sys.modules[package], leaf):
            delattr(sys.modules[package], leaf)


@pytest.mark.full
def test_the_readmes_code_runs(modules, capsys):
    assert len(blocks(README)) == 1
    run(README, modules)
    assert "Bahnhof" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "count", "printed"),
    [
        ("index.md", 1, "Bahnhof"),
        ("guide/first-texts.md", 3, "Bahnhof"),
        ("guide/extend.md", 2, "4 of 10 deferred"),
        ("reference/decoding.md", 1, "Guten Morgen"),
        ("reference/training.md", 3, ""),
    ],
)
def test_a_pages_code_runs(name, count, printed, modules, capsys):
    page = ROOT / "docs" / name
    assert len(blocks(page)) == count
    run(page, modules)
    assert printed in capsys.readouterr().out


def test_the_script_of_your_own_task_writes_the_pairs(modules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(ROOT / "docs" / "guide" / "your-own-task.md", modules)
    pairs = [json.loads(line) for line in (tmp_path / "dates.jsonl").read_text().splitlines()]
    assert len({pair["source"] for pair in pairs}) == 20_000
    assert all(datetime.date.fromisoformat(pair["target"]) for pair in pairs)


@pytest.mark.full
def test_the_clients_of_the_pages_are_answered(modules, monkeypatch, capsys):
    """serve.md and serving.md: the blocks as they are, but for the server's address."""
    client, served_toys = pytest.importorskip("openai").OpenAI, importlib.import_module("served_toys")
    cascade, config = sc.load("demo"), load("demo", DecodeConfig)
    model = served_toys.ServedModel("demo", config, cascade, ("token_v3",), 2)
    with served_toys.serving(model) as (url, _):

        def at_hand(base_url: str, api_key: str) -> object:
            assert base_url == "http://localhost:8000/v1"
            return client(base_url=f"{url}/v1", api_key=api_key)

        monkeypatch.setattr("openai.OpenAI", at_hand)
        for name in "guide/serve.md", "reference/serving.md":
            page = ROOT / "docs" / name
            assert len(blocks(page)) == 1
            run(page, modules)
            assert "Bahnhof" in capsys.readouterr().out


@pytest.mark.full
def test_a_published_pair_is_loaded_by_its_names(modules, tmp_path, monkeypatch):
    """The hub's models are small ones in folders; everything else is as pasted."""
    folders = {"Qwen/Qwen3-4B": tmp_path / "verifier", "Qwen/Qwen3-0.6B": tmp_path / "drafter"}
    for name, folder in zip(
        ("word_problems_verifier", "word_problems_drafter"), folders.values(), strict=True
    ):
        shutil.copytree(PACKAGE / "demo" / name, folder)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setattr("speccascade_jax.checkpoints.at_hub", folders.get)
    cascade = run(ROOT / "docs" / "guide" / "published-models.md", modules)["cascade"]
    assert isinstance(cascade, sc.Cascade) and len(cascade.models) == 2


SUMMARY = re.compile(
    r"^│? *(acceptance_rate|tokens_per_verifier_call|deferral_rate) +│? *([\d.]+)", re.MULTILINE
)


def pasted_summaries(page: Path) -> Iterator[tuple[list[str], dict[str, str], str]]:
    """Each bash block that ends with decode.py and is followed by what it prints: its commands, the figures,
    and the text before them."""
    shown = re.compile(r"```bash\n((?:(?!```).)*)```\n+```\n((?:(?!```).)*)```", re.DOTALL)
    for code, printed in shown.findall(page.read_text(encoding="utf-8")):
        commands = code.replace("\\\n", " ").replace(" && ", "\n").strip().splitlines()
        if re.match(r"(python scripts/|speccascade )decode", commands[-1]) and SUMMARY.search(printed):
            yield commands, dict(SUMMARY.findall(printed)), SUMMARY.split(printed)[0]


def wrongly_pasted(page: Path, commands: list[str], figures: dict[str, str], out: str) -> list[str]:
    """The figures of a page that are not what its command has printed."""
    printed = dict(SUMMARY.findall(out))
    return [
        f"{page.name}: `{commands[-1]}` prints {name} {printed.get(name)}, not {value}"
        for name, value in figures.items()
        if printed.get(name) != value
    ]


PASTED = [
    README,
    *(ROOT / "docs" / "guide" / f"{name}.md" for name in ("install", "first-texts", "published-models")),
]


@pytest.mark.full
@pytest.mark.parametrize("page", PASTED, ids=lambda page: page.stem)
def test_pasted_summaries_match_the_output(page, tmp_path, monkeypatch, capsys):
    """Of pages whose commands need only the shipped pair."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speccascade_jax").symlink_to(PACKAGE)
    summaries = list(pasted_summaries(page))
    assert summaries
    for commands, figures, before in summaries:
        for command in commands:
            if known := re.match(r"(?:python scripts/|speccascade )(\w+)(?:\.py)?(.*)", command):
                assert main([known[1], *shlex.split(known[2])]) == 0, command
        out = capsys.readouterr().out
        assert wrongly_pasted(page, commands, figures, out) == []
        texts = [line for line in before.splitlines() if line and line != "..." and "written by" not in line]
        assert texts and all(line in out for line in texts)


def test_a_stale_figure_is_detected():
    out = "│ acceptance_rate          │ 0.833 │\n│ deferral_rate            │ 0.167 │\n"
    pasted = {"acceptance_rate": "0.833", "deferral_rate": "0.333"}
    [wrong] = wrongly_pasted(README, ["speccascade decode"], pasted, out)
    assert "deferral_rate 0.167, not 0.333" in wrong


@pytest.mark.full
def test_the_examples_of_extending_work(modules, tmp_path):
    """A rule and a sampler follow their laws (the page's own checks); the family is its authors' Gemma."""
    from speccascade_jax import checkpoints
    from speccascade_jax.checkpoints import decoder, families

    row = run(EXTENDING, modules)["row"]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.GemmaForCausalLM(
        transformers.GemmaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=6,
            pad_token_id=0,
            initializer_range=0.3,
        )
    ).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(decoder.DECODER_SPELLINGS, "gemma", row)
        patched.setitem(families.MODEL_FAMILIES, "gemma", families.decoder_row(row))
        model, params, *_ = checkpoints.load(tmp_path)
    assert model.config.family == "gemma"
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    _, cache = model.prefill(params, jnp.array(tokens[:, :1]), jnp.array([1]), 9)
    ours, _ = model.extend(params, jnp.array(tokens), cache)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4)


COMMAND = re.compile(
    r"^ *(?:python scripts/(\w+)\.py|speccascade (\w+))(.*?)(?: +#.*| && .*)?$", re.MULTILINE
)


def refused_commands(code: str) -> list[str]:
    """Which of a block's commands their parsers refuse. A config that the page's reader has yet to make, and
    commands that parse while they work, are passed over."""
    refused = []
    for script, installed, flags in COMMAND.findall(code.replace("\\\n", " ")):
        command = importlib.import_module(f"speccascade_jax.commands.{script or installed}")
        try:
            getattr(command, "parse", list)(shlex.split(flags))
        except ConfigError:
            continue
        except (SystemExit, ValueError):
            refused.append(" ".join([script or installed, *flags.split()]))
    return refused


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_understood(page):
    """Every flag exists and accepts the value on the page."""
    assert [command for code in blocks(page, "bash") for command in refused_commands(code)] == []


def test_a_planted_command_is_refused():
    planted = (
        "python scripts/decode.py --block-sizes 3  # a sweep's\nspeccascade decode --config=mine --text a\n"
    )
    assert refused_commands(planted) == ["decode --block-sizes 3"]
    assert refused_commands("python scripts/plan.py \\\n    --limit many && ls") == ["plan --limit many"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_no_missing_document_is_cited():
    folders = "speccascade_jax", "scripts", "configs", "tests"
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    for path in [*PAGES, ROOT / "mkdocs.yml", *sources]:
        match = ELSEWHERE.search(path.read_text(encoding="utf-8"))
        assert match is None, f"{path.relative_to(ROOT)} cites {match[0]}"


CITED = re.compile(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)*)\.([A-Za-z_]\w*)")
OBJECTS = {"cache", "config", "engine", "scheduler"}
"""Modules whose names stand for an object in docstrings, too."""


def modules_by_name() -> dict[str, list[str]]:
    """Every module and folder of the package by the last part of its name."""
    names: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names.setdefault(name.rpartition(".")[2], []).append(name)
    return names


def prose(source: str) -> Iterator[str]:
    """The docstrings and comments of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def leads_nowhere(source: str, known: dict[str, list[str]]) -> list[str]:
    """Which `module.name` of a file's docstrings and comments is in no module of that name."""

    def is_there(module: str, name: str) -> bool:
        return hasattr(importlib.import_module(module), name) or f"{module}.{name}" in known.get(name, ())

    return [
        cited[0]
        for text in prose(source)
        for cited in CITED.finditer(text)
        if (last := cited[1].rpartition(".")[2]) in known
        and not OBJECTS & set(cited[1].split("."))
        and not re.match(r"(json|jsonl|md|py|model)\b", cited[2])
        and not any(is_there(module, cited[2]) for module in known[last])
    ]


def test_names_in_docstrings_exist():
    known = modules_by_name()
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := leads_nowhere(path.read_text(), known))
    }
    assert not wrong
    for planted in ("# see rates.no_such_function", 'def f():\n    """As metrics.relative_cost."""'):
        assert len(leads_nowhere(planted, known)) == 1
    assert not leads_nowhere("# rates.relative_cost, core.loop, configs/demo.py, config.json", known)


def test_every_divergence_has_its_row():
    page = (ROOT / "docs" / "reference" / "training.md").read_text(encoding="utf-8")
    for name, entry in DIVERGENCES.items():
        assert f"| `{name}` | " in page and entry.summary


def test_every_page_is_in_the_navigation():
    """mkdocs --strict does not report a page that is not linked."""
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    assert listed == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}


def test_the_site_builds(tmp_path):
    """Without a warning: an index such as `counts[i][n]` in a docstring is read as a link."""
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
