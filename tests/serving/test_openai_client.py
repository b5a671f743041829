"""The official client with a server process: its answers equal those of Cascade.generate."""

import concurrent.futures

import numpy as np
import pytest
from corpora import SENTENCES

from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.settings import Settings
from speccascade_jax.tokenizers.tokenizer import up_to_stop

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def asked(number, methods):
    """A prompt, its settings, and the same as the client is told: of all kinds."""
    draw = np.random.default_rng(number)
    words = " ".join(draw.choice(" ".join(SENTENCES).split(), draw.integers(1, 9)))
    settings = {
        "method": str(draw.choice(methods)),
        "alpha": round(float(draw.uniform(0, 0.6)), 2),
        "block_size": int(draw.choice([1, 3])),
        "temperature": float(draw.choice([0, 0.7, 1.0, 1.5])),
        "seed": int(draw.integers(0, 2**40)),
        "max_new_tokens": int(draw.integers(1, 25)),
    }
    settings |= draw.choice(
        [
            {},
            {},
            {"top_p": 0.8},
            {"top_k": 5},
            {"min_p": 0.05},
            {"stop": ("e",)},
            {"stop": ("the", "at c"), "top_p": 0.9},
        ]
    )
    standard = {name: settings[name] for name in ("temperature", "seed", "top_p") if name in settings}
    ours = {
        name: value
        for name, value in settings.items()
        if name in ("method", "alpha", "block_size", "top_k", "min_p")
    }
    if settings["method"] == "verifier":
        ours = {**{k: v for k, v in ours.items() if k != "method"}, "speculative": False}
    return (
        words,
        settings,
        {
            "prompt": words,
            **standard,
            "max_tokens": settings["max_new_tokens"],
            "stop": list(settings.get("stop", ())) or None,
            "extra_body": {**ours, "origin": True},
        },
    )


def expected(cascade, questions):
    """What decode.py --text gives each of them: alone, as input 0. Compiled once for all of a block size."""
    settings = [Settings(**fields) for _, fields, _ in questions]
    lanes, answers = cascade.lanes(settings), []
    for (words, _, _), row_settings in zip(questions, settings, strict=True):
        [row], _ = cascade.encode([words])
        lane = lanes[cascade.lane_of(row_settings)]
        scheduler = cascade.scheduler(lane.plan, lane.params, 1)
        scheduler.admit([Request(row, row_settings, 0, lane.numbers(row_settings), row_settings.stop)])
        while scheduler.busy:
            scheduler.run()
        [(_, result)] = scheduler.finished()
        stopped = up_to_stop(cascade.tokenizer, result.tokens, row_settings.stop)
        answers.append((stopped[1] if stopped else cascade.tokenizer.decode(result.tokens), *result[:2]))
    return answers


@pytest.mark.full
def test_under_load_every_answer_is_the_same_as_alone(client, cascade, methods, full):
    """32 clients, of mixed methods, leniences, temperatures, lengths and stops; half of them stream."""
    questions = [asked(number, methods) for number in range(1000 if full else 64)]

    def ask(number):
        body = questions[number][2]
        if number % 2:
            choice = client.completions.create(model="tiny", **body).choices[0]
            return (
                choice.text,
                [piece["token"] for piece in choice.origin],
                [piece["origin"] for piece in choice.origin],
            )
        text, tokens, origins = "", [], []
        for event in client.completions.create(model="tiny", stream=True, **body):
            text += event.choices[0].text
            tokens += [piece["token"] for piece in event.choices[0].origin]
            origins += [piece["origin"] for piece in event.choices[0].origin]
            assert "".join(piece["text"] for piece in event.choices[0].origin) == event.choices[0].text
        return text, tokens, origins

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(len(questions))))
    wanted = expected(cascade, questions)
    assert wanted[0][0] == next(iter(cascade.generate([questions[0][0]], Settings(**questions[0][1])))).text
    assert not [n for n, (answer, right) in enumerate(zip(answers, wanted, strict=True)) if answer != right]
    assert len({tuple(tokens) for _, tokens, _ in answers}) > len(answers) // 2


def test_streams_of_unfinished_characters_join_to_the_whole(client, full):
    """The tiny pair writes single bytes of characters and of emoji."""

    def is_broken(seed):
        body = {
            "model": "tiny",
            "prompt": "🦜 naïve façade",
            "temperature": 2.0,
            "seed": seed,
            "stop": ["a", "é"] if seed % 3 == 0 else None,
        }
        whole = client.completions.create(**body)
        events = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **body))
        assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
        assert events[-1].choices == [] and events[-1].usage == whole.usage
        assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert {event.choices[0].finish_reason for event in events[:-2]} <= {None}
        return "\ufffd" in whole.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(is_broken, range(500 if full else 24))) > 3


def test_several_answers_and_several_prompts(client, cascade):
    """Answer i equals the output of line i of a file."""
    answer = client.completions.create(
        model="tiny", prompt=["the cat", "", "a dog"], n=3, temperature=1.2, seed=5, max_tokens=10
    )
    settings = Settings(
        method="token_v3", alpha=0.3, block_size=3, temperature=1.2, seed=5, max_new_tokens=10
    )
    wanted = [
        output.text
        for prompt in ("the cat", "", "a dog")
        for output in cascade.generate([prompt] * 3, settings)
    ]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(9)) and len(set(wanted)) > 5
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == answer.usage.accepted > 0
    assert answer.usage.drafted > 0 and answer.usage.verifier_calls > 0


def test_a_missing_seed_is_drawn_and_reported(client):
    body = {"model": "tiny", "prompt": "birds sing", "temperature": 1.5}
    first, second = client.completions.create(**body), client.completions.create(**body)
    assert first.choices[0].text != second.choices[0].text
    again = client.completions.create(**body, seed=second.seed)
    assert again.choices[0].text == second.choices[0].text


def test_log_probabilities_are_those_of_the_target(client, cascade):
    """At each position the likeliest token of the greedy law; whole and streamed alike; they sum to one."""
    body = {
        "model": "tiny",
        "prompt": "the cat",
        "temperature": 0.7,
        "seed": 1,
        "logprobs": 5,
        "max_tokens": 12,
    }
    whole = client.completions.create(**body).choices[0].logprobs
    parts = [event.choices[0].logprobs for event in client.completions.create(stream=True, **body)]
    joined = {
        name: [entry for part in parts for entry in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "text_offset")
    }
    assert joined["tokens"] == whole.tokens and len(whole.tokens) > 3
    np.testing.assert_allclose(joined["token_logprobs"], whole.token_logprobs, atol=1e-4)
    assert all(-50 < value <= 0 for value in whole.token_logprobs)
    for likeliest in whole.top_logprobs:
        assert 0 < np.exp(list(likeliest.values())).sum() < 1 + 1e-5
    assert joined["text_offset"] == whole.text_offset


def test_errors_are_the_clients_own(client, methods):
    """And name the field that the client has sent."""
    for body, kind, field in (
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"alpha": 7}}, openai.BadRequestError, "alpha"),
        ({"extra_body": {"block_size": 4}}, openai.BadRequestError, "block_size"),
        ({"extra_body": {"method": "diff"}}, openai.BadRequestError, "method"),
        ({"max_tokens": 25}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "the cat " * 40}, openai.BadRequestError, "prompt"),
    ):
        with pytest.raises(kind) as error:
            client.completions.create(**{"prompt": "the cat", "model": "tiny", **body})
        assert error.value.param == field
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
    assert error.value.param == "messages"
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").methods == list(methods)
