"""The value of tokens: where both models' tokens are tried, how texts continue, and their scores."""

import dataclasses

import numpy as np
import pytest
from toys import pair, target, transform

from speccascade_jax.config import LearnedRuleConfig
from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.evaluation.quality import METRICS, replaced
from speccascade_jax.inference.text import Cascade
from speccascade_jax.learned.rules import FEATURES
from speccascade_jax.training import rollouts
from speccascade_jax.training.rollouts import ALPHA, continued, disagreements, tried

PROMPTS = ["1", "12", "20", "2", "0011"]


def laws(cascade, prompt, begun):
    """The toys' distributions after a prompt and the beginning of a text."""
    whole = [0, *prompt, *begun]
    logits = (params[whole[-2], whole[-1]] for params in cascade.params)
    return [np.exp(x) / np.exp(x).sum() for x in logits]


@pytest.mark.full
@pytest.mark.parametrize("source", ["t5_pair", "gemma_pair"])
def test_a_beginning_is_continued_as_by_the_cascade(source, request):
    """Every beginning of a text that `opt` writes greedily, in one batch, ends as that text."""
    folder = request.getfixturevalue(source)
    cascade = Cascade.load(folder / "drafter", folder / "verifier", max_source_length=24, max_new_tokens=12)
    texts = ["the cat sings", "a dog", "the bird and the dog sing"]
    rows, _ = cascade.encode(texts)
    outputs = list(cascade.generate(texts, method="opt", alpha=ALPHA))
    begun = [(n, list(o.tokens[:at])) for n, o in enumerate(outputs) for at in range(1, len(o.tokens) + 1)]
    assert len({o.text for o in outputs}) > 1 and len(begun) > 12
    assert continued(cascade, rows, begun) == [outputs[n].text for n, _ in begun]


@pytest.mark.full
def test_it_stops_where_the_cascade_would_have(t5_pair):
    cascade = Cascade.load(t5_pair / "drafter", t5_pair / "verifier", max_source_length=24, max_new_tokens=12)
    source = "the cat sings"
    [whole] = cascade.generate([source], method="opt", alpha=ALPHA)
    stop = whole.text[len(whole.text) // 2 :][:2]
    cascade = dataclasses.replace(cascade, stop=(stop,))
    [output] = cascade.generate([source], method="opt", alpha=ALPHA)
    assert output.text == whole.text[: whole.text.index(stop)]
    begun = [(0, list(whole.tokens[:at])) for at in (1, len(output.tokens), len(whole.tokens))]
    assert continued(cascade, cascade.encode([source])[0], begun) == [output.text] * 3


def test_a_text_that_has_ended_or_is_full_is_not_continued():
    cascade = pair()
    assert continued(cascade, [[1]], [(0, [2, 3]), (0, [1, 1, 2])]) == ["23", "112"]


def test_tokens_are_tried_where_the_models_disagree():
    """Greedily where their likeliest tokens differ, and those are tried; otherwise in proportion to TV, and
    each token in proportion to what one law has more than the other."""
    cascade, rng = pair(), np.random.default_rng(0)
    rows, _ = cascade.encode(PROMPTS)
    texts = [rng.integers(0, 3, rng.integers(1, 4)).tolist() for _ in rows]
    greedy_places = disagreements(cascade, rows, texts, SamplingOptions(0.0), 9, 0)
    expected = {}
    for n, (row, text) in enumerate(zip(rows, texts, strict=True)):
        for at in range(len(text)):
            q, p = laws(cascade, row, text[:at])
            if q.argmax() != p.argmax():
                expected[n, at] = [q.argmax(), p.argmax()]
    assert len(expected) > 2
    assert {(place.text, len(place.begun)): place.tokens for place in greedy_places} == expected
    assert all(place.begun == texts[place.text][: len(place.begun)] for place in greedy_places)

    many, places = 4000, np.zeros(3)
    drawn = np.zeros((3, 2, 4))
    for place in disagreements(cascade, rows[:1] * many, [[1, 2, 0]] * many, SamplingOptions(0.8), 1, 5):
        at = len(place.begun)
        places[at] += 1
        drawn[at, [0, 1], place.tokens] += 1
    chances = []
    for at in range(3):
        qs, ps = (transform(x, 0.8) for x in laws(cascade, rows[0], [1, 2, 0][:at]))
        chances.append(np.maximum(ps - qs, 0).sum())
        for counts, more in zip(drawn[at], (qs - ps, ps - qs), strict=True):
            wanted = np.maximum(more, 0) / chances[at]
            assert np.abs(counts / counts.sum() - wanted).max() < 5 * np.sqrt(0.25 / counts.sum())
    assert places.sum() == many
    assert np.abs(places / many - np.array(chances) / np.sum(chances)).max() < 5 * np.sqrt(0.25 / many)


@pytest.mark.full
def test_an_advantage_is_what_the_metric_gains(monkeypatch):
    """Of all texts, where one of them goes on with the verifier's token and not with the drafter's."""
    cascade, seen = pair(), []
    examples = [(prompt, ["2 1 0 3", "1 3"]) for prompt in PROMPTS]
    monkeypatch.setattr(cascade.tokenizer, "decode", lambda tokens: " ".join(str(int(t)) for t in tokens))
    original = rollouts.disagreements
    monkeypatch.setattr(rollouts, "disagreements", lambda *a: seen.append(original(*a)) or seen[-1])
    config = LearnedRuleConfig("toy", "toy.json", "toy", places=2)
    with pytest.raises(FieldError) as refused:
        tried(cascade, "blue", examples, [SamplingOptions(0.0)], config, replaced)
    assert (refused.value.field, refused.value.value) == ("metric", "blue")
    options = SamplingOptions(0.0), SamplingOptions(1.0, top_p=0.5)
    tries = tried(cascade, "rouge1", examples, options, config, replaced)
    places = [(option, place) for option, some in zip(options, seen, strict=True) for place in some]
    assert tries.features.shape == (len(places), len(FEATURES)) and len(places) > 3
    rows, _ = cascade.encode(PROMPTS)
    references = [golds for _, golds in examples]
    for n, (option, place) in enumerate(places):
        texts = [
            o.text
            for o in cascade.generate(
                PROMPTS, method="opt", alpha=ALPHA, top_p=option.top_p, temperature=option.temperature
            )
        ]
        scores = []
        for token in place.tokens:
            ended = [*place.begun, token]
            while ended[-1] != 3 and len(ended) < cascade.max_new_tokens:
                q, p = laws(cascade, rows[place.text], ended)
                law = target("opt", q, p, np.eye(4)[q.argmax()], np.eye(4)[p.argmax()], ALPHA, True)
                ended.append(int(law.argmax()))
            changed = [*texts]
            changed[place.text] = cascade.tokenizer.decode(ended)
            scores.append(METRICS["rouge1"](changed, references))
        assert tries.advantages[n] == pytest.approx(len(PROMPTS) * (scores[1] - scores[0]), abs=1e-6)
        assert tries.texts[n] == place.text
    assert np.ptp(tries.advantages) > 0
