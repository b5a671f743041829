"""Tasks that a model without fine-tuning does by example: prompts, stop sequences, answers, scores.

The eight of the paper's Gemma 2 runs. TASKS is a literal table; a task's files are the defaults of
scripts/fewshot.py's flags.
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
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.evaluation.sandbox import run_program
from speccascade_jax.inference.inputs import check_text
from speccascade_jax.training.data import read_examples

Example = dict[str, Any]


class Scored(NamedTuple):
    figures: dict[str, float]  # 0 to 100
    each: list[Any]            # what each answer got, in order; empty where only all together have a score


Score = Callable[[Sequence[str], Sequence[Example]], Scored]  # of answers to examples
NO_ANSWER = "unanswerable"
TEXT, TEXTS, SOME_TEXTS = "a text", "a list of texts", "a list of texts, one or more"


@dataclasses.dataclass(frozen=True)
class Task:
    """How an example is asked and answered in a prompt, and how a model's answer is read and scored."""

    examples: str                          # file with the examples that are asked (data.read_examples)
    shot_pool: str                         # file with those that are shown
    shots: int
    question: Callable[[Example], str]     # ends where the answer begins
    answer: Callable[[Example], str]       # of an example that is shown, from its first character on
    read: Callable[[str], str]             # the answer in a model's output
    score: Score
    stop: tuple[str, ...]
    max_new_tokens: int
    fields: dict[str, str]                 # what every example of both files has: TEXT, TEXTS or SOME_TEXTS
    fixed_shots: tuple[int, ...] | None = None  # numbers in the pool, where the task's authors fixed them


class Prompts(NamedTuple):
    texts: list[str]
    examples: list[Example]
    shots: list[int]  # which of the pool are shown


def checked_examples(task: Task, path: str) -> list[Example]:
    """The examples of a file. Raises ValueError with the line of one that lacks a field of the task's."""
    examples = list(read_examples(path))
    for number, example in enumerate(examples, 1):
        for name, kind in task.fields.items():
            where = f"{path}, line {number}: `{name}`"
            value = example.get(name) if isinstance(example, dict) else None
            if kind == TEXT:
                check_text(value, where)
            elif not isinstance(value, list) or (not value and kind == SOME_TEXTS):
                raise ValueError(f"{where} is {reprlib.repr(value)}; it must be {kind}.")
            else:
                for n, one in enumerate(value, 1):
                    check_text(one, f"{where}, entry {n}")
    return examples


def build_prompts(task: Task, seed: int, limit: int | None = None) -> Prompts:
    """The prompts of the first `limit` examples: the shots, drawn from the pool with `seed`, then the
    question. Where both come from one file, the shots are not asked.

    Raises ValueError where the pool has too few, or nothing is left to ask.
    """
    pool = checked_examples(task, task.shot_pool)
    if len(pool) < task.shots:
        raise ValueError(f"{task.shot_pool} has {len(pool)} examples, {task.shots} are to be shown: lower "
                         "--shots, or give another --shot-pool.")
    if task.fixed_shots is not None and task.shots > len(task.fixed_shots):
        raise ValueError(f"the task's authors show {len(task.fixed_shots)} examples, {task.shots} are to be "
                         "shown: lower --shots, or give a --shot-pool.")
    chosen = list(task.fixed_shots or random.Random(seed).sample(range(len(pool)), task.shots))[:task.shots]
    shown = "".join(task.question(pool[n]) + task.answer(pool[n]) for n in chosen)
    same = task.examples == task.shot_pool
    asked = pool if same else checked_examples(task, task.examples)
    asked = [example for n, example in enumerate(asked) if not (same and n in chosen)][:limit]
    if not asked:
        raise ValueError(f"{task.examples} has no examples to ask: give other --inputs.")
    return Prompts([shown + task.question(example) for example in asked], asked, chosen)


# Answers and their scores

def normalized(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def normalized_trivia(text: str) -> str:
    """TriviaQA's: as SQuAD's, but punctuation (curly quotes too) becomes a space."""
    marks = string.punctuation + "\u2018\u2019\u00b4"
    text = "".join(" " if c in marks else c for c in text.lower())
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, gold: str) -> float:
    """F1 of the normalised words; of two empty answers 1 (SQuAD 2.0: Rajpurkar et al. 2018)."""
    words, right = normalized(answer).split(), normalized(gold).split()
    if not words or not right:
        return float(words == right)
    same = sum((Counter(words) & Counter(right)).values())
    return 2 * same / (len(words) + len(right))


def score_squad(answers: Sequence[str], examples: Sequence[Example]) -> Scored:
    """The official evaluation's `exact` and `f1`, over all and over those with and without an answer."""
    exact, f1 = [], []
    for answer, example in zip(answers, examples, strict=True):
        golds = [gold for gold in example["answers"] if normalized(gold)] or [""]
        exact.append(float(max(normalized(answer) == normalized(gold) for gold in golds)))
        f1.append(max(token_f1(answer, gold) for gold in golds))
    figures: dict[str, float] = {}
    for name, chosen in (("", lambda e: True), ("HasAns_", lambda e: bool(e["answers"])),
                         ("NoAns_", lambda e: not e["answers"])):
        which = [n for n, example in enumerate(examples) if chosen(example)]
        if which:
            figures |= {f"{name}exact": 100 * sum(exact[n] for n in which) / len(which),
                        f"{name}f1": 100 * sum(f1[n] for n in which) / len(which)}
    return Scored(figures, list(zip(exact, f1, strict=True)))


def exact_match(normal: Callable[[str], str]) -> Score:
    """Share of answers that equal one of the right ones under the normalisation."""
    def score(answers: Sequence[str], examples: Sequence[Example]) -> Scored:
        right = [normal(answer) in {normal(gold) for gold in example["answers"]}
                 for answer, example in zip(answers, examples, strict=True)]
        return Scored({"exact": 100 * sum(right) / len(right)}, right)

    return score


def final_number(text: str) -> str:
    """The number after the last "answer is", else the last number; "" where there is none. Without
    thousands separators, trailing zeros and a final point."""
    number = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
    said = re.findall(rf"answer is[^\d\-$.]*({number})", text) or re.findall(number, text)
    if not said:
        return ""
    plain = said[-1].replace(",", "").replace("$", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def score_gsm8k(answers: Sequence[str], examples: Sequence[Example]) -> Scored:
    right = [answer == final_number(example["final"])
             for answer, example in zip(answers, examples, strict=True)]
    return Scored({"accuracy": 100 * sum(right) / len(right)}, right)


def program_of(text: str) -> str:
    """The code in an output: what a fence holds, else all of it."""
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return (fenced.group(1) if fenced else text).strip("\n")


def score_mbpp(answers: Sequence[str], examples: Sequence[Example]) -> Scored:
    """Runs each program and its task's tests in the sandbox: the share that pass, and of each other end."""
    verdicts = [run_program(f"{answer}\n{example.get('test_setup_code') or ''}", example["test_list"])
                for answer, example in zip(answers, examples, strict=True)]
    ends = {"passed": 0, **Counter(verdict.outcome for verdict in verdicts)}
    return Scored({end: 100 * count / len(verdicts) for end, count in sorted(ends.items())}, verdicts)


def against_references(metric: str, field: str) -> Score:
    """A metric of quality.METRICS against the examples' `field`."""
    def score(answers: Sequence[str], examples: Sequence[Example]) -> Scored:
        return Scored({metric: METRICS[metric](answers, [[example[field]] for example in examples])}, [])

    return score


# Prompts

def first_line(text: str) -> str:
    return text.strip().split("\n")[0].strip()


def gsm8k_answer(example: Example) -> str:
    steps, _, number = re.sub(r"<<.*?>>", "", example["answer"]).partition("\n#### ")
    return f" {steps}\nThe answer is {number}.\n\n"


def squad_question(example: Example) -> str:
    return (f"Passage: {example['context']}\nQuestion: {example['question'].strip()} "
            f"(If the passage does not say, answer {NO_ANSWER}.)\nAnswer:")


def squad_read(text: str) -> str:
    line = first_line(text)
    return "" if line.lower().startswith(NO_ANSWER) else line


def mbpp_question(example: Example) -> str:
    tests = "\n".join(example["test_list"])  # the prompt of Austin et al. 2021
    return (f"You are an expert Python programmer, and here is your task: {example['text']} Your code should "
            f"pass these tests:\n\n{tests}\n[BEGIN]\n")


def open_question(example: Example) -> str:
    question = example["question"].strip()
    return f"Q: {question[:1].upper()}{question[1:].rstrip('?')}?\nA:"


def open_qa(examples: str, shot_pool: str, normal: Callable[[str], str] = normalized) -> Task:
    return Task(examples, shot_pool, 5, open_question, lambda example: f" {example['answers'][0]}\n\n",
                first_line, exact_match(normal), ("\n",), 32, {"question": TEXT, "answers": SOME_TEXTS})


TASKS = {
    "gsm8k": Task(
        f"{DATA}/gsm8k/test.jsonl.gz", f"{DATA}/gsm8k/train.jsonl.gz", 8,
        lambda example: f"Question: {example['question'].strip()}\nAnswer:", gsm8k_answer, final_number,
        score_gsm8k, ("\n\n", "\nQuestion:"), 320, {"question": TEXT, "answer": TEXT, "final": TEXT}),
    "mbpp": Task(
        f"{DATA}/mbpp/test.jsonl.gz", f"{DATA}/mbpp/prompt.jsonl.gz", 3, mbpp_question,
        lambda example: example["code"].replace("\r", "") + "\n[DONE]\n\n", program_of, score_mbpp,
        ("[DONE]",), 320, {"text": TEXT, "code": TEXT, "test_list": SOME_TEXTS},
        fixed_shots=(1, 2, 3)),  # tasks 2, 3 and 4, as Austin et al. 2021
    "squad2": Task(
        f"{DATA}/squad2_dev_half/validation.jsonl.gz", f"{DATA}/squad2_dev_half/validation.jsonl.gz", 4,
        squad_question, lambda example: f" {(example['answers'] or [NO_ANSWER])[0]}\n\n", squad_read,
        score_squad, ("\n",), 48, {"context": TEXT, "question": TEXT, "answers": TEXTS}),
    "webquestions": open_qa(f"{DATA}/webquestions/test.jsonl.gz", f"{DATA}/webquestions/train.jsonl.gz"),
    "naturalquestions": open_qa(f"{DATA}/nq_open/validation.jsonl.gz",
                                f"{DATA}/nq_open/efficientqa_dev.jsonl.gz"),
    "triviaqa": open_qa(f"{DATA}/triviaqa_sample/validation.jsonl.gz",
                        f"{DATA}/triviaqa_sample/validation.jsonl.gz", normalized_trivia),
    "wmt": Task(
        f"{DATA}/wmt_en_de_small/validation.jsonl.gz", f"{DATA}/wmt_en_de_small/train.jsonl.gz", 5,
        lambda example: f"English: {example['source']}\nGerman:", lambda example: f" {example['target']}\n\n",
        first_line, against_references("bleu", "target"), ("\n",), 128,
        {"source": TEXT, "target": TEXT}),
    "cnndm": Task(
        "hf://abisee/cnn_dailymail/3.0.0:validation", "hf://abisee/cnn_dailymail/3.0.0:train", 1,
        lambda example: f"Article: {example['article']}\nSummary:",
        lambda example: f" {example['highlights'].replace(chr(10), ' ')}\n\n", first_line,
        against_references("rouge2", "highlights"), ("\n",), 128, {"article": TEXT, "highlights": TEXT}),
}
