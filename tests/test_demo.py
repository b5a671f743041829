"""The shipped pair: greedy exactness, methods that are the same in a limit, and its quality."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import speccascade_jax as sc
from speccascade_jax import config as configs
from speccascade_jax.core.counters import Counters
from speccascade_jax.evaluation.quality import bleu
from speccascade_jax.evaluation.rates import check_identities
from speccascade_jax.training.data import joined_examples

TASK = configs.load("demo_verifier").task
OWN = [
    "Where is the station?",
    "Tom said that he would come tomorrow. I don't believe him.",
    "She opened the window because it was too hot.",
    "Can you help me? I lost my keys.",
    "My brother wants to buy a new car, but he has no money.",
    "It was raining all day.",
]


@pytest.fixture(scope="module")
def sentences(full):
    """(source, references): the Tatoeba test split, one or two sentences each, else a few of our own."""
    if not Path(TASK.test).is_file():
        return [(text, []) for text in OWN]
    examples = joined_examples(dataclasses.replace(TASK, join=2), TASK.test)
    return examples[: 60 if full else 24]


@pytest.fixture(scope="module")
def demo():
    return sc.load("demo")


@pytest.fixture(scope="module")
def tokens(demo, sentences):
    """A function from a method to the tokens it gives for all sentences, at temperature 0."""
    known = {}

    def decode(method, **options):
        options = {"alpha": 0.0, "block_size": 3, "batch_size": 16, **options}
        key = (method, *sorted(options.items()))
        if key not in known:
            outputs = list(demo.generate([s for s, _ in sentences], method=method, **options))
            if "rounds" in outputs[0].counts:
                columns = {name: np.array([o.counts[name] for o in outputs]) for name in Counters._fields}
                check_identities(Counters(**columns))
            known[key] = [o.tokens for o in outputs]
        return known[key]

    return decode


@pytest.mark.full
@pytest.mark.parametrize("block_size,batch_size", [(1, 16), (3, 1), (5, 16), (7, 1)])
def test_greedy_speculative_is_the_verifier(tokens, block_size, batch_size):
    assert tokens("speculative", block_size=block_size, batch_size=batch_size) == tokens(
        "verifier", batch_size=batch_size
    )


@pytest.mark.full
def test_greedy_texts_with_the_shared_encoder_are_the_verifiers(tokens, sentences):
    """A thousand inputs were decoded by hand: docs/results/hierarchies.md."""
    cascade, sources = sc.load("demo_shared"), [source for source, _ in sentences[:24]]
    for batch_size, block_size in ((1, configs.load("demo_shared").block_size), (16, 3)):
        outputs = cascade.generate(sources, block_size=block_size, batch_size=batch_size)
        assert [o.tokens for o in outputs] == tokens("verifier", batch_size=16)[:24]


@pytest.mark.full
def test_batch_does_not_matter(tokens):
    assert tokens("verifier", batch_size=1) == tokens("verifier", batch_size=16)


@pytest.mark.full
@pytest.mark.parametrize(
    "rule,other",
    [
        (("opt", 0.1), ("diff", 0.1)),
        (("opt", 0.4), ("diff", 0.4)),
        (("token_v3", 0.3), ("lossy_greedy", 0.3)),
        (("token_v3", 0.8), ("lossy_greedy", 0.8)),
        (("token_v3", 0.0), ("verifier", 0.0)),
        (("lossy", 0.0), ("verifier", 0.0)),
        (("lossy_tuned", 0.0), ("verifier", 0.0)),
        (("diff", 1.0), ("drafter", 0.0)),
        (("chow", 1.0), ("drafter", 0.0)),
        (("token_v3", 1.0), ("drafter", 0.0)),
    ],
    ids=lambda x: f"{x[0]}({x[1]})",
)
def test_identities(tokens, rule, other):
    assert tokens(rule[0], alpha=rule[1]) == tokens(other[0], alpha=other[1])


@pytest.mark.full
def test_rules_change_something(tokens):
    """The identities above would hold trivially if no rule ever trusted the drafter."""
    assert tokens("token_v3", alpha=0.3) not in (tokens("verifier"), tokens("drafter"))
    assert tokens("diff", alpha=0.1) not in (tokens("verifier"), tokens("drafter"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["e2e", "e2e_gemma"])
def test_the_small_pairs_write_about_the_facts(name):
    run = configs.load(name)
    cascade = sc.load(name)
    verifier, speculative, drafter = (
        list(cascade.generate(run.examples, method=method, alpha=0.0, block_size=run.block_size))
        for method in ("verifier", "speculative", "drafter")
    )
    assert [o.tokens for o in speculative] == [o.tokens for o in verifier]
    assert [o.tokens for o in drafter] != [o.tokens for o in verifier]
    for facts, out in zip(run.examples, verifier, strict=True):
        assert facts.split("[")[1].split("]")[0] in out.text


@pytest.mark.full
def test_the_word_problems_pair_writes_solutions():
    """In their form, and losslessly."""
    run, cascade = configs.load("word_problems"), sc.load("word_problems")
    verifier, speculative = (
        list(cascade.generate(run.examples, method=method)) for method in ("verifier", "speculative")
    )
    assert [o.tokens for o in speculative] == [o.tokens for o in verifier]
    for out in verifier:
        assert re.fullmatch(r"(\w+( = \w+ [-+*] \w+){2} = \d+ \w+\. )+The answer is \d+\.", out.text), (
            out.text
        )
    assert verifier[0].text.endswith("The answer is 16.")


@pytest.mark.full
def test_quality(demo, tokens, sentences):
    """Both translate; the published figures are in docs/results/ (measured on the whole split)."""
    if not sentences[0][1]:
        pytest.skip("needs the Tatoeba test split")
    references = [r for _, r in sentences]
    verifier, drafter = (
        bleu([demo.tokenizer.decode(t) for t in tokens(model)], references)
        for model in ("verifier", "drafter")
    )
    assert verifier > 30 and drafter > 30
