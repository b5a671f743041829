"""A server of toys within the test's process, and a client for hostile hands."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import toys

from speccascade_jax.commands.serve import server_of
from speccascade_jax.config import DecodeConfig
from speccascade_jax.core.samplers.lookup import MODEL_FREE
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.serving.app import Limits, create_app
from speccascade_jax.serving.engine import Engine
from speccascade_jax.serving.metrics import Metrics
from speccascade_jax.serving.models import ServedModel


class Digits(toys.Digits):
    """One that stop texts can be looked for with: each is a piece or none."""

    size = 4


def toy_model(methods=("speculative", "opt"), rows=8, by_load=False, verification="token", **fields):
    """The toy pair as a model named toy; texts are digits below 4, and 3 ends one."""
    cascade = toys.pair(**fields)
    cascade.tokenizer = Digits()
    config = DecodeConfig(
        drafter="toy",
        verifier="toy",
        method=methods[0],
        block_size=2,
        temperature=1.0,
        max_new_tokens=3,
        verification=verification,
    )
    return ServedModel("toy", config, cascade, methods, rows, by_load=by_load)


def toy_models(count, method, by_load=False, **fields):
    """A model named toys of `count` toys, the smallest first."""
    tables = tuple(toys.table(39 + n, 4) for n in range(count))
    cascade = Cascade((toys.TableLM(4),) * count, tables, Digits(), max_source_length=16, max_new_tokens=3)
    config = DecodeConfig(models=("toy",) * count, method=method, temperature=1.0, max_new_tokens=3, **fields)
    return ServedModel("toys", config, cascade, ("verifier",), 2, by_load=by_load)


def toy_lookup(by_load=False):
    """A model named lookup: a toy whose drafts are looked up."""
    entry = MODEL_FREE["lookup"]
    models, params = (entry.model(4, None), toys.TableLM(4)), ((), toys.table(40, 4))
    cascade = Cascade(models, params, Digits(), max_source_length=16, max_new_tokens=3, model_free=entry)
    config = DecodeConfig(drafter="lookup", verifier="toy", block_size=2, temperature=1.0, max_new_tokens=3)
    methods = ("speculative", "token_v3", "opt", "drafter")
    return ServedModel("lookup", config, cascade, methods, 4, by_load=by_load)


@contextlib.contextmanager
def serving(*models, max_queue=64, ready=True, **limits):
    """Serves the models from a thread: the URL and the engine."""
    metrics = Metrics()
    engine = Engine([lane for model in models for lane in model.lanes.values()], max_queue, 2, metrics.heard)
    app = create_app(models, engine, metrics, Limits(**limits))
    server = server_of(app, engine, drain_seconds=0)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        while ready and not engine.ready:
            assert engine.failed is None, engine.failed
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        thread.join()


def ask(url, body=None, path="/v1/completions", **headers):
    """Sends a body, or asks for a path without one: the status, the answer and its headers."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text[:1] == b"{" else text.decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers


def streamed(url, body):
    """The text of an answer that comes in pieces."""
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.read().decode().splitlines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def check_served(cascade, prompts, config, shares=False):
    """Prompts at once, in two rows that are refilled: of two methods, several temperatures and block sizes up
    to the config's, half of them streamed. Each answer is the text that its prompt has alone, where nothing
    is kept of prompts. `shares`: whether the server finds what some begin with, 4 tokens at a time."""
    cascade.prefixes = PrefixCache(10**6)
    served, bodies = ServedModel("pair", config, cascade, ("opt", "speculative"), 2, 4), []
    for n, prompt in enumerate(prompts):
        options = {"method": "opt", "alpha": 0.1} if n % 2 else {"method": "speculative", "alpha": 0.0}
        options |= {"seed": n, "temperature": (0.0, 1.0, 0.7)[n % 3], "block_size": 1 + n % config.block_size}
        bodies.append({"prompt": prompt, **options})
    with serving(served) as (url, _), concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        streams = pool.map(lambda body: streamed(url, body), bodies[::2])
        answers = pool.map(lambda body: ask(url, body)[1]["choices"][0]["text"], bodies[1::2])
        texts = [*streams], [*answers]
        metrics = ask(url, path="/metrics")[1].splitlines()
    hits = sum(
        float(line.split()[-1]) for line in metrics if line.startswith("vllm:prefix_cache_hits_total{")
    )
    assert (hits > 0) == shares
    cascade.prefixes, alone = None, []
    for body in bodies:
        settings = dataclasses.replace(served.defaults, **{k: v for k, v in body.items() if k != "prompt"})
        [output] = cascade.generate([body["prompt"]], settings)
        alone.append(output.text)
    assert texts == (alone[::2], alone[1::2])
    assert len(set(alone)) > len(alone) // 2  # rows are unlike each other


def raw(url, body, path="/v1/completions", length=None):
    """A socket on which a request has been sent; length: what its header says."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n".encode()
        + body
    )
    return connection


def gauges(url):
    """Running and waiting requests, as /metrics says."""
    text = ask(url, path="/metrics")[1]
    return [
        float(
            next(
                line for line in text.splitlines() if line.startswith(f"vllm:num_requests_{name}{{")
            ).split()[-1]
        )
        for name in ("running", "waiting")
    ]


def until_idle(url):
    """Waits until no request runs or waits: the seconds that took."""
    began = time.monotonic()
    while gauges(url) != [0, 0]:
        assert time.monotonic() - began < 30, gauges(url)
        time.sleep(0.05)
    return time.monotonic() - began
