"""The front of several replicas, which are applications in this process, without Ray."""

import asyncio
import json
import sys
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from speccascade_jax.commands import serve
from speccascade_jax.core.errors import FieldError
from speccascade_jax.serving import front as fronts
from speccascade_jax.serving.app import Limits
from speccascade_jax.serving.engine import Full
from speccascade_jax.serving.front import Front, Lost, answered, create_front, merged
from speccascade_jax.serving.replicas import bounds

STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


def body(text, more=True):
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Replicas:
    """Replicas whose answers are lists of messages, one replica after the other; an exception among them is
    raised there, and None waits for ever."""

    def __init__(self, *answers, running=2):
        self.answers, self.running, self.asked, self.left = iter(answers), running, [], asyncio.Event()

    async def answer(self, scope, body):
        self.asked.append((scope["path"], body))
        try:
            for message in next(self.answers):
                if message is None:
                    await asyncio.Event().wait()
                if isinstance(message, Exception):
                    raise message
                yield [message]
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def metrics(self):
        return {"a": "# TYPE tokens counter\ntokens_total 2.0\n"}


def request(path="/v1/completions", method="POST", **headers):
    headers = {"content-type": "application/json", **headers}
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


def sent(front, scope=None, data=b"{}"):
    """What a client of the front gets: the status, the headers and the body."""

    async def all_of():
        answer = answered(create_front(front), scope or request(), data)
        return [message async for messages in answer for message in messages]

    start, *parts = asyncio.run(all_of())
    assert not parts[-1].get("more_body")
    assert all(part.get("more_body") for part in parts[:-1])  # one answer, not two
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(part["body"] for part in parts).decode()


def counted(front, name):
    return front.registry.get_sample_value(f"speccascade:{name}_total")


def test_the_number_of_replicas_is_read():
    assert bounds("1..4") == (1, 4) and bounds("3") == (3, 3)
    for text in ("0", "4..1", "", "..", "1..", "..2", "-1..2", "1..2..3", "x", "1.5", "1" * 500, "²", "0..2"):
        with pytest.raises(FieldError) as refused:
            bounds(text)
        assert (refused.value.field, refused.value.value) == ("replicas", text)


def test_wrong_command_lines_end_with_a_sentence(capsys, served_config, monkeypatch):
    for words, *flags in (
        ("--ray", "--replicas=2"),
        ("replicas", "--ray=local", "--replicas=2..1"),
        ("--profile", "--ray=local", "--profile=trace"),
        ("ray", "--ray=nowhere"),
        ("--ray=auto", "--ray=ray://localhost:10001"),
        ("--vocabulary", "--ray=local", "--vocabulary=slem"),
        ("pip install 'speccascade_jax[ray,serve]'", "--ray=local"),
    ):
        monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
        assert serve.main([f"--config={served_config}", "--port=0", *flags]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("seen", [[], [STREAM], [WHOLE, body("")]])
def test_a_request_moves_to_another_replica_before_its_first_tokens(seen):
    """Its client gets the second replica's answer, and nothing of the first's."""
    second = [STREAM, body("data: 1\n\n"), body("data: [DONE]\n\n", more=False)]
    replicas = Replicas([*seen, Lost()], second)
    front = Front(replicas, Limits())
    status, headers, text = sent(front, data=b'{"prompt": "x"}')
    assert (status, text) == (200, "data: 1\n\ndata: [DONE]\n\n")
    assert headers["content-type"] == "text/event-stream"
    assert replicas.asked == [("/v1/completions", b'{"prompt": "x"}')] * 2
    assert (counted(front, "requests_moved"), counted(front, "streams_cut")) == (1, 0)


def test_a_stream_that_is_lost_ends_with_an_error_event():
    """No other replica is asked, because its tokens would be repeated."""
    replicas = Replicas([STREAM, body("data: 1\n\n"), Lost()])
    front = Front(replicas, Limits())
    status, _, text = sent(front)
    first, error, done, _ = text.split("\n\n")
    assert (status, first, done, len(replicas.asked)) == (200, "data: 1", "data: [DONE]", 1)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert (counted(front, "requests_moved"), counted(front, "streams_cut")) == (0, 1)


def test_an_answer_that_is_lost_half_way_is_cut_off():
    """A client that got status 200 and a part sees that the answer is incomplete."""
    replicas = Replicas([WHOLE, body("{"), Lost()])
    with pytest.raises(ConnectionAbortedError):
        sent(Front(replicas, Limits()))
    assert len(replicas.asked) == 1


def test_messages_after_an_answer_are_ignored():
    for answer in ([WHOLE, body("{}", more=False), Lost()], [WHOLE, body("{}", more=False), OSError()]):
        replicas = Replicas(answer)
        assert sent(Front(replicas, Limits()))[::2] == (200, "{}")
        assert len(replicas.asked) == 1


def test_a_request_can_crash_only_a_few_replicas():
    replicas = Replicas(*([Lost()] for _ in range(9)))
    front = Front(replicas, Limits())
    status, headers, text = sent(front)
    assert (status, json.loads(text)["error"]["code"]) == (503, "replica_lost")
    assert int(headers["retry-after"]) > 0 and len(replicas.asked) == fronts.TRIES
    assert front.registry.get_sample_value("speccascade:requests_refused_total", {"status": "503"}) == 1
    assert counted(front, "requests_moved") == fronts.TRIES - 1


def test_requests_that_the_front_answers_itself():
    """Because of the front's state, a key, or the body."""
    ready, draining = Front(Replicas(), Limits(keys=("k",), body_bytes=9)), Front(Replicas(), Limits())
    draining.draining = True
    for front, scope, data, status, code in (
        (Front(Replicas(running=0), Limits()), None, b"{}", 503, "not_ready"),
        (draining, None, b"{}", 503, "draining"),
        (ready, None, b"{}", 401, "invalid_api_key"),
        (ready, request("/v1/models", "GET"), b"", 401, "invalid_api_key"),
        (ready, request(authorization="Bearer k"), b"{" * 10, 413, None),
    ):
        seen, headers, text = sent(front, scope, data)
        assert (seen, json.loads(text)["error"]["code"]) == (status, code)
        assert status != 503 or int(headers["retry-after"]) > 0
        assert front.replicas.asked == [] and front.idle


def test_full_replicas_answer_429():
    status, headers, text = sent(Front(Replicas([Full(3)]), Limits()))
    assert (status, headers["retry-after"], json.loads(text)["error"]["code"]) == (429, "3", "queue_full")


def test_waiting_for_a_silent_replica_ends(monkeypatch):
    monkeypatch.setattr(fronts, "GRACE", 0.0)
    began = time.monotonic()
    status, headers, text = sent(Front(Replicas([None]), Limits(seconds=0.05)))
    assert time.monotonic() - began < 10
    assert (status, json.loads(text)["error"]["code"]) == (503, "timeout") and headers["retry-after"]


def test_a_client_that_leaves_frees_its_replica():
    async def leaves(front):
        answer = answered(create_front(front), request(), b"{}")
        assert await anext(answer) == [STREAM, body("data: 1\n\n")]
        assert not front.idle
        await answer.aclose()
        await asyncio.wait_for(front.replicas.left.wait(), 5)
        await asyncio.sleep(0)
        assert front.idle

    asyncio.run(leaves(Front(Replicas([STREAM, body("data: 1\n\n"), None]), Limits())))


def test_an_application_notices_that_its_client_has_left():
    """And what it reads is the request's body."""

    async def talk():
        heard = []

        async def app(scope, receive, send):
            heard.append(await receive())
            await send(STREAM)
            heard.append(await receive())

        answer = answered(app, request(), b"abc")
        assert await anext(answer) == [STREAM]
        await answer.aclose()
        await asyncio.sleep(0.01)
        assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]
        assert heard[0]["body"] == b"abc" and not heard[0]["more_body"]

    asyncio.run(talk())


def test_metrics_of_all_replicas_are_one_text():
    """Every sample keeps its value and its labels, and gets its replica's name."""
    text = """# HELP vllm:first Seconds.
# TYPE vllm:first histogram
vllm:first_bucket{le="1.0",model_name="m"} %d.0
vllm:first_bucket{le="+Inf",model_name="m"} 9.0
vllm:first_count{model_name="m"} 9.0
vllm:first_sum{model_name="m"} 3.5
# HELP speccascade:calls Calls.
# TYPE speccascade:calls counter
speccascade:calls_total{model_name="m",method="a\\"b"} 4.0
"""
    whole = merged({"a": text % 1, "b": text % 2}).decode()
    assert whole.count("# TYPE vllm:first histogram") == whole.count("# HELP vllm:first ") == 1

    def samples(text, **more):
        """(name, labels) -> value."""
        return {
            (name, frozenset({**labels, **more}.items())): value
            for family in text_string_to_metric_families(text)
            for name, labels, value, *_ in family.samples
        }

    assert samples(whole) == samples(text % 1, replica="a") | samples(text % 2, replica="b")
    assert len(samples(whole)) == 10
    front = Front(Replicas(), Limits())
    status, headers, said = sent(front, request("/metrics", "GET"), b"")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'tokens_total{replica="a"} 2.0' in said and 'speccascade:replicas{replica="front"} 2.0' in said


def test_information_about_the_front():
    failed = Front(Replicas(running=0), Limits())
    failed.fail(ValueError())
    for front, path, status, said in (
        (Front(Replicas(), Limits()), "/ready", 200, {"status": "ready", "replicas": 2}),
        (Front(Replicas(running=0), Limits()), "/ready", 503, {"status": "compiling", "replicas": 0}),
        (Front(Replicas(running=0), Limits()), "/health", 200, {"status": "alive"}),
        (failed, "/health", 503, {"status": "failing"}),
    ):
        seen, _, text = sent(front, request(path, "GET"), b"")
        assert (seen, json.loads(text)) == (status, said)
