"""Few-shot tasks for models without fine-tuning: prompts, stop sequences, answers, scores.

TASKS declares each task once; they are those of the paper's Gemma 2 runs. The flags of scripts/fewshot.py,
their help and their checks derive from these entries, so a new task is one more entry.
"""

import dataclasses
import random
import re
import reprlib
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from speccascade_jax.config import DATA
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.evaluation.sandbox import parse_tests, run_program
from speccascade_jax.inference.inputs import check_text
from speccascade_jax.training.data import read_examples

Example = dict[str, Any]


class Marks(NamedTuple):
    """The scores of answers to a task's examples."""

    figures: dict[str, float]  # 0 to 100
    answers: list[Any]  # one per answer, in order; empty if only the whole set has a score


Score = Callable[[Sequence[str], Sequence[Example]], Marks]  # (answers, examples) -> Marks
NO_ANSWER = "unanswerable"
TEXT, TEXTS, SOME_TEXTS = "a text", "a list of texts", "a list of texts, one or more"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotTask:
    """A task's prompt format, and how a model's answers are read and scored."""

    name: str
    summary: str  # one sentence for help texts
    examples: str  # file with the questions (data.read_examples)
    shot_pool: str  # file with the examples to show
    shots: int
    question: Callable[[Example], str]  # ends where the answer begins
    answer: Callable[[Example], str]  # the answer that is shown for an example
    read: Callable[[str], str]  # extracts the answer from a model's output
    score: Score
    stop: tuple[str, ...]
    max_new_tokens: int
    fields: dict[str, str]  # fields of every example in both files: TEXT, TEXTS or SOME_TEXTS
    fixed_shots: tuple[int, ...] | None = None  # indices in the pool, if the task's authors fixed them
    executes: bool = False  # scoring runs the models' programs in a sandbox
    check: Callable[[Example], None] = lambda example: None  # raises ValueError if it cannot be scored


class Prompts(NamedTuple):
    texts: list[str]
    examples: list[Example]
    shots: list[int]  # the indices of the shots in the pool
    shown: str  # the common beginning of all texts: the shots with their answers


def checked_examples(task: FewShotTask, path: str) -> list[Example]:
    """The examples of a file. Raises FieldError, with the line number, if one lacks a field of the task."""
    examples = list(read_examples(path))
    for number, example in enumerate(examples, 1):
        for name, kind in task.fields.items():
            where = f"{path}, line {number}: `{name}`"
            value = example.get(name) if isinstance(example, dict) else None
            if kind == TEXT:
                check_text(value, where)
            elif not isinstance(value, list) or (not value and kind == SOME_TEXTS):
                raise FieldError(name, value, f"it must be {kind}.", f"{where} is {reprlib.repr(value)}")
            else:
                for entry, text in enumerate(value, 1):
                    check_text(text, f"{where}, entry {entry}")
    return examples


def build_prompts(task: FewShotTask, seed: int, limit: int | None = None) -> Prompts:
    """The prompts of the first `limit` examples: the shots, drawn from the pool with `seed`, then the
    question. If both come from the same file, shots are not used as questions.

    Raises FieldError if the pool has too few examples, no question is left, or one cannot be scored.
    """
    pool = checked_examples(task, task.shot_pool)
    if len(pool) < task.shots:
        raise FieldError(
            "shots",
            task.shots,
            "lower --shots, or give another --shot-pool.",
            f"{task.shot_pool} has {len(pool)} examples, {task.shots} are to be shown",
        )
    if task.fixed_shots is not None and task.shots > len(task.fixed_shots):
        raise FieldError(
            "shots",
            task.shots,
            "lower --shots, or give a --shot-pool.",
            f"the task's authors show {len(task.fixed_shots)} examples, {task.shots} are to be shown",
        )
    chosen = list(task.fixed_shots or random.Random(seed).sample(range(len(pool)), task.shots))[: task.shots]
    shots = "".join(task.question(pool[n]) + task.answer(pool[n]) for n in chosen)
    same = task.examples == task.shot_pool
    examples = pool if same else checked_examples(task, task.examples)
    examples = [example for n, example in enumerate(examples) if not (same and n in chosen)][:limit]
    if not examples:
        raise FieldError(
            "inputs", task.examples, "give other --inputs.", f"{task.examples} has no examples to ask"
        )
    for example in examples:
        task.check(example)
    return Prompts([shots + task.question(example) for example in examples], examples, chosen, shots)


# Answers and their scores


def normalized(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalized_trivia(text: str) -> str:
    """TriviaQA's normalisation: like SQuAD's, but punctuation, including curly quotes, becomes a space."""
    marks = string.punctuation + "\u2018\u2019\u00b4"
    text = "".join(" " if c in marks else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, gold: str) -> float:
    """The F1 of the normalised words; 1 for two empty answers (SQuAD 2.0: Rajpurkar et al. 2018)."""
    words, right = normalized(answer).split(), normalized(gold).split()
    if not words or not right:
        return float(words == right)
    same = sum((Counter(words) & Counter(right)).values())
    return 2 * same / (len(words) + len(right))


def score_squad(answers: Sequence[str], examples: Sequence[Example]) -> Marks:
    """The official `exact` and `f1`, over all examples and over those with and without an answer."""
    exact, f1 = [], []
    for answer, example in zip(answers, examples, strict=True):
        golds = [gold for gold in example["answers"] if normalized(gold)] or [""]
        exact.append(float(max(normalized(answer) == normalized(gold) for gold in golds)))
        f1.append(max(token_f1(answer, gold) for gold in golds))
    figures: dict[str, float] = {}
    for name, chosen in (
        ("", lambda e: True),
        ("HasAns_", lambda e: bool(e["answers"])),
        ("NoAns_", lambda e: not e["answers"]),
    ):
        which = [n for n, example in enumerate(examples) if chosen(example)]
        if which:
            figures |= {
                f"{name}exact": 100 * sum(exact[n] for n in which) / len(which),
                f"{name}f1": 100 * sum(f1[n] for n in which) / len(which),
            }
    return Marks(figures, list(zip(exact, f1, strict=True)))


def exact_match(normal: Callable[[str], str]) -> Score:
    """The share of answers that equal a correct one after normalisation."""

    def score(answers: Sequence[str], examples: Sequence[Example]) -> Marks:
        right = [
            normal(answer) in {normal(gold) for gold in example["answers"]}
            for answer, example in zip(answers, examples, strict=True)
        ]
        return Marks({"exact": 100 * sum(right) / len(right)}, right)

    return score


def final_number(text: str) -> str:
    """The number after the last "answer is", else the last number, without thousands separators, trailing
    zeros and a final point; "" if there is none."""
    number = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
    said = re.findall(rf"answer is[^\d\-$.]*({number})", text) or re.findall(number, text)
    if not said:
        return ""
    plain = said[-1].replace(",", "").replace("$", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def score_gsm8k(answers: Sequence[str], examples: Sequence[Example]) -> Marks:
    right = [
        answer == final_number(example["final"]) for answer, example in zip(answers, examples, strict=True)
    ]
    return Marks({"accuracy": 100 * sum(right) / len(right)}, right)


def program_of(text: str) -> str:
    """The code in an output: the contents of a fence if there is one, else all of it."""
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return (fenced.group(1) if fenced else text).strip("\n")


def score_mbpp(answers: Sequence[str], examples: Sequence[Example]) -> Marks:
    """Runs each program and its task's tests in the sandbox: the share that pass, and the share of each other
    outcome."""
    verdicts = [
        run_program(f"{answer}\n{example.get('test_setup_code') or ''}", example["test_list"])
        for answer, example in zip(answers, examples, strict=True)
    ]
    ends = {"passed": 0, **Counter(verdict.outcome for verdict in verdicts)}
    return Marks({end: 100 * count / len(verdicts) for end, count in sorted(ends.items())}, verdicts)


def check_tests(example: Example) -> None:
    """Raises ValueError for a test that cannot be judged."""
    parse_tests(example["test_list"])


def against_references(metric: str, field: str) -> Score:
    """Scores answers with a metric of quality.METRICS against the examples' `field`."""

    def score(answers: Sequence[str], examples: Sequence[Example]) -> Marks:
        return Marks({metric: METRICS[metric](answers, [[example[field]] for example in examples])}, [])

    return score


# Prompts


def first_line(text: str) -> str:
    return text.strip().split("\n")[0].strip()


def gsm8k_answer(example: Example) -> str:
    steps, _, number = re.sub(r"<<.*?>>", "", example["answer"]).partition("\n#### ")
    return f" {steps}\nThe answer is {number}.\n\n"


def squad_question(example: Example) -> str:
    return (
        f"Passage: {example['context']}\nQuestion: {example['question'].strip()} "
        f"(If the passage does not say, answer {NO_ANSWER}.)\nAnswer:"
    )


def squad_read(text: str) -> str:
    line = first_line(text)
    return "" if line.lower().startswith(NO_ANSWER) else line


def mbpp_question(example: Example) -> str:
    tests = "\n".join(example["test_list"])  # the prompt of Austin et al. 2021
    return (
        f"You are an expert Python programmer, and here is your task: {example['text']} Your code should "
        f"pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


def open_question(example: Example) -> str:
    question = example["question"].strip()
    return f"Q: {question[:1].upper()}{question[1:].rstrip('?')}?\nA:"


def _open_qa(
    name: str, summary: str, examples: str, shot_pool: str, normal: Callable[[str], str] = normalized
) -> FewShotTask:
    return FewShotTask(
        name=name,
        summary=summary,
        examples=examples,
        shot_pool=shot_pool,
        shots=5,
        question=open_question,
        answer=lambda example: f" {example['answers'][0]}\n\n",
        read=first_line,
        score=exact_match(normal),
        stop=("\n",),
        max_new_tokens=32,
        fields={"question": TEXT, "answers": SOME_TEXTS},
    )


TASKS = {
    task.name: task
    for task in (
        FewShotTask(
            name="gsm8k",
            summary="grade-school math word problems, answered step by step",
            examples=f"{DATA}/gsm8k/test.jsonl.gz",
            shot_pool=f"{DATA}/gsm8k/train.jsonl.gz",
            shots=8,
            question=lambda example: f"Question: {example['question'].strip()}\nAnswer:",
            answer=gsm8k_answer,
            read=final_number,
            score=score_gsm8k,
            stop=("\n\n", "\nQuestion:"),
            max_new_tokens=320,
            fields={"question": TEXT, "answer": TEXT, "final": TEXT},
        ),
        FewShotTask(
            name="mbpp",
            summary="short Python programs that must pass given tests",
            examples=f"{DATA}/mbpp/test.jsonl.gz",
            shot_pool=f"{DATA}/mbpp/prompt.jsonl.gz",
            shots=3,
            question=mbpp_question,
            answer=lambda example: example["code"].replace("\r", "") + "\n[DONE]\n\n",
            read=program_of,
            score=score_mbpp,
            stop=("[DONE]",),
            max_new_tokens=320,
            fields={"text": TEXT, "code": TEXT, "test_list": SOME_TEXTS},
            fixed_shots=(1, 2, 3),  # tasks 2, 3 and 4, as Austin et al. 2021
            executes=True,
            check=check_tests,
        ),
        FewShotTask(
            name="squad2",
            summary="questions about a passage, some of them unanswerable",
            examples=f"{DATA}/squad2_dev_half/validation.jsonl.gz",
            shot_pool=f"{DATA}/squad2_dev_half/validation.jsonl.gz",
            shots=4,
            question=squad_question,
            answer=lambda example: f" {(example['answers'] or [NO_ANSWER])[0]}\n\n",
            read=squad_read,
            score=score_squad,
            stop=("\n",),
            max_new_tokens=48,
            fields={"context": TEXT, "question": TEXT, "answers": TEXTS},
        ),
        _open_qa(
            "webquestions",
            "questions that search engines suggest",
            f"{DATA}/webquestions/test.jsonl.gz",
            f"{DATA}/webquestions/train.jsonl.gz",
        ),
        _open_qa(
            "naturalquestions",
            "questions that people have put to a search engine",
            f"{DATA}/nq_open/validation.jsonl.gz",
            f"{DATA}/nq_open/efficientqa_dev.jsonl.gz",
        ),
        _open_qa(
            "triviaqa",
            "questions of quizzes",
            f"{DATA}/triviaqa_sample/validation.jsonl.gz",
            f"{DATA}/triviaqa_sample/validation.jsonl.gz",
            normalized_trivia,
        ),
        FewShotTask(
            name="wmt",
            summary="English-to-German translation",
            examples=f"{DATA}/wmt_en_de_small/validation.jsonl.gz",
            shot_pool=f"{DATA}/wmt_en_de_small/train.jsonl.gz",
            shots=5,
            question=lambda example: f"English: {example['source']}\nGerman:",
            answer=lambda example: f" {example['target']}\n\n",
            read=first_line,
            score=against_references("bleu", "target"),
            stop=("\n",),
            max_new_tokens=128,
            fields={"source": TEXT, "target": TEXT},
        ),
        FewShotTask(
            name="cnndm",
            summary="news summaries",
            examples="hf://abisee/cnn_dailymail/3.0.0:validation",
            shot_pool="hf://abisee/cnn_dailymail/3.0.0:train",
            shots=1,
            question=lambda example: f"Article: {example['article']}\nSummary:",
            answer=lambda example: f" {example['highlights'].replace(chr(10), ' ')}\n\n",
            read=first_line,
            score=against_references("rouge2", "highlights"),
            stop=("\n",),
            max_new_tokens=128,
            fields={"article": TEXT, "highlights": TEXT},
        ),
    )
}
"""The tasks by name."""


def task_of(name: str) -> FewShotTask:
    """The task of that name. Raises FieldError if TASKS lacks it."""
    task = TASKS.get(name)
    if task is None:
        raise FieldError("task", name, f"known: {', '.join(TASKS)}.", f"unknown task {name!r}")
    return task
