"""Made word problems, solved again from their statements; no graph with its numbers is in two splits."""

import itertools
import re

import pytest

from speccascade_jax.config import load
from speccascade_jax.core.errors import FieldError
from speccascade_jax.evaluation.quality import METRICS
from speccascade_jax.tokenizers.tokenizer import Tokenizer, train_tokenizer
from speccascade_jax.training import word_problems
from speccascade_jax.training.checks import check_split
from speccascade_jax.training.data import read_examples
from speccascade_jax.training.word_problems import SPLITS, Problems, parse

STATEMENTS = (
    (r"There are (\d+) (\w+)\.", lambda n, x: (x, lambda of: int(n))),
    (r"There are (\d+) more (\w+) than (\w+)\.", lambda n, x, y: (x, lambda of: of(y) + int(n))),
    (r"There are (\d+) fewer (\w+) than (\w+)\.", lambda n, x, y: (x, lambda of: of(y) - int(n))),
    (r"There are twice as many (\w+) as (\w+)\.", lambda x, y: (x, lambda of: 2 * of(y))),
    (r"There are three times as many (\w+) as (\w+)\.", lambda x, y: (x, lambda of: 3 * of(y))),
    (r"There are as many (\w+) as (\w+) and (\w+) together\.", lambda x, y, z: (x, lambda of: of(y) + of(z))),
)


def solved(source):
    """The answer, read from the statements by a reader that shares no code with the generator, and the names
    that it took."""
    *statements, question = re.findall(r"[^.?]+[.?]", source)
    known = {}
    for statement in statements:
        matches = [(re.fullmatch(p, statement.strip()), build) for p, build in STATEMENTS]
        ((match, build),) = [(match, build) for match, build in matches if match]
        name, value = build(*match.groups())
        assert name not in known
        known[name] = value
    taken = set()

    def of(name):
        taken.add(name)
        return known[name](of)

    return of(re.fullmatch(r"How many (\w+) are there\?", question.strip())[1]), taken


@pytest.mark.parametrize(
    "query", ["operations=1", "operations=2-6&distractors=3", "operations=8&largest=60&order=forward"]
)
def test_solutions_are_right(query):
    problems = parse(f"{query}&examples=300")
    for example in word_problems.examples(problems):
        answer, taken = solved(example["source"])
        *steps, last = example["target"].removesuffix(".").split(". ")
        assert last == f"The answer is {answer}"
        assert len(steps) == example["operations"]
        named = [step.split(" = ")[0] for step in steps]
        assert len(set(named)) == len(named) and set(named) <= taken
        values = {}
        for step in steps:
            name, by_name, by_value, value = step.split(" = ")
            number, unit = value.split()
            values[name] = int(number)
            assert unit == name
            assert eval(by_value) == values[name] <= problems.largest
            for word in re.findall("[a-z]+", by_name):  # only what is known by then
                if word in named:
                    assert named.index(word) < named.index(name)


@pytest.mark.full
def test_splits_have_no_problem_in_common():
    """Also by graph and numbers alone, whatever the objects are called."""

    def canonical(example):
        names = {}
        return re.sub(
            r"[a-z]{3,}", lambda word: names.setdefault(word[0], f"x{len(names)}"), example["target"]
        )

    made = {
        split: {canonical(e) for e in word_problems.examples(Problems(split, "2-3", "0-1", 1500))}
        for split in SPLITS
    }
    for a, b in itertools.combinations(made, 2):
        assert not made[a] & made[b], (a, b)
    assert all(len(problems) > 400 for problems in made.values())


@pytest.mark.parametrize("order,after", [("forward", True), ("random", False)])
def test_the_order_of_statements(order, after):
    """forward: a statement mentions only what an earlier one has introduced."""
    in_order = []
    for example in word_problems.examples(parse(f"operations=4-6&distractors=2&order={order}&examples=100")):
        introduced = set()
        for statement in re.findall(r"[^.?]+\.", example["source"]):
            matches = [(re.fullmatch(p, statement.strip()), build) for p, build in STATEMENTS]
            ((match, build),) = [(match, build) for match, build in matches if match]
            taken = []
            name, value = build(*match.groups())
            value(lambda other, taken=taken: taken.append(other) or 0)
            in_order.append(introduced.issuperset(taken))
            introduced.add(name)
    assert all(in_order) == after


def test_a_seed_makes_the_same_problems():
    first, again, other = (
        list(read_examples(f"made://word_problems?examples=50&seed={seed}")) for seed in (1, 1, 2)
    )
    assert first == again
    assert not {e["source"] for e in first} & {e["source"] for e in other}


@pytest.mark.parametrize(
    "query,field",
    [
        ("split=dev", "split"),
        ("operations=0", "operations"),
        ("operations=3-2", "operations"),
        ("operations=two", "operations"),
        ("distractors=99", "distractors"),
        ("examples=0", "examples"),
        ("examples=-1", "examples"),
        ("largest=3", "largest"),
        ("order=backward", "order"),
        ("size=3", "size"),
    ],
)
def test_impossible_problems_are_refused_before_the_run(query, field):
    with pytest.raises(FieldError) as error:
        check_split("train", f"made://word_problems?{query}")
    assert error.value.field == field


@pytest.mark.full
def test_the_pair_reads_a_word_at_a_time(tmp_path):
    """One token for each word and number; the longest problems of the test split are within the limits."""
    config, decoding = load("word_problems_verifier"), load("word_problems")
    task, path = config.task, tmp_path / "words.model"

    def texts(split, count):
        few = f"{split.rpartition('=')[0]}={count}"
        return [(e["source"] + task.suffix, e["target"]) for e in read_examples(few)]

    made = [text for pair in texts(task.train, 3000) for text in pair]
    train_tokenizer(made, path, config.tokenizer_size, bos=True, pieces=config.tokenizer_pieces)
    tokenizer = Tokenizer(path)
    assert tokenizer.size <= config.model.vocab_size == load("word_problems_drafter").model.vocab_size
    for source, target in texts(task.test, 500):
        for text, limit in ((source, task.max_source_length), (target, task.max_target_length)):
            tokens = tokenizer.encode_batch([text])[0]
            assert len(tokens) == len(re.findall(r"\w+|[^\w\s]", text)) < limit
            assert tokenizer.decode(tokens) == text
    assert decoding.max_source_length == task.max_source_length
    assert (decoding.max_new_tokens, decoding.suffix) == (task.max_target_length, task.suffix)


def test_an_unknown_maker_is_refused():
    with pytest.raises(FieldError) as error:
        check_split("train", "made://riddles?examples=3")
    assert (error.value.field, error.value.value) == ("made", "riddles")


def test_answers_and_steps_are_counted():
    reference = [["pears = 2 + 3 = 5. nuts = 2 * 5 = 10. The answer is 10."]]
    texts = {
        "pears = 2 + 3 = 5. nuts = 2 * 5 = 10. The answer is 10.": (100, 100),
        "nuts = 2 * 5 = 10. The answer is 10.": (100, 200 / 3),
        "pears = 2 + 3 = 5. nuts = 2 * 5 = 11. The answer is 11.": (0, 100 / 3),
        "The answer is 10. But I doubt it.": (0, 100 / 3),
        "": (0, 0),
    }
    for text, (answer, steps) in texts.items():
        assert METRICS["final_answer"]([text], reference) == answer
        assert METRICS["right_steps"]([text], reference) == pytest.approx(steps)
