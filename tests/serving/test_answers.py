"""Answers are made of updates with any number of tokens."""

import asyncio
import json

import numpy as np
import pytest

pytest.importorskip("starlette")

from served_toys import toy_model

from speccascade_jax.inference.scoring import TokenScores
from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.answers import Answer
from speccascade_jax.serving.engine import Job, Submitted, Update
from speccascade_jax.serving.protocol import Refused, parse

TOKENS = [1, 2, 0]
LOGPROBS = np.array([-0.25, -1.5, -3.0])
LIKELIEST = np.array([[1, 0, 2], [0, 2, 1], [2, 1, 0]])
LIKELIEST_LOGPROBS = np.array([[-0.25, -2.0, -4.0], [-0.5, -1.5, -5.0], [-0.125, -2.5, -3.0]])
USAGE = {"rounds": 2, "drafted": 3, "accepted": 2, "deferred": 1}


def update(size, finished=False):
    """What is known once `size` tokens are written: their scores are those of all of them."""
    result = Result(TOKENS[:size], ["draft"] * size, [0] * size, USAGE)
    scores = TokenScores(LOGPROBS[:size], LIKELIEST[:size], LIKELIEST_LOGPROBS[:size])
    return Update(result, finished, scores=scores, fresh=1)


async def streamed(updates, **fields):
    """The events of an answer whose single job sends these updates."""
    model = toy_model()
    request = parse(json.dumps({"prompt": "201", "seed": 1, **fields}).encode(), "completion")
    decoding, queue = await model.decoding(request), asyncio.Queue()
    job = Job(decoding.lane, decoding.requests[0], True, queue)
    for arrived in updates:
        queue.put_nowait((job, arrived))
    answer = Answer(model, request, decoding, Submitted([job], queue), 10.0)
    return [event async for event in answer.stream()]


@pytest.mark.parametrize("sizes", [(3,), (1, 3), (2, 3), (1, 2, 3)])
def test_each_event_has_the_scores_of_its_tokens(sizes):
    updates = [update(size, size == 3) for size in sizes]
    events = asyncio.run(streamed(updates, logprobs=2))
    scores = [event["choices"][0]["logprobs"] for event in events]
    joined = {name: [value for part in scores for value in part[name]] for name in scores[0]}
    assert joined["tokens"] == ["1", "2", "0"] and joined["text_offset"] == [0, 1, 2]
    assert joined["token_logprobs"] == LOGPROBS.tolist()
    assert joined["top_logprobs"] == [
        {"1": -0.25, "0": -2.0},
        {"0": -0.5, "2": -1.5},
        {"2": -0.125, "1": -2.5},
    ]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(sizes) - 1) + ["length"]


def test_a_job_that_fails_ends_its_answer():
    with pytest.raises(Refused) as refused:
        asyncio.run(streamed([update(1), Update(None, True, "planted")]))
    assert (refused.value.status, refused.value.body["error"]["message"]) == (500, "planted")


def test_a_stream_ends_with_its_usage_where_it_is_wanted():
    events = asyncio.run(streamed([update(3, True)], stream=True, stream_options={"include_usage": True}))
    assert events[0]["usage"] is None and events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert {
        name: usage[name] for name in ("prompt_tokens", "completion_tokens", "verifier_calls", "drafted")
    } == {"prompt_tokens": 4, "completion_tokens": 3, "verifier_calls": 2, "drafted": 3}
