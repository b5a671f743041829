"""The law under load: sampled answers of one prompt, while others of all kinds come and go, by chi-square."""

import concurrent.futures
import dataclasses
import random

import numpy as np
import pytest
from joint_laws import FAIL_BELOW
from served_toys import ask, serving, toy_lookup, toy_models
from toys import chi_square, sequence_law, table

from speccascade_jax.settings import Settings

METHODS = ("speculative", "opt", "token_v3", "verifier")
TABLES = (table(39, 4), table(40, 4))
ASKED = {
    "opt": {"method": "opt", "alpha": 0.05, "temperature": 0.7},
    "token_v3": {"method": "token_v3", "alpha": 0.4, "block_size": 1, "top_p": 0.8, "temperature": 1.0},
    "verifier": {"speculative": False, "temperature": 1.0, "min_p": 0.05},
}
MANY = 96  # answers a request


@pytest.mark.full
def test_answers_under_load_follow_their_law(toy):
    requests = 60
    with serving(toy, max_queue=10_000) as (url, _):

        def sampled(number):
            kind = list(ASKED)[number % len(ASKED)]
            body = {"prompt": "201", "n": MANY, "seed": number, "origin": True, **ASKED[kind]}
            status, answer, _ = ask(url, body)
            assert status == 200, answer
            return kind, [[piece["token"] for piece in choice["origin"]] for choice in answer["choices"]]

        def other(number):
            draw = random.Random(number)
            body = {
                "prompt": "".join(draw.choices("012", k=draw.randint(1, 15))),
                "seed": number,
                "alpha": draw.random(),
                "method": draw.choice(METHODS),
                "temperature": draw.choice([0, 0.5, 2]),
            }
            return ask(url, body)[0]

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            others = pool.map(other, range(4 * requests))
            samples = list(pool.map(sampled, range(requests)))
            assert set(others) == {200}
    for kind, asked in ASKED.items():
        texts = [tokens for sample_kind, many in samples if sample_kind == kind for tokens in many]
        padded = np.array([[*tokens, -1, -1, -1][:3] for tokens in texts])
        options = {name: asked[name] for name in ("temperature", "top_p", "min_p") if name in asked}
        rule = [asked.get("method", "speculative")], [asked.get("alpha", 0.0)]
        law, wrong = (
            sequence_law(TABLES, *rule, (2, 0, 1, 3), steps=3, eos=3, **variant)
            for variant in (options, {**options, "temperature": 1.3})
        )
        assert len(ASKED) * chi_square(padded, law) > FAIL_BELOW
        assert chi_square(padded, wrong) < FAIL_BELOW  # the control


@pytest.mark.full
@pytest.mark.parametrize(
    "count,method,fields",
    [(1, "speculative", {}), (3, ("token_v3", "opt"), {"alpha": (0.4, 0.05), "block_size": (1, 2)})],
)
def test_one_model_and_three_are_served(count, method, fields):
    """Each answer is what generate gives, and its probabilities are those of the law."""
    model = toy_models(count, method, **fields)
    with serving(model) as (url, _):
        answer = ask(url, {"prompt": "201", "n": 20, "seed": 3, "logprobs": 4})[1]
        alone = ask(url, {"prompt": "201", "n": 20, "seed": 3, "speculative": False})[1]
        refused = ask(url, {"prompt": "201", "block_size": 1})
    texts = ["201"] * 20
    for body, rule in ((answer, method), (alone, "verifier")):
        settings = Settings(method=rule, temperature=1.0, seed=3, **fields)
        wanted = [output.text for output in model.cascade.generate(texts, settings)]
        assert [choice["text"] for choice in body["choices"]] == wanted
    methods, alphas = ([*method], [*fields["alpha"]]) if count > 1 else ([], [])
    tables = [table(39 + n, 4) for n in range(count)]
    law = sequence_law(tables, methods, alphas, (2, 0, 1, 3), steps=3, eos=3)
    for choice in answer["choices"]:
        tokens = tuple(int(token) for token in choice["logprobs"]["tokens"])
        assert abs(np.exp(sum(choice["logprobs"]["token_logprobs"])) - law[tokens]) < 1e-5
    assert count == 1 or (refused[0], refused[1]["error"]["param"]) == (400, "block_size")


@pytest.mark.full
def test_drafts_that_are_looked_up_are_served():
    """Each answer is what generate gives, with blocks of its own size; a rule whose law depends on where
    rounds begin states no probabilities."""
    model, asked = toy_lookup(), {"prompt": "20120", "seed": 3}
    with serving(model) as (url, _):
        for method, size in (("speculative", 1), ("token_v3", 2)):
            changes = {"method": method, "block_size": size, "alpha": 0.4, "seed": 3}
            answer = ask(url, asked | changes | {"n": 20})[1]
            settings = dataclasses.replace(model.defaults, **changes)
            wanted = [output.text for output in model.cascade.generate(["20120"] * 20, settings)]
            assert [choice["text"] for choice in answer["choices"]] == wanted
        stated = ask(url, asked | {"logprobs": 1})[1]["choices"][0]["logprobs"]
        refused = ask(url, asked | {"logprobs": 1, "method": "token_v3"})
    assert (refused[0], refused[1]["error"]["param"]) == (400, "logprobs")
    law = sequence_law([table(40, 4)], [], [], (2, 0, 1, 2, 0, 3), steps=3, eos=3)
    tokens = tuple(int(token) for token in stated["tokens"])
    assert abs(np.exp(sum(stated["token_logprobs"])) - law[tokens]) < 1e-5
