"""serve.py --ray on a local cluster of two replicas, which are killed and replaced under load."""

import asyncio
import dataclasses
import signal
import time
from types import SimpleNamespace

import pytest
from served_toys import ask

from speccascade_jax import config as configs
from speccascade_jax.evaluation import losses
from speccascade_jax.evaluation.losses import Killer, Outcome, judged, texts_of, under_kills
from speccascade_jax.serving.replicas import Replica

BODIES = [{"prompt": f"the cat sat {n}", "temperature": 1.0, "seed": n} for n in range(12)]


def replicas_in(url):
    """The replicas whose requests /metrics tells."""
    lines = ask(url, path="/metrics")[1].splitlines()
    return {
        line.partition('replica="')[2].partition('"')[0]
        for line in lines
        if line.startswith("vllm:num_requests_running{")
    }


@pytest.mark.full
def test_replicas_may_be_killed_and_replaced(served_config, tmp_path, make_server, cascade):
    """Every request is answered as it would be alone, refused with 503, or, in the middle of a stream, told
    that its replica is lost. A rolling restart loses none."""
    pytest.importorskip("ray.serve")
    flags = ("--ray=local", "--replicas=2", "--rows=2", "--methods", "token_v3")
    server = make_server(tmp_path, f"--config={served_config}", *flags)
    while ask(server.url, path="/ready")[0] != 200:
        assert server.process.poll() is None, server.lines()
        time.sleep(0.5)
    settings = configs.load(str(served_config)).settings
    texts = [
        next(iter(cascade.generate([body["prompt"]], dataclasses.replace(settings, **fields)))).text
        for body in BODIES
        for fields in [{name: body[name] for name in ("temperature", "seed")}]
    ]
    assert asyncio.run(texts_of(server.url, BODIES, 4)) == texts
    first = replicas_in(server.url)
    assert len(first) == 2
    killer = Killer(server.process.pid, server.url, 2, between=2)
    seen = asyncio.run(under_kills(server.url, BODIES, texts, 8, 20, killer))
    assert seen["killed"] >= 1 and seen["answered"] > 0
    assert (seen["lost"], seen["wrong"]) == (0, 0)
    assert seen["answered"] + seen["refused_503"] + seen["interrupted"] == seen["requests"]

    while len(second := replicas_in(server.url)) < 2:  # until the killed one is replaced
        time.sleep(0.5)
    assert second != first
    server.process.send_signal(signal.SIGHUP)
    seen = asyncio.run(under_kills(server.url, BODIES, texts, 4, 5, lambda: False))
    assert seen["answered"] == seen["requests"] > 0
    while not replicas_in(server.url).isdisjoint(second):
        [text] = asyncio.run(texts_of(server.url, BODIES[:1], 1))
        assert text == texts[0]
    assert server.end() == 0


@pytest.mark.parametrize("failed", [None, ValueError("no memory")])
def test_a_replica_is_available_once_everything_is_compiled(failed):
    """Or raises why it will not be."""
    engine = SimpleNamespace(ready=False, failed=None, healthy=True, stop=lambda: None)

    def compiled():
        engine.ready, engine.failed = failed is None, failed

    engine.start = lambda loop: loop.call_later(0.05, compiled)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"], "more_body": False})

    async def begin():
        replica = Replica.__new__(Replica)
        await replica.__init__(lambda: (app, engine))
        assert engine.ready
        parts = [part async for parts in replica.answer({"type": "http"}, b"abc") for part in parts]
        assert parts[-1]["body"] == b"abc"
        replica.check_health()
        engine.healthy = False
        with pytest.raises(RuntimeError):
            replica.check_health()

    if failed is None:
        asyncio.run(begin())
    else:
        with pytest.raises(ValueError, match="no memory"):
            asyncio.run(begin())


def test_outcomes_of_answers():
    """An answer counts as complete only if its end has arrived."""
    event = b'data: {"choices": [{"text": "%s"}]}\n\n'
    error, done = b'data: {"error": {"message": "x"}}\n\n', b"data: [DONE]\n\n"
    for status, body, stream, wanted in (
        (200, b'{"choices": [{"text": "ab"}]}', False, ("answered", "ab")),
        (503, b'{"error": {"message": "x"}}', True, ("refused", "x")),
        (200, event % b"a" + event % b"b" + done, True, ("answered", "ab")),
        (200, event % b"a" + error + done, True, ("interrupted", "a")),
        (200, event % b"a", True, ("lost", "")),
        (200, event % b"a" + event % b"b", True, ("lost", "a")),
    ):
        assert judged(status, body, stream) == Outcome(wanted[0], status, wanted[1])
    with pytest.raises(ValueError):
        judged(200, b'{"choices": [{"te', False)


def test_answers_that_are_doubled_or_mixed_are_counted(monkeypatch):
    outcomes = {
        "a": Outcome("answered", 200, "xx"),
        "b": Outcome("interrupted", 200, "z"),
        "c": Outcome("interrupted", 200, "y"),
        "d": Outcome("lost", 0, ""),
        "e": Outcome("refused", 503, "later"),
    }

    async def outcome(url, body):
        await asyncio.sleep(0.01)
        return outcomes[body["prompt"]]

    monkeypatch.setattr(losses, "outcome", outcome)
    monkeypatch.setattr(losses, "PAUSE", 0)
    bodies, texts = [{"prompt": name} for name in "abcde"], ["x", "y", "y", "y", "y"]
    seen = asyncio.run(under_kills("", bodies, texts, 2, 0.5, lambda: False))
    assert seen["requests"] == sum(seen[kind] for kind in ("answered", "interrupted", "lost", "refused_503"))
    assert seen["wrong"] == pytest.approx(0.4 * seen["requests"], abs=4)
    assert all(seen[kind] for kind in ("answered", "interrupted", "lost", "refused_503"))
