"""A server of a tiny pair in a process of its own, and clients of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from processes import REPOSITORY, SCRIPTS

CONFIG = """
from speccascade_jax.config import DecodeConfig
config = DecodeConfig(drafter={drafter!r}, verifier={verifier!r}, method="token_v3", alpha=0.3, block_size=3,
                      max_source_length=32, max_new_tokens=24, examples=("the cat",))
"""


class Server:
    """scripts/serve.py with these flags, from its start until it is ready, and what it has logged."""

    def __init__(self, folder, *flags, **environment):
        self.log = open(folder / f"{time.monotonic_ns()}.log", "w+b")  # noqa: SIM115
        clean = {name: value for name, value in os.environ.items() if name != "SPECCASCADE_API_KEY"}
        self.process = subprocess.Popen(
            [sys.executable, SCRIPTS / "serve.py", "--port=0", *flags],
            text=True,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**clean, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", **environment},
        )
        self.url = self.process.stdout.readline().strip()

    def until_ready(self):
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError):
                if urllib.request.urlopen(self.url + "/ready").status == 200:
                    return self
            assert self.process.poll() is None, self.lines()
            time.sleep(0.2)
        raise TimeoutError("the server is not ready after two minutes")

    def lines(self):
        """What it has logged."""
        return (self.log.seek(0), self.log.read().decode().splitlines())[1]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self.logged = self.lines()
        self.log.close()
        return code


@pytest.fixture(scope="session")
def toy():
    """A toy model that is compiled once; any number of servers may serve it, one after the other."""
    from served_toys import toy_model

    return toy_model(("speculative", "opt", "token_v3", "verifier"), rows=4)


@pytest.fixture(scope="session")
def served_config(t5_pair, tmp_path_factory):
    """The file of a config of the tiny pair."""
    path = tmp_path_factory.mktemp("served") / "tiny.py"
    path.write_text(CONFIG.format(drafter=str(t5_pair / "drafter"), verifier=str(t5_pair / "verifier")))
    return path


@pytest.fixture
def make_server():
    """Server(...), whose process does not outlive the test."""
    made = []

    def make(*arguments, **environment):
        made.append(Server(*arguments, **environment))
        return made[-1]

    yield make
    for server in made:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="session")
def methods(full):
    """What the server serves; the quick suite leaves out what takes a program of its own."""
    return ("token_v3", "speculative", "opt", *(("chow", "verifier") if full else ()))


@pytest.fixture(scope="session")
def server(served_config, methods, tmp_path_factory):
    shared_server = Server(
        tmp_path_factory.mktemp("logs"),
        f"--config={served_config}",
        "--rows=4",
        "--max-queue=200",
        "--methods",
        *methods,
    ).until_ready()
    yield shared_server
    assert shared_server.end() == 0


@pytest.fixture(scope="session")
def cascade(served_config):
    """The served pair in this process."""
    import speccascade_jax

    return speccascade_jax.load(str(served_config))


@pytest.fixture(scope="session")
def post(server):
    """Sends a body and returns the status, the answer and its headers."""

    def send(body, path="/v1/completions", url=server.url, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), error.headers

    return send
