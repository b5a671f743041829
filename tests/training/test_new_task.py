"""A task from a file of pairs: reading, splits, choices and files."""

import json

import pytest
from refusals import check_about

from speccascade_jax import config as configs
from speccascade_jax.commands import main
from speccascade_jax.core.errors import FieldError
from speccascade_jax.training import new_task
from speccascade_jax.training.checks import check
from speccascade_jax.training.new_task import fields_of, held_out, metric_of, read_pairs

PAIRS = [(f"{n} and {m}", str(n + m)) for n in range(20) for m in range(15)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a task is made: with PAIRS in pairs.jsonl."""
    monkeypatch.chdir(tmp_path)
    write("pairs.jsonl", *({"source": s, "target": t} for s, t in PAIRS))
    return tmp_path


def write(path, *lines):
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return str(path)


def test_the_same_pairs_are_read_from_every_format(folder):
    write("lists.jsonl", *map(list, PAIRS))
    write("named.jsonl", *({"id": n, "question": s, "answer": t} for n, (s, t) in enumerate(PAIRS)))
    write("other.jsonl", *({"id": n, "numbers": s, "sum": t} for n, (s, t) in enumerate(PAIRS)))
    write("many.jsonl", *({"note": "x", "numbers": s, "sum": {"total": t}} for s, t in PAIRS))
    (folder / "pairs.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    for name in ("pairs.jsonl", "lists.jsonl", "named.jsonl", "other.jsonl", "pairs.tsv"):
        assert read_pairs(name) == PAIRS
    assert read_pairs("many.jsonl", "numbers", "sum.total") == PAIRS


def test_ambiguous_fields_must_be_named():
    assert fields_of({"a": 1, "input": "x", "output": "y", "text": "z"}, "here") == ("input", "output")
    with pytest.raises(FieldError) as refused:
        fields_of({"a": "x", "b": "y", "c": "z"}, "here")
    check_about(refused.value, "source_field", None)


def test_no_source_is_in_two_splits():
    splits = held_out([*PAIRS, *((s, f"{t}!") for s, t in PAIRS), *PAIRS])
    sources = {name: {s for s, _ in pairs} for name, pairs in splits.items()}
    assert {name: len(split_sources) for name, split_sources in sources.items()} == {
        "train": 270,
        "validation": 15,
        "test": 15,
    }
    assert len(set().union(*sources.values())) == 300
    assert sum(map(len, splits.values())) == 600  # the third copy is dropped
    with pytest.raises(FieldError) as refused:
        held_out(PAIRS[:60])
    check_about(refused.value, "data", 60)


def test_short_targets_are_right_or_wrong_as_a_whole():
    assert metric_of(PAIRS) == "exact_match"
    assert metric_of([("a", "one two three four")] * 3) == "bleu"


def test_written_configs_can_be_trained(folder, capsys):
    assert main(["new", "sums", "--data=pairs.jsonl"]) == 0
    capsys.readouterr()
    verifier, drafter, pair = (configs.load(f"sums{role}") for role in ("_verifier", "_drafter", ""))
    check(verifier)
    assert verifier.task.metric == "exact_match" and verifier.tokenizer == "data/sums/spiece.model"
    assert drafter.teacher == "runs/sums_verifier/export" and drafter.task == verifier.task
    assert pair.task == "sums_verifier" and pair.verifier == drafter.teacher and len(pair.examples) == 3
    assert pair.max_source_length == verifier.task.max_source_length
    assert pair.max_new_tokens == verifier.task.max_target_length
    read = {name: read_pairs(f"data/sums/{name}.jsonl") for name in ("train", "validation", "test")}
    assert sorted(pair for pairs in read.values() for pair in pairs) == sorted(PAIRS)
    with pytest.raises(FieldError) as refused:
        check(drafter)
    check_about(refused.value, "teacher", drafter.teacher)


@pytest.mark.parametrize(
    "taken", ["configs/sums.py", "configs/sums_drafter.py", "data/sums", "runs/sums_verifier"]
)
def test_nothing_is_overwritten(folder, capsys, taken):
    path = folder / taken
    path.parent.mkdir()
    path.write_text("config = 1")
    before = sorted(folder.rglob("*"))
    assert main(["new", "sums", "--data=pairs.jsonl"]) == 2
    assert taken in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before and path.read_text() == "config = 1"


@pytest.mark.parametrize(
    "flags",
    [
        ("../sums", "--data=pairs.jsonl"),
        ("Sums", "--data=pairs.jsonl"),
        ("demo", "--data=pairs.jsonl"),
        ("sums", "--data=none.jsonl"),
        ("sums", "--data=pairs.csv"),
        ("sums", "--data=."),
        ("sums", "--data=few.jsonl"),
        ("sums", "--data=broken.jsonl"),
        ("sums", "--data=number.jsonl"),
        ("sums", "--data=pairs.jsonl", "--metric=none"),
        ("sums", "--data=pairs.jsonl", "--source-field=source"),
        ("sums", "--data=pairs.jsonl", "--source-field=a", "--target-field=b"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(folder, capsys, flags):
    write("few.jsonl", ["a", "b"], ["c", "d"])
    write("number.jsonl", *({"source": n, "target": "x"} for n in range(300)))
    (folder / "broken.jsonl").write_text("{")
    before = sorted(folder.rglob("*"))
    assert main(["new", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_a_fault_while_writing_leaves_nothing(folder, monkeypatch, capsys):
    before = sorted(path for path in folder.rglob("*") if path.is_file())

    def full(path, text):
        if path.name == "sums_drafter.py":
            raise OSError(28, "No space left on device", str(path))
        path.write_text(text)

    monkeypatch.setattr(new_task, "write_whole", full)
    assert main(["new", "sums", "--data=pairs.jsonl"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


def test_a_vocabulary_has_room_for_every_character(folder):
    """Of a script of thousands of characters, 512 pieces hold none."""
    lines = [[chr(0x4E00 + n) + chr(0x4E00 + n + 1), chr(0x4E00 + n)] for n in range(1500)]
    assert main(["new", "signs", f"--data={write('signs.jsonl', *lines)}"]) == 0
    assert configs.load("signs_verifier").model.vocab_size == 2048
