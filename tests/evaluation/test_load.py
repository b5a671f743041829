"""The measurements of load clients on a server with known answers."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from speccascade_jax.evaluation.load import closed_loop, conversations, open_loop

ASKED = []


class Handler(BaseHTTPRequestHandler):
    """Writes five tokens, the first after 50 ms; prompts ask for a refusal, an error or a broken stream."""

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        self.send_response(429 if prompt == "full" else 200)
        self.end_headers()
        if prompt == "full":
            return
        time.sleep(0.05)
        ASKED.append(prompt)
        events = [
            {"choices": [{"text": "a"}]},
            {"choices": [{"text": "b"}]},
            {"choices": [], "usage": {"completion_tokens": 5}},
        ]
        if prompt == "error":
            events.append({"error": {"message": "it failed"}})
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        if prompt != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_closed_loop_counts_every_outcome(url):
    bodies = [{"prompt": prompt} for prompt in ["well"] * 12 + ["full"] * 3 + ["cut", "error"]]
    load = asyncio.run(closed_loop(url, bodies, clients=4))
    said = load.summary()
    assert (said["requests"], said["accepted"], said["refused_429"], said["lost"]) == (17, 12, 3, 2)
    assert said["tokens_per_second"] == 12 * 5 / load.seconds
    assert 50 <= said["first_token_ms_p50"] <= said["whole_ms_p99"] and load.seconds > 3 * 0.05
    assert asyncio.run(closed_loop("http://127.0.0.1:9", bodies[:2], 2)).summary()["lost"] == 2


def test_clients_pause_before_each_request(url):
    load = asyncio.run(closed_loop(url, [{"prompt": "well"}] * 6, clients=2, pause=0.1))
    assert len(load.accepted) == 6 and load.seconds >= 6 * (0.1 + 0.05) / 2
    assert load.rate_of(2, 0.1) == pytest.approx(2 / (2 / load.rate_of(2) + 0.1))


@pytest.mark.full
def test_an_open_loop_does_not_wait_for_answers(url):
    """The first two answers have not come when the third request is sent."""
    watched = []
    arrivals = [0.1, 0.11, 0.12, *np.linspace(0.3, 0.5, 17)]
    load = asyncio.run(
        open_loop(url, lambda n: {"prompt": "well"}, arrivals, watch=lambda: watched.append(time.time()))
    )
    assert len(load.accepted) == len(load.replies) == 20 and len(watched) == 10
    assert watched[1] - watched[0] == pytest.approx(0.02, abs=0.02)
    assert 0.55 <= load.seconds < 0.1 + 20 * 0.05


def test_a_conversation_repeats_all_that_was_said(url):
    """Questions and answers, as the server has read and written them."""
    ASKED.clear()
    chats = asyncio.run(conversations(url, "Hello. ", [["x", "y"], ["u", "v"]], " =", {"seed": 1}))
    assert sorted(ASKED) == ["Hello. u", "Hello. u =ab\n\nv", "Hello. x", "Hello. x =ab\n\ny"]
    assert [[reply.text for reply in chat] for chat in chats] == [["ab", "ab"], ["ab", "ab"]]
    assert all(reply.first >= 0.05 for chat in chats for reply in chat)
    with pytest.raises(ValueError, match="status 429"):
        asyncio.run(conversations(url, "", [["full"]], "", {}))
