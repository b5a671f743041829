"""Prompts, answers and scores of the few-shot tasks; the script on a tiny pair."""

import dataclasses
import json
from pathlib import Path

import pytest
from refusals import check_about, refusals

from speccascade_jax.commands import fewshot as script
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.fewshot import (
    TASKS,
    build_prompts,
    final_number,
    normalized,
    normalized_trivia,
    program_of,
    score_squad,
    squad_read,
    task_of,
)
from speccascade_jax.training.data import read_examples

ASK = {
    "gsm8k": {"question": "How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5", "final": "5"},
    "squad2": {"context": "Normandy lies in France.", "question": "Where is it?", "answers": ["France"]},
    "triviaqa": {"question": "who wrote it", "answers": ["Tom Sawyer", "Sawyer"]},
    "wmt": {"source": "A dog.", "target": "Ein Hund schläft auf dem Sofa."},
    "cnndm": {"article": "It rained. All day.", "highlights": "Rain .\nAll day ."},
    "mbpp": {
        "text": "Write a function f that adds one.",
        "code": "def f(x):\r\n  return x + 1",
        "test_list": ["assert f(1) == 2"],
        "test_setup_code": "",
    },
}


@pytest.mark.parametrize(
    "text,expected",
    [
        ("5 apples and 7 pears. The answer is 12.\n\nQuestion: 99", "12"),
        ("so it is $1,234.50", "1234.5"),
        ("The answer is $3,000,000.", "3000000"),
        ("the answer is: -7", "-7"),
        ("18.00", "18"),
        ("none", ""),
        ("The answer is .5", ".5"),
        ("x = 10 - 3", "3"),
        ("The answer is 4. The answer is 5.", "5"),
        ("100", "100"),
    ],
)
def test_final_number(text, expected):
    assert final_number(text) == expected


def test_every_training_answer_of_gsm8k_reads_back_as_its_number():
    task = TASKS["gsm8k"]
    if not Path(task.shot_pool).is_file():
        pytest.skip("needs GSM8K")
    examples = list(read_examples(task.shot_pool))
    answers = [task.read(task.answer(example)) for example in examples]
    assert task.score(answers, examples).figures == {"accuracy": 100.0}
    assert not any("<<" in task.answer(example) or "####" in task.answer(example) for example in examples)


def test_normalisations():
    assert normalized("The U.S.A. -- a  'Land'!") == "usa land"
    assert normalized_trivia("The U.S.A. -- a  \u2018Land\u2019_s!") == "u s land s"
    task = TASKS["triviaqa"]
    golds = [{"answers": ["Tom Sawyer", "Sawyer"]}, {"answers": ["AC/DC"]}, {"answers": ["1988"]}]
    assert task.score(["the tom-sawyer", "AC DC", "in 1988"], golds).answers == [True, True, False]
    assert TASKS["webquestions"].score(["the tom-sawyer", "AC DC", "1988"], golds).answers == [
        False,
        False,
        True,
    ]


def test_squad_gives_the_official_numbers_on_cases_made_by_hand():
    cases = [
        (["the Norman Conquest", "Norman conquest of England"], "Norman conquest!"),
        ([], ""),
        ([], "the"),
        ([], "nobody"),
        (["1066"], ""),
        (["10 and 11", "10th and 11th centuries"], "in the 10th and 11th centuries"),
        (["The The"], "a"),
    ]
    marks = score_squad([answer for _, answer in cases], [{"answers": golds} for golds, _ in cases])
    assert marks.figures == pytest.approx(
        {  # printed by the official script's functions
            "exact": 57.142857142857146,
            "f1": 69.84126984126985,
            "HasAns_exact": 50.0,
            "HasAns_f1": 72.22222222222221,
            "NoAns_exact": 66.66666666666667,
            "NoAns_f1": 66.66666666666667,
        }
    )
    assert marks.answers[5] == (0.0, pytest.approx(8 / 9))
    assert squad_read(" Unanswerable.\nmore") == "" and squad_read(" in France\nQuestion") == "in France"


def test_squad_gives_the_official_numbers_on_real_questions():
    path = TASKS["squad2"].examples
    if not Path(path).is_file():
        pytest.skip("needs SQuAD 2.0")
    examples = list(read_examples(path))

    def guess(number, example):
        words, gold = example["question"].split(), (example["answers"] or [""])[-1]
        guesses = [gold, " ".join(words[:3]), f"The {gold} and {words[-1]}", "", f"an {gold.upper()}!"]
        return guesses[number % 5]

    marks = score_squad([guess(*item) for item in enumerate(examples)], examples)
    assert marks.figures == pytest.approx(
        {  # printed by the official script's functions
            "exact": 50.37841395195788,
            "f1": 57.26765239542979,
            "HasAns_exact": 40.103092783505154,
            "HasAns_f1": 54.492368130385934,
            "NoAns_exact": 59.81691919191919,
            "NoAns_f1": 59.81691919191919,
        }
    )


@pytest.mark.full
def test_programs(sandbox):
    assert program_of("def f(): pass\n") == "def f(): pass"
    assert program_of("Sure:\n```python\ndef f(): pass\n```\nDone") == "def f(): pass"
    task, example = TASKS["mbpp"], ASK["mbpp"]
    answers = [
        "def f(x): return x + 1",
        "def f(x): return x",
        "def f(x):\n  while True: pass",
        "print('",
        "import os\nfor _ in range(200): os.fork()",
    ]
    marks = task.score(answers, [example] * 5)
    assert [verdict.outcome for verdict in marks.answers] == ["passed", "failed", "time", "failed", "failed"]
    assert marks.figures == {"passed": 20.0, "failed": 60.0, "time": 20.0}


def with_files(name, folder):
    """The task on four examples of one kind, the same file for shots and questions."""
    task, path = TASKS[name], folder / "examples.jsonl"
    path.write_text("".join(json.dumps({**ASK[name], "n": n}) + "\n" for n in range(4)))
    return dataclasses.replace(task, examples=str(path), shot_pool=str(path), shots=2, fixed_shots=None)


@pytest.mark.parametrize("name", ASK)
def test_prompts_show_and_ask(name, tmp_path, request):
    if name == "mbpp":
        request.getfixturevalue("sandbox")
    task, example = with_files(name, tmp_path), ASK[name]
    prompts = build_prompts(task, seed=0)
    assert len(prompts.texts) == len(prompts.examples) == 2  # what is shown is not asked
    assert {example["n"] for example in prompts.examples}.isdisjoint(prompts.shots)
    question, answer = task.question(example), task.answer(example)
    assert prompts.texts[0] == (question + answer) * 2 + question
    assert not prompts.texts[0].endswith(" ")  # Gemma's pieces begin with their space
    first = min(at for stop in task.stop if (at := answer.find(stop)) >= 0)
    assert (
        task.score([task.read(answer[:first])] * 2, prompts.examples).figures[
            {"gsm8k": "accuracy", "wmt": "bleu", "cnndm": "rouge2", "mbpp": "passed"}.get(name, "exact")
        ]
        > 99
    )
    assert build_prompts(task, seed=0) == prompts
    assert {tuple(build_prompts(task, seed).shots) for seed in range(20)} > {tuple(prompts.shots)}
    with pytest.raises(FieldError) as refused:
        build_prompts(dataclasses.replace(task, shots=9), seed=0)
    assert (refused.value.field, refused.value.value) == ("shots", 9)


@pytest.mark.parametrize("value", [[], "x", None])
def test_a_damaged_example_is_refused_with_its_line(value, tmp_path):
    task = with_files("triviaqa", tmp_path)
    with open(task.examples, "a") as file:
        file.write(json.dumps(ASK["triviaqa"] | {"answers": value}) + "\n")
    with pytest.raises(FieldError) as refused:
        build_prompts(task, seed=0)
    assert "line 5" in refused.value.problem
    assert (refused.value.field, refused.value.value) == ("answers", value)


def test_examples_that_a_task_cannot_use_are_refused(tmp_path):
    task = with_files("triviaqa", tmp_path)
    fixed = dataclasses.replace(task, fixed_shots=(1,))
    other = tmp_path / "none.jsonl"
    other.write_text("")
    for broken, field, value in (
        (fixed, "shots", 2),
        (dataclasses.replace(task, examples=str(other)), "inputs", str(other)),
    ):
        with pytest.raises(FieldError) as refused:
            build_prompts(broken, seed=0)
        assert (refused.value.field, refused.value.value) == (field, value)
    with pytest.raises(FieldError) as refused:
        task_of("gsm")
    assert (refused.value.field, refused.value.value) == ("task", "gsm")


def test_an_example_that_cannot_be_scored_is_found_before_anything_is_decoded(tmp_path):
    def check(example):
        raise ValueError(f"number {example['n']}")

    with pytest.raises(ValueError, match="number"):
        build_prompts(dataclasses.replace(with_files("triviaqa", tmp_path), check=check), seed=0)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "cnndm"])
def test_every_file_present_makes_prompts(name):
    task = TASKS[name]
    if not Path(task.examples).is_file():
        pytest.skip(f"needs {task.examples}")
    prompts = build_prompts(task, seed=0, limit=20)
    assert len(prompts.shots) == task.shots and len(set(prompts.texts)) == 20
    for text, example in zip(prompts.texts, prompts.examples, strict=True):
        assert text.endswith(task.question(example)) and text.count(task.question(example)) == 1
    if name == "mbpp":
        assert prompts.shots == [1, 2, 3]


@pytest.mark.full
def test_the_script_scores_a_tiny_pair(gemma_pair, tmp_path):
    task = with_files("triviaqa", tmp_path)
    files = [
        f"--drafter={gemma_pair / 'drafter'}",
        f"--verifier={gemma_pair / 'verifier'}",
        "--tensor-parallel=1",
        f"--inputs={task.examples}",
        f"--shot-pool={task.shot_pool}",
        "--shots=1",
        "--dtype=float32",
        "--max-source-length=192",
    ]
    out = tmp_path / "out.jsonl"
    assert script.main(["--task=triviaqa", "--methods", "opt", "verifier", "--output", str(out), *files]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["method"] for line in lines] == ["opt"] * 4 + ["verifier"] * 4
    assert lines[3]["rejection_rate"] == 1 - lines[3]["acceptance_rate"]
    assert lines[7]["rejection_rate"] is None
    assert lines[3]["shots"] == build_prompts(dataclasses.replace(task, shots=1), 0).shots
    assert all("\n" not in line["output"] for line in lines if "output" in line)
    for name, about in (("mbpp", ("execute_code", False)), ("gsm", ("task", "gsm"))):
        with refusals() as errors:
            assert script.main([f"--task={name}", *files]) == 2
        check_about(errors[0], *about)


def test_one_more_entry_is_all_that_a_task_takes(tmp_path, monkeypatch):
    """The task's own files are used; requirements are named."""
    missing = ["--task=capitals", "--drafter=/nowhere", "--verifier=/nowhere"]
    task = dataclasses.replace(with_files("triviaqa", tmp_path), name="capitals")
    for changes, about in (
        ({}, ("drafter", "/nowhere")),
        ({"shots": 9}, ("shots", 9)),
        ({"executes": True}, ("execute_code", False)),
    ):
        monkeypatch.setitem(TASKS, "capitals", dataclasses.replace(task, **changes))
        with refusals() as errors:
            assert script.main(missing) == 2
        check_about(errors[0], *about)


def test_help_says_every_task(capsys):
    with pytest.raises(SystemExit):
        script.parse(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in TASKS)
