"""Hostile clients and failing rounds: answered in a sentence or let go, with no row lost and nobody stuck."""

import concurrent.futures
import json
import threading
import time

import numpy as np
import pytest
from served_toys import ask, gauges, raw, serving, until_idle

DEEP = b'{"prompt": ' + b"[" * 100_000
WRONG = {  # a body -> its status, and a word of the sentence
    b"": (400, "not JSON"), b"{": (400, "not JSON"), b"[]": (400, "JSON object"), b"3": (400, "JSON object"),
    b"null": (400, "JSON object"), b"\xff\xfe": (400, "UTF-8"), DEEP: (400, "nested"),
    b'{"prompt": "1", "temperature": NaN}': (400, "temperature is NaN"),
    b'{"prompt": "1", "alpha": Infinity}': (400, "alpha is Infinity"),
    b'{"prompt": "1", "alpha": [1, NaN]}': (400, "alpha[1]"),
    b'{"prompt": "1", "seed": ' + b"9" * 5000 + b"}": (400, "not JSON"),
    b'{"prompt": "1", "seed": 9223372036854775808}': (400, "seed"),
    b'{"prompt": "\\ud800"}': (400, "half a character"), b'{"prompt": 3}': (400, "a text or a list"),
    b'{"prompt": "1\x001"}': (400, "not JSON"),
    b'{"prompt": ["1", 2]}': (400, "prompt[1]"), b'{"prompt": []}': (400, "0 items"),
    b'{"prompt": null}': (400, "prompt is missing"), b"{}": (400, "prompt is missing"),
    b'{"prompt": "1", "n": true}': (400, "n is true"), b'{"prompt": "1", "n": 0}': (400, "n is 0"),
    b'{"prompt": "1", "n": 128}': (400, "at most"), b'{"prompt": "1", "n": 1.5}': (400, "whole number"),
    b'{"prompt": "1", "stop": "x\xef\xbf\xbd"}': (400, "U+FFFD"),
    b'{"prompt": "1", "stop": ""}': (400, "0 characters"), b'{"prompt": "1", "stop": [[]]}': (400, "stop[0]"),
    b'{"prompt": "1", "stream": "yes"}': (400, "true or false"),
    b'{"prompt": "1", "stream_options": {"include_usage": true}}': (400, "stream: true"),
    b'{"prompt": "1", "stream": true, "stream_options": {"x": 1}}': (400, "no field"),
    b'{"prompt": "1", "method": "sequence"}': (400, "not served"),
    b'{"prompt": "1", "method": "x"}': (400, "unknown method"),
    b'{"prompt": "1", "method": "opt", "speculative": false}': (400, "one of the two"),
    b'{"prompt": "1", "top_p": 1.5}': (400, "top_p"), b'{"prompt": "1", "top_k": 1000}': (400, "top_k"),
    b'{"prompt": "1", "best_of": 2}': (400, "best_of"), b'{"prompt": "1", "echo": true}': (400, "echo"),
    b'{"prompt": "1", "model": "x"}': (404, "no model"),
    b'{"prompt": "1", "alpha": -1}': (400, "alpha is -1"),
    b'{"prompt": "1", "tempreature": 1}': (400, "did you mean"),
    b'{"prompt": "1", "max_tokens": 4}': (400, "at most 3"),
    b'{"prompt": "' + b"1" * 16 + b'"}': (400, "more tokens than the 16"),
    b'{"prompt": "' + b"1" * 900_000 + b'"}': (400, "at most 16 tokens"),
    b'{"prompt": "' + b"1" * 10_000_000 + b'"}': (413, "bytes"),
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
    found = [line for line in lines if 'refused_total{status="429"}' in line]
    return float(found[0].split()[-1]) if found else 0


def test_wrong_requests_are_answered_with_a_sentence(impatient):
    url, _ = impatient
    before = sound(url)
    for body, (status, words) in WRONG.items():
        found, answer, _ = ask(url, body)
        said = answer["error"]["message"]
        assert found == status and words in said, (body[:80], found, said)
        assert 10 < len(said) < 400 and "\n" not in said and set(answer["error"]) == {
            "message", "type", "param", "code"}
    chat = b'{"messages": [{"role": "user", "content": "1"}]}'
    for path, body, status in (("/v1/none", b"{}", 404), ("/v1/completions", None, 405),
                               ("/health", b"{}", 405), ("/v1/chat/completions", chat, 400)):
        found, answer, _ = ask(url, body, path)
        assert found == status and answer["error"]["message"]
    assert ask(url, b'{"prompt": "1"}', **{"Content-Type": "text/plain"})[0] == 415
    assert sound(url) == before != [] and gauges(url) == [0, 0]


def test_nul_characters_are_characters(impatient):
    """In a prompt they are no piece, and read as such; in a stop text they are looked for like any other."""
    url, _ = impatient
    plain = ask(url, {"prompt": "201", "seed": 7})[1]["choices"]
    assert ask(url, {"prompt": "201", "seed": 7, "stop": "\0"})[1]["choices"] == plain
    assert ask(url, {"prompt": "20\x001", "seed": 7})[0] == 200 and sound(url)


def test_metrics_count_what_usage_says(impatient):
    url, _ = impatient
    names = {"generation_tokens": "completion_tokens", "prompt_tokens": "prompt_tokens",
             "spec_decode_num_drafts": "verifier_calls", "spec_decode_num_draft_tokens": "drafted",
             "spec_decode_num_accepted_tokens": "accepted"}

    def counted():
        lines = [line.split() for line in ask(url, path="/metrics")[1].splitlines() if line[:1] != "#"]
        values = {name: float(value) for name, value in lines}
        return {name: values.get(f'vllm:{name}_total{{model_name="toy"}}', 0) for name in names} | {
            "deferred": values.get('speccascade:deferred_tokens_total{method="opt",model_name="toy"}', 0),
            "positions": sum(value for name, value in values.items() if "per_pos_total{" in name)}

    before, wanted = counted(), dict.fromkeys([*names.values(), "deferred"], 0)
    for seed in range(20):
        usage = ask(url, {"prompt": "201", "method": "opt", "alpha": 0.05, "seed": seed})[1]["usage"]
        for name in wanted:
            wanted[name] += usage[name]
    after = counted()
    for name, own in names.items():
        assert after[name] - before[name] == wanted[own] > 0
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


def test_half_sent_bodies_and_slow_readers_hold_nobody_up(impatient):
    url, _ = impatient
    before = sound(url)
    half = [raw(url, b'{"prompt": "1"', length=100) for _ in range(8)]
    readers = [raw(url, json.dumps({"prompt": "201", "stream": True, "n": 8}).encode()) for _ in range(2)]
    assert sound(url) == before  # while they wait
    assert b" 408 " in half[0].recv(2000)
    for client in (*half, *readers):
        client.close()
    assert until_idle(url) < 20


def test_a_full_queue_says_when_to_come_again(impatient):
    url, engine = impatient
    found, before = [], refusals(url)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for status, answer, headers in pool.map(
                lambda n: ask(url, {"prompt": "201", "n": 20, "seed": n}), range(96)):
            found.append(status)
            if status == 429:
                assert int(headers["Retry-After"]) >= 1 and answer["error"]["code"] == "queue_full"
    assert set(found) == {200, 429}
    assert engine.idle and gauges(url) == [0, 0]
    assert refusals(url) - before == found.count(429)


def test_a_request_that_takes_too_long_is_ended(toy, monkeypatch):
    with serving(toy, seconds=0.5) as (url, _):
        lane = toy.lane(toy.defaults)
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
        lane = toy.lane(toy.defaults)
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


def test_logits_that_are_no_numbers_are_told_and_leave_the_server_alive(toy):
    lane = toy.lane(toy.defaults)
    with serving(toy) as (url, _):
        whole = lane.scheduler.programs.params
        lane.scheduler.programs.params = tuple(np.full_like(table, np.nan) for table in whole)
        status, answer, _ = ask(url, {"prompt": "201"})
        assert status == 500 and "not numbers" in answer["error"]["message"]
        lane.scheduler.programs.params = whole
        assert ask(url, {"prompt": "201"})[0] == 200


def test_keys_cors_and_the_page_are_as_asked(toy):
    with serving(toy, keys=("first", "second"), page=False,
                 origins=("https://example.org",)) as (url, _):
        assert ask(url, {"prompt": "1"})[0] == 401 == ask(url, path="/v1/models")[0]
        assert ask(url, {"prompt": "1"}, Authorization="Bearer firs")[0] == 401
        assert ask(url, {"prompt": "1"}, Authorization="Bearer \u00e9")[0] == 401
        assert ask(url, {"prompt": "1"}, Authorization="Bearer second")[0] == 200
        assert ask(url, path="/")[0] == 404 and ask(url, path="/health")[0] == 200
        headers = ask(url, path="/health", Origin="https://example.org")[2]
        assert headers["Access-Control-Allow-Origin"] == "https://example.org"
        headers = ask(url, path="/health", Origin="https://example.com")[2]
        assert headers["Access-Control-Allow-Origin"] is None
