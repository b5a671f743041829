"""Config files: every mistake is reported in a sentence that names the file."""

import contextlib
import dataclasses
import os

import pytest

import speccascade_jax
from speccascade_jax import config as configs
from speccascade_jax.config import LONGEST_SOURCE, ConfigError, DecodeConfig, TrainConfig
from speccascade_jax.core.errors import FieldError

PAIR = "from speccascade_jax.config import DecodeConfig\nconfig = DecodeConfig(drafter='a', verifier='b'{})\n"
RUN = """from speccascade_jax.config import *
from speccascade_jax.models.t5 import T5Config
config = TrainConfig('a', 'b', {}, {})
"""


def wrong_field(text):
    return PAIR.format(f", {text}")


WRONG = {  # what a file holds, and what is said of it
    "syntax": ("config = (", r"line 1: SyntaxError: '\(' was never closed"),
    "exception": ("x = 1\nconfig = x / 0", "line 2: ZeroDivisionError: division by zero"),
    "no such name": ("config = Decode()", "line 1: NameError: name 'Decode' is not defined"),
    "no such module": ("import nowhere", "line 1: ModuleNotFoundError: No module named 'nowhere'"),
    "sys.exit": ("import sys\nsys.exit(0)", "line 2: SystemExit: 0"),
    "exit with words": ("raise SystemExit('bye')", "line 1: SystemExit: bye"),
    "generator": ("raise GeneratorExit", "line 1: GeneratorExit"),
    "several lines": ("raise ValueError('one\\ntwo')", "line 1: ValueError: one two"),
    "a book": ("raise ValueError('word ' * 10_000)", "line 1: ValueError: word"),
    "unprintable": ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "line 4: "),
    "markup": ("raise ValueError('[/] [red] :smile:')", r"ValueError: \[/\] \[red\] :smile:"),
    "empty": ("", "defines no `config`"),
    "none": ("config = None", "defines no `config`"),
    "a dict": ("config = {'drafter': 'a'}", "`config` is {'drafter': 'a'}; it must be a DecodeConfig, a "),
    "a class": ("from speccascade_jax.config import DecodeConfig as config", "it must be a DecodeConfig, a "),
    "missing fields": (PAIR.replace("drafter='a', ", "").format(""), "line 2: no models; "),
    "unknown field": (wrong_field("gamma=5"), "line 2: TypeError: .*'gamma'"),
    "text for int": (wrong_field("batch_size='4'"), "batch_size is '4'; its type is int"),
    "bool for int": (wrong_field("block_size=True"), "block_size is True; its type is int"),
    "float for int": (wrong_field("seed=0.5"), "seed is 0.5; its type is int"),
    "none for float": (wrong_field("alpha=None"), "alpha is None; its type is float"),
    "int for bool": (wrong_field("truncate=1"), "truncate is 1; its type is bool"),
    "int for optional text": (wrong_field("task=3"), r"task is 3; its type is str \| None"),
    "text for optional int": (wrong_field("top_k='3'"), r"top_k is '3'; its type is int \| None"),
    "number for a word": (wrong_field("vocabulary=1.5"), "vocabulary is 1.5; known: auto, tli"),
    "text for texts": (wrong_field("examples='abc'"), r"examples is 'abc'; its type is tuple\[str, ...\]"),
    "list for texts": (wrong_field("stop=['a']"), r"stop is \['a'\]; its type is tuple\[str, ...\]"),
    "numbers for texts": (wrong_field("stop=(1,)"), r"stop is \(1,\); its type is tuple\[str, ...\]"),
    "path": (wrong_field("tokenizer=__import__('pathlib').Path('x')"), "tokenizer is PosixPath"),
    "task of a run": (RUN.format("T5Config()", "Task(1, '', '')"), "train is 1; its type is str"),
    "model of a run": (RUN.format("T5Config(d_model='x')", "Task('', '', '')"), "d_model"),
    "no model": (RUN.format("'t5'", "Task('', '', '')"), "model is 't5'; its type is "),
    "half a character": (wrong_field("router='\\ud800'"), "router is .*Unicode"),
    "half a character in texts": (wrong_field("stop=('a', '\\udcff')"), "stop is .*Unicode"),
    "half a character of a task": (
        RUN.format("T5Config()", "Task('a', 'b', '\\ud800')"),
        "test is .*Unicode",
    ),
    "digits": (wrong_field("alpha=10**400"), "alpha is .* 1329 bits"),
    "digits of levels": (wrong_field("alpha=(0.1, -10**400)"), "alpha is .* 1329 bits"),
    "digits that cannot be printed": (wrong_field("seed=10**6000"), "seed is .* 19932 bits"),
    "itself": ("import runpy\nrunpy.run_path(__file__)", "RecursionError: maximum recursion depth"),
    "itself by load": ("from speccascade_jax.config import load\nconfig = load(__file__)", "RecursionError"),
    "nested": ("x = " + "(" * 5000 + ")" * 5000, "line 1: "),
    "no UTF-8": (b"config = 'caf\xe9'\n", "SyntaxError"),
    "nothing but zeros": (b"\0\0\0", "null bytes"),
    "huge": (b"#" * 3_000_000, "has 3000000 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_config_is_one_sentence_with_the_file(case, tmp_path):
    content, words = WRONG[case]
    path = tmp_path / "mine.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words) as error:
        configs.load(str(path))
    said = str(error.value)
    assert said.count(str(path)) == 1 and "\n" not in said and said.endswith(".") and len(said) < 400


def test_only_regular_files_are_configs(tmp_path):
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "fifo.py")
    for name in (
        str(tmp_path / "folder.py"),
        str(tmp_path / "fifo.py"),
        str(tmp_path / "nowhere.py"),
        "x" * 5000,
        "x" * 5000 + ".py",
        "",
        ".py",
        "\0.py",
        "[/red]",
    ):
        with pytest.raises(ConfigError, match="no config "):
            configs.load(name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_config_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("config = 1")
    path.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        configs.load(str(path))


def test_an_interrupt_is_not_converted(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt, match=f"while {path} ran"):
        configs.load(str(path))


def test_a_configs_prints_are_not_output(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("print('hello')\n" + PAIR.format(""))
    assert configs.load(path) == DecodeConfig(drafter="a", verifier="b")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_config_that_loads_a_broken_one_names_the_broken_one(tmp_path):
    (tmp_path / "broken.py").write_text("config = 1 / 0")
    path = tmp_path / "mine.py"
    path.write_text(f"from speccascade_jax.config import load\nconfig = load('{tmp_path / 'broken.py'}')")
    with pytest.raises(ConfigError) as error:
        configs.load(str(path))
    assert str(error.value) == f"{tmp_path / 'broken.py'}, line 1: ZeroDivisionError: division by zero."


def test_a_config_of_the_wrong_kind_suggests_the_right_one():
    for training, pair in (
        ("demo_verifier", "demo"),
        ("demo_drafter", "demo"),
        ("e2e_gemma_drafter", "e2e_gemma"),
    ):
        with pytest.raises(ValueError, match=f"{training} is a training run, .* that uses it: {pair}\\.$"):
            speccascade_jax.load(training)
    with pytest.raises(ValueError, match=r"demo is a pair to decode with, .*; name demo_verifier"):
        configs.load("demo", TrainConfig)


def test_every_config_that_comes_with_the_package_is_right():
    assert {"demo", "demo_verifier"} <= configs.available().keys()
    for name in configs.available():
        config = configs.load(name)
        if isinstance(config, DecodeConfig):
            config.check()


OUT_OF_RANGE = [
    ("batch_size", 0),
    ("max_source_length", -1),
    ("max_new_tokens", 2**31),
    ("max_new_tokens", 1_000_000),
    ("max_source_length", 2**31 - 1),
    ("max_source_length", LONGEST_SOURCE + 1),
    ("alpha", 10**400),
    ("temperature", 10**400),
    ("seed", -(10**6000)),
    ("router", "\ud800"),
    ("tokenizer", "a\udcff"),
    ("drafter", "\ud800"),
    ("block_size", "sometimes"),
    ("max_block_size", 0),
    ("stop_below", 1.5),
    ("block_size", 2**70),
    ("block_size", 1_000_000),
    ("tensor_parallel", 0),
    ("alpha", float("nan")),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("seed", 2**63),
    ("dtype", "float64"),
    ("method", "no"),
    ("stop", ("",)),
    ("top_p", float("nan")),
    ("min_p", -1.0),
    ("top_k", 0),
]


@pytest.mark.parametrize("name,value", OUT_OF_RANGE, ids=range(len(OUT_OF_RANGE)))
def test_values_out_of_range_are_refused_before_models_are_loaded(name, value):
    for method in ("verifier", "token_v3"):
        run = DecodeConfig(drafter="a", verifier="b", method=method)
        run.check()
        dataclasses.replace(run, max_source_length=LONGEST_SOURCE).check()
        with pytest.raises(FieldError) as error:
            dataclasses.replace(run, **{name: value}).check()
        assert name in (error.value.field, "max_new_tokens")


def test_configs_are_found_if_the_current_folder_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    with contextlib.chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        assert "demo" in configs.available()


@pytest.mark.parametrize("field", ["prefix", "suffix"])
def test_half_a_character_is_refused(field):
    with pytest.raises(FieldError) as error:
        dataclasses.replace(configs.load("demo"), **{field: "a\ud800"}).check()
    assert (error.value.field, error.value.value) == (field, "a\ud800")
