"""Hostile clients and failing rounds: answered in a sentence or dropped, with no row lost or stuck."""

import concurrent.futures
import json
import socket
import threading
import time

import numpy as np
import pytest
from served_toys import ask, gauges, raw, serving, until_idle

from speccascade_jax.tokenizers import chat_worker
from speccascade_jax.tokenizers.chat import ChatTemplate

DEEP = b'{"prompt": ' + b"[" * 100_000
HUGE = b"1" + b"0" * 399
WRONG = {  # a body -> its status, and the field that is wrong
    b"": (400, None),
    b"{": (400, None),
    b"[]": (400, None),
    b"3": (400, None),
    b"null": (400, None),
    b"\xff\xfe": (400, None),
    DEEP: (400, None),
    b'{"prompt": "1\x001"}': (400, None),
    b'{"prompt": "1", "seed": ' + b"9" * 5000 + b"}": (400, None),  # more digits than Python reads
    b'{"prompt": "1", "temperature": NaN}': (400, "temperature"),
    b'{"prompt": "1", "alpha": Infinity}': (400, "alpha"),
    b'{"prompt": "1", "alpha": [1, NaN]}': (400, "alpha"),
    b'{"prompt": "1", "alpha": [0.1, ' + HUGE + b"]}": (400, "alpha"),
    **{
        b'{"prompt": "1", "' + field.encode() + b'": ' + sign + HUGE + b"}": (400, field)
        for field in (
            "alpha",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "max_tokens",
            "n",
            "best_of",
            "logprobs",
            "block_size",
            "max_block_size",
            "presence_penalty",
        )
        for sign in (b"", b"-")
    },
    b'{"prompt": "\\ud800"}': (400, "prompt"),
    b'{"prompt": 3}': (400, "prompt"),
    b'{"prompt": ["1", 2]}': (400, "prompt"),
    b'{"prompt": []}': (400, "prompt"),
    b'{"prompt": null}': (400, "prompt"),
    b"{}": (400, "prompt"),
    b'{"prompt": "1", "n": true}': (400, "n"),
    b'{"prompt": "1", "n": 0}': (400, "n"),
    b'{"prompt": "1", "n": 128}': (400, "n"),
    b'{"prompt": "1", "n": 1.5}': (400, "n"),
    b'{"prompt": "1", "stop": "x\xef\xbf\xbd"}': (400, "stop"),
    b'{"prompt": "1", "stop": ""}': (400, "stop"),
    b'{"prompt": "1", "stop": [[]]}': (400, "stop"),
    b'{"prompt": "1", "stream": "yes"}': (400, "stream"),
    b'{"prompt": "1", "stream_options": {"include_usage": true}}': (400, "stream_options"),
    b'{"prompt": "1", "stream": true, "stream_options": {"x": 1}}': (400, "stream_options"),
    b'{"prompt": "1", "method": "sequence"}': (400, "method"),
    b'{"prompt": "1", "method": "opt", "speculative": false}': (400, "speculative"),
    b'{"prompt": "1", "max_tokens": 1, "max_completion_tokens": 2}': (400, "max_completion_tokens"),
    b'{"prompt": "1", "hand_over": "keep"}': (400, "hand_over"),
    b'{"prompt": "1", "top_k": 1000}': (400, "top_k"),
    b'{"prompt": "1", "block_size": 3}': (400, "block_size"),
    b'{"prompt": "1", "best_of": 2}': (400, "best_of"),
    b'{"prompt": "1", "echo": true}': (400, "echo"),
    b'{"prompt": "1", "model": "x"}': (404, "model"),
    b'{"prompt": "1", "tempreature": 1}': (400, "tempreature"),
    b'{"prompt": "1", "max_tokens": 4}': (400, "max_tokens"),
    b'{"prompt": "' + b"1" * 16 + b'"}': (400, "prompt"),
    b'{"prompt": "' + b"1" * 900_000 + b'"}': (400, "prompt"),
    b'{"prompt": "' + b"1" * 10_000_000 + b'"}': (413, None),
}
OF_SETTINGS = {  # those that Settings itself refuses
    b'{"prompt": "1", "method": "x"}': "method",
    b'{"prompt": "1", "top_p": 1.5}': "top_p",
    b'{"prompt": "1", "alpha": -1}': "alpha",
    b'{"prompt": "1", "max_tokens": 0}': "max_tokens",
    b'{"prompt": "1", "temperature": -1}': "temperature",
    b'{"prompt": "1", "seed": 9223372036854775808}': "seed",
    b'{"prompt": "1", "block_size": 0}': "block_size",
}


@pytest.fixture(scope="module")
def impatient(toy):
    """A server with few rows, a short queue and little patience."""
    with serving(toy, max_queue=40, body_seconds=1.0, seconds=20.0) as (url, engine):
        yield url, engine


def sound(url):
    """The server still answers, and as it did at first."""
    status, answer, _ = ask(url, {"prompt": "201", "seed": 7, "n": 4})
    return status == 200 and [choice["text"] for choice in answer["choices"]]


def refusals(url):
    """How many requests found the queue full, as /metrics says."""
    lines = ask(url, path="/metrics")[1].splitlines()
    counts = [line for line in lines if 'refused_total{status="429"}' in line]
    return float(counts[0].split()[-1]) if counts else 0


def test_wrong_requests_are_answered_with_a_sentence(impatient):
    url, _ = impatient
    before = sound(url)
    for body, (status, param) in WRONG.items():
        refused, answer, _ = ask(url, body)
        error = answer["error"]
        assert (refused, error["param"]) == (status, param), (body[:80], refused, error)
        assert 10 < len(error["message"]) < 400 and "\n" not in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    chat = b'{"messages": [{"role": "user", "content": "1"}]}'
    for path, body, status in (
        ("/v1/none", b"{}", 404),
        ("/v1/completions", None, 405),
        ("/health", b"{}", 405),
        ("/v1/chat/completions", chat, 400),
    ):
        code, answer, _ = ask(url, body, path)
        assert code == status and answer["error"]["message"]
    assert ask(url, b'{"prompt": "1"}', **{"Content-Type": "text/plain"})[0] == 415
    assert sound(url) == before != [] and gauges(url) == [0, 0]


@pytest.mark.parametrize("body", OF_SETTINGS)
def test_refused_settings_name_the_clients_field(body, impatient):
    status, answer, _ = ask(impatient[0], body)
    assert (status, answer["error"]["param"]) == (400, OF_SETTINGS[body])


def test_nul_characters_are_characters(impatient):
    """In a prompt they are no piece, and read as such; in a stop text they are looked for like any other."""
    url, _ = impatient
    plain = ask(url, {"prompt": "201", "seed": 7})[1]["choices"]
    assert ask(url, {"prompt": "201", "seed": 7, "stop": "\0"})[1]["choices"] == plain
    assert ask(url, {"prompt": "20\x001", "seed": 7})[0] == 200 and sound(url)


def test_metrics_count_what_usage_says(impatient):
    url, _ = impatient
    names = {
        "generation_tokens": "completion_tokens",
        "prompt_tokens": "prompt_tokens",
        "spec_decode_num_drafts": "verifier_calls",
        "spec_decode_num_draft_tokens": "drafted",
        "spec_decode_num_accepted_tokens": "accepted",
    }

    def counted():
        lines = [line.split() for line in ask(url, path="/metrics")[1].splitlines() if line[:1] != "#"]
        values = {name: float(value) for name, value in lines}
        return {name: values.get(f'vllm:{name}_total{{model_name="toy"}}', 0) for name in names} | {
            "deferred": values.get('speccascade:deferred_tokens_total{method="opt",model_name="toy"}', 0),
            "positions": sum(value for name, value in values.items() if "per_pos_total{" in name),
        }

    before, wanted = counted(), dict.fromkeys([*names.values(), "deferred"], 0)
    for seed in range(20):
        usage = ask(url, {"prompt": "201", "method": "opt", "alpha": 0.05, "seed": seed})[1]["usage"]
        for name in wanted:
            wanted[name] += usage[name]
    after = counted()
    for name, usage_key in names.items():
        assert after[name] - before[name] == wanted[usage_key] > 0
    assert after["deferred"] - before["deferred"] == wanted["deferred"] > 0
    assert after["positions"] - before["positions"] == wanted["accepted"]


def test_clients_that_vanish_free_their_rows(impatient, full):
    url, engine = impatient
    before = sound(url)

    def vanish(number):
        body = {"prompt": "201", "seed": number, "stream": bool(number % 2), "n": 1 + number % 8}
        client = raw(url, json.dumps(body).encode())
        if number % 3:
            client.recv(1 + number % 200)
        client.close()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(vanish, range(1000 if full else 60)))
    assert until_idle(url) < 20 and engine.idle
    assert not any(lane.jobs or lane.scheduler.busy for lane in engine.lanes)
    assert sound(url) == before


def test_partial_bodies_and_slow_readers_delay_no_others(impatient):
    url, _ = impatient
    before = sound(url)
    half = [raw(url, b'{"prompt": "1"', length=100) for _ in range(8)]
    readers = [raw(url, json.dumps({"prompt": "201", "stream": True, "n": 8}).encode()) for _ in range(2)]
    assert sound(url) == before  # while they wait
    assert b" 408 " in half[0].recv(2000)
    for client in (*half, *readers):
        client.close()
    assert until_idle(url) < 20


def test_headers_are_bounded_whatever_parsers_are_installed(impatient):
    url, _ = impatient
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 2**17)
        assert client.recv(2000).startswith(b"HTTP/1.1 400 ")


def test_a_full_queue_says_when_to_retry(impatient):
    url, engine = impatient
    statuses, before = [], refusals(url)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for status, answer, headers in pool.map(
            lambda n: ask(url, {"prompt": "201", "n": 20, "seed": n}), range(96)
        ):
            statuses.append(status)
            if status == 429:
                assert int(headers["Retry-After"]) >= 1 and answer["error"]["code"] == "queue_full"
    assert set(statuses) == {200, 429}
    assert engine.idle and gauges(url) == [0, 0]
    assert refusals(url) - before == statuses.count(429)


def test_a_request_that_takes_too_long_is_ended(toy, monkeypatch):
    with serving(toy, seconds=0.5) as (url, _):
        lane, _ = toy.place(toy.defaults)
        real = lane.step
        monkeypatch.setattr(lane, "step", lambda rounds: (time.sleep(0.4), real(rounds))[1])
        status, answer, _ = ask(url, {"prompt": "201", "n": 32})
        assert status == 504 and answer["error"]["code"] == "timeout"
        client = raw(url, b'{"prompt": "201", "n": 32, "stream": true}')
        text = b""
        while piece := client.recv(4096):
            text += piece
            if b"[DONE]" in text:
                break
        assert b'"code":"timeout"' in text
        monkeypatch.undo()
        until_idle(url)
        assert ask(url, {"prompt": "201"})[0] == 200


def test_a_round_that_raises_ends_its_requests_and_no_others(toy, monkeypatch):
    with serving(toy, max_queue=100) as (url, _):
        before = sound(url)
        lane, _ = toy.place(toy.defaults)
        real, failing = type(lane.scheduler).run, threading.Event()

        def run(scheduler, rounds=None):
            if failing.is_set() and scheduler.programs.plan == lane.lane.plan:
                raise RuntimeError("planted")
            return real(scheduler, rounds)

        monkeypatch.setattr(type(lane.scheduler), "run", run)
        failing.set()
        status, answer, _ = ask(url, {"prompt": "201", "n": 6})
        assert status == 500 and "failed" in answer["error"]["message"] and "planted" not in str(answer)
        assert ask(url, {"prompt": "201", "speculative": False, "n": 6})[0] == 200
        assert ask(url, path="/health")[0] == 200
        for _ in range(3):
            assert ask(url, {"prompt": "201"})[0] == 500
        assert ask(url, path="/health")[0] == 503  # somebody should start it anew
        failing.clear()
        assert sound(url) == before and gauges(url) == [0, 0]
        assert ask(url, path="/health")[0] == 200


def test_logits_that_are_no_numbers_end_their_request_alone(toy):
    """Its neighbours in the batch continue, and later requests are served."""
    lane, _ = toy.place(toy.defaults)
    with serving(toy) as (url, engine):
        wanted = [ask(url, {"prompt": "200", "seed": seed})[1]["choices"] for seed in range(8)]
        drafters, verifiers = weights = lane.scheduler.programs.weights
        damaged = verifiers.copy()
        damaged[1, 3] = np.nan  # after a prompt that ends in 1
        lane.scheduler.programs.weights = [drafters, damaged]
        try:
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                broken = [pool.submit(ask, url, {"prompt": "201", "n": 2}) for _ in range(4)]
                others = [pool.submit(ask, url, {"prompt": "200", "seed": seed}) for seed in range(8)]
            assert [answer.result()[1]["choices"] for answer in others] == wanted
            for answer in broken:
                status, body, _ = answer.result()
                assert (status, body["error"]["type"], body["error"]["param"]) == (500, "server_error", None)
            assert lane.failures == 0 and ask(url, path="/health")[0] == 200
        finally:
            lane.scheduler.programs.weights = weights
        assert ask(url, {"prompt": "201"})[0] == 200
        assert until_idle(url) < 20 and engine.idle and not lane.jobs


def test_keys_cors_and_the_page_follow_the_flags(toy):
    with serving(toy, keys=("first", "second"), page=False, origins=("https://example.org",)) as (url, _):
        assert ask(url, {"prompt": "1"})[0] == 401 == ask(url, path="/v1/models")[0]
        assert ask(url, {"prompt": "1"}, Authorization="Bearer firs")[0] == 401
        assert ask(url, {"prompt": "1"}, Authorization="Bearer \u00e9")[0] == 401
        assert ask(url, {"prompt": "1"}, Authorization="Basic second")[0] == 401
        assert ask(url, {"prompt": "1"}, Authorization="Bearer second")[0] == 200
        assert ask(url, path="/")[0] == 404 and ask(url, path="/health")[0] == 200
        headers = ask(url, path="/health", Origin="https://example.org")[2]
        assert headers["Access-Control-Allow-Origin"] == "https://example.org"
        headers = ask(url, path="/health", Origin="https://example.com")[2]
        assert headers["Access-Control-Allow-Origin"] is None


def test_a_key_with_umlauts_is_compared_as_utf_8(toy):
    with serving(toy, keys=("schl\u00fcssel",)) as (url, _):
        for encoding, status in (("utf-8", 200), ("latin-1", 401)):
            header = b"Bearer " + "schl\u00fcssel".encode(encoding)
            assert ask(url, {"prompt": "1"}, Authorization=header)[0] == status


@pytest.mark.full
def test_a_template_that_loops_leaves_health_alone(toy, monkeypatch):
    """It runs outside the event loop, and ends in time."""
    pytest.importorskip("jinja2")
    monkeypatch.setattr(chat_worker, "SECONDS", 2)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(toy.cascade.tokenizer, "chat", ChatTemplate(loop, {}), raising=False)
    monkeypatch.setattr(toy, "chats", True)
    chat = {"messages": [{"role": "user", "content": "1"}]}
    with serving(toy) as (url, _), concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(ask, url, chat, "/v1/chat/completions")
        time.sleep(0.5)
        began = time.monotonic()
        assert ask(url, path="/health")[0] == 200 and ask(url, {"prompt": "1"})[0] == 200
        assert time.monotonic() - began < 1 and not refused.done()
        status, answer, _ = refused.result()
        assert (status, answer["error"]["param"]) == (400, "messages")
