"""scripts/serve.py as a process: start, stop, chats, several models and its page."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from served_toys import ask, gauges, raw

from speccascade_jax.commands import load, serve
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference import progress
from speccascade_jax.settings import Settings

TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}
{{ raise_exception('no system role') }}{% endif %}<start_of_turn>{{ message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
CHAT = """
from speccascade_jax.config import DecodeConfig
config = DecodeConfig(drafter={drafter!r}, verifier={verifier!r}, method="token_v3", alpha=0.3, block_size=2,
                      max_source_length=48, max_new_tokens=16, temperature=1.0)
"""


def refused(capsys, *flags):
    """The sentence of a command line that is wrong."""
    assert serve.main(list(flags)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_wrong_command_lines_end_with_a_sentence(tmp_path, capsys, served_config):
    """One that names the flag."""
    empty, latin, pipe = tmp_path / "empty", tmp_path / "latin", tmp_path / "pipe"
    empty.write_text("\n")
    latin.write_bytes("schl\u00fcssel".encode("latin-1"))
    os.mkfifo(pipe)
    for flags in (
        ["--port=70000"],
        ["--host=no.such.host.invalid"],
        ["--rows=0"],
        ["--rounds=0"],
        ["--timeout=0"],
        ["--timeout=nan"],
        [f"--api-key-file={empty}"],
        [f"--api-key-file={latin}"],
        [f"--api-key-file={pipe}"],
        ["--api-key-file=missing"],
        [f"--api-key-file={tmp_path}"],
        ["--api-key-file=/dev/zero"],
        ["--methods", "bild"],
        ["--also", "nothing"],
        ["--vocabulary=slem"],
        ["--also", str(served_config)],
    ):
        sentence = refused(capsys, f"--config={served_config}", "--port=0", *flags)
        assert flags[0].split("=")[0] in sentence or flags[-1] in sentence, (flags, sentence)


def test_the_second_server_of_a_port_is_refused(capsys, served_config):
    """Before anything is loaded, and while the first may still be loading."""
    with serve.bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert str(port) in refused(capsys, f"--config={served_config}", f"--port={port}")
        assert str(port) in refused(capsys, f"--config={served_config}", "--host=0.0.0.0", f"--port={port}")


def test_a_key_that_no_client_could_send_is_refused(capsys, served_config, monkeypatch):
    for key in (b"\xff", b" "):
        monkeypatch.setitem(os.environ, serve.KEY, os.fsdecode(key))
        assert serve.KEY in refused(capsys, f"--config={served_config}", "--port=0")


def test_keys_are_read_as_utf_8(tmp_path, monkeypatch, served_config):
    file = tmp_path / "keys"
    file.write_bytes("\ufeffschl\u00fcssel\n\n second \r\n".encode())
    monkeypatch.setenv(serve.KEY, "third")
    arguments = serve.parse([f"--config={served_config}", f"--api-key-file={file}"])
    assert serve.keys(arguments) == ("third", "schl\u00fcssel", "second")


def test_a_file_of_keys_may_be_several_joined_files(tmp_path):
    """Each with a mark of its byte order."""
    (tmp_path / "keys").write_bytes(2 * "\ufefffirst\n".encode() + "\ufeff\ufeffsecond".encode())
    assert serve.keys_in(str(tmp_path / "keys")) == ["first", "first", "second"]


def test_a_key_with_control_characters_is_refused(tmp_path, monkeypatch, served_config):
    """UTF-16 without a mark of its byte order is UTF-8 with a null in every character."""
    for content in ("secret\n".encode("utf-16-le"), b"a\x7f", b"\x1b[31m"):
        (tmp_path / "keys").write_bytes(content)
        with pytest.raises(FieldError) as refused:
            serve.keys_in(str(tmp_path / "keys"))
        assert (refused.value.field, refused.value.value) == ("api_key_file", str(tmp_path / "keys"))
    monkeypatch.setenv(serve.KEY, "a\x01b")
    with pytest.raises(FieldError) as refused:
        serve.keys(serve.parse([f"--config={served_config}"]))
    assert refused.value.field == serve.KEY and "\x01" not in str(refused.value)  # a key is told to nobody


def test_a_file_without_keys_and_an_address_in_use_are_named(tmp_path):
    (tmp_path / "none").write_bytes(b"\n \n")
    for path in (tmp_path / "none", tmp_path / "missing", tmp_path):
        with pytest.raises(FieldError) as refused:
            serve.keys_in(str(path))
        assert (refused.value.field, refused.value.value) == ("api_key_file", str(path))
    with serve.bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(FieldError) as refused:
            serve.bound("127.0.0.1", port)
    assert (refused.value.field, refused.value.value) == ("port", port)


def test_a_port_of_hundreds_of_digits_is_refused_in_a_sentence():
    with pytest.raises(FieldError) as error:
        serve.bound("127.0.0.1", 10**400)
    assert error.value.field == "port" and len(str(error.value)) < 200


@pytest.mark.full
def test_sigterm_while_it_compiles_ends_it(served_config, tmp_path, make_server):
    """At once, and without an abort."""
    server = make_server(
        tmp_path, f"--config={served_config}", "--rows=2", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache")
    )
    while True:  # until it listens
        try:
            assert urllib.request.urlopen(server.url + "/health").status == 200
            break
        except urllib.error.URLError:
            assert server.process.poll() is None
            time.sleep(0.05)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(server.url + "/ready")
    time.sleep(1)  # into the first programs
    began = time.monotonic()
    assert server.end() == 0 and time.monotonic() - began < 15
    assert not any("terminate called" in line for line in server.logged)


@pytest.mark.full
def test_sigterm_under_load_lets_running_requests_finish(served_config, tmp_path, make_server):
    server = make_server(
        tmp_path,
        f"--config={served_config}",
        "--rows=2",
        "--methods",
        "token_v3",
        SPECCASCADE_API_KEY="secret",
    ).until_ready()
    key = {"Authorization": "Bearer secret"}
    assert ask(server.url, {"prompt": "the cat"})[0] == 401

    def long(number):
        return ask(server.url, {"prompt": "birds sing", "temperature": 1.5, "seed": number, "n": 4}, **key)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        begun = [pool.submit(long, number) for number in range(12)]
        while sum(gauges(server.url)) < 20:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        while ask(server.url, path="/ready")[0] == 200:
            time.sleep(0.01)
        status, answer, headers = ask(server.url, {"prompt": "the cat"}, **key)
        assert status == 503 and answer["error"]["code"] == "draining" and headers["Retry-After"]
        statuses = [future.result()[0] for future in begun]
    assert server.process.wait(timeout=30) == 0
    assert set(statuses) <= {200, 503} and statuses.count(200) >= 5
    logged = [json.loads(line) for line in server.lines()]
    assert len([line for line in logged if line.get("status") == 200]) == statuses.count(200)
    assert not any("birds" in json.dumps(line) for line in logged)  # no texts


@pytest.mark.full
def test_chats_and_several_models(gemma_pair, served_config, tmp_path, make_server):
    """Two configs, one with a chat template: what it renders, decoded as generate decodes it."""
    import speccascade_jax

    openai = pytest.importorskip("openai")
    folder = tmp_path / "pair"
    shutil.copytree(gemma_pair, folder)
    (folder / "verifier" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<bos>"}, "chat_template": TEMPLATE})
    )
    config = tmp_path / "chatty.py"
    config.write_text(CHAT.format(drafter=str(folder / "drafter"), verifier=str(folder / "verifier")))
    server = make_server(
        tmp_path, f"--config={config}", "--also", str(served_config), "--rows=2", "--methods", "token_v3"
    ).until_ready()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["chatty", "tiny"]
    chat = [
        {"role": "user", "content": "the cat sat"},
        {"role": "assistant", "content": "why not"},
        {"role": "user", "content": " a dog "},
    ]
    asked = {"model": "chatty", "messages": chat, "seed": 3, "max_completion_tokens": 12}
    answer = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    prompt = "".join(
        f"<start_of_turn>{message['role']}\n{message['content'].strip()}<end_of_turn>\n" for message in chat
    )
    cascade = speccascade_jax.load(str(config))
    settings = Settings(
        method="token_v3", alpha=0.3, block_size=2, temperature=1.0, seed=3, max_new_tokens=12
    )
    wanted = [output.text for output in cascade.generate([prompt + "<start_of_turn>model\n"] * 2, settings)]
    assert [choice.message.content for choice in answer.choices] == wanted
    scores = answer.choices[0].logprobs.content
    assert "".join(score.token for score in scores) == wanted[0] and len(scores[0].top_logprobs) == 2
    events = list(client.chat.completions.create(**asked, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == wanted[0]
    for model, messages in (("chatty", [{"role": "system", "content": "x"}]), ("tiny", chat)):
        with pytest.raises(openai.BadRequestError) as error:  # the template objects; there is none
            client.chat.completions.create(model=model, messages=messages)
        assert error.value.param == "messages"
    assert client.completions.create(model="tiny", prompt="the cat").choices[0].text
    for messages in (
        b"[]",
        b'[{"role": "user"}]',
        b"[3]",
        b'[{"role": "king", "content": "x"}]',
        b'"x"',
        b'[{"role": "user", "content": "' + b"a dog " * 100 + b'"}]',
    ):
        status, answer, _ = ask(
            server.url, b'{"model": "chatty", "messages": ' + messages + b"}", "/v1/chat/completions"
        )
        assert (status, answer["error"]["param"]) == (400, "messages")
    status, answer, _ = ask(
        server.url, {"model": "chatty", "messages": chat, "top_logprobs": 1}, "/v1/chat/completions"
    )
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")
    assert server.end() == 0


@pytest.mark.full
def test_clients_that_leave_a_process_leave_no_row_behind(server):
    """1,000 of them in the middle of their streams."""
    for number in range(1000):
        client = raw(
            server.url,
            json.dumps({"prompt": "birds sing", "stream": True, "temperature": 1.5, "seed": number}).encode(),
        )
        if number % 2:
            client.recv(1 + number)
        client.close()
    began = time.monotonic()
    while gauges(server.url) != [0, 0]:
        assert time.monotonic() - began < 30
        time.sleep(0.1)
    assert ask(server.url, {"prompt": "the cat"})[0] == 200


@pytest.mark.full
def test_load_measures_a_server_against_decode(served_config, tmp_path, monkeypatch, capsys):
    """And reports its progress, where it would otherwise print nothing for minutes."""
    monkeypatch.setattr(progress, "EVERY", 0)
    out = tmp_path / "load.json"
    assert (
        load.main(
            [
                f"--config={served_config}",
                "--requests=6",
                "--rows=2",
                "--clients=3",
                "--minutes=0.02",
                f"--output={out}",
            ]
        )
        == 0
    )
    said = capsys.readouterr().err
    assert all(
        sentence in said for sentence in ("starting the servers", "throughput: 1 of 9", "latency: 2 of 3")
    )
    report = json.loads(out.read_text())
    for name in ("saturated", "one_at_a_time"):
        assert (report[name]["accepted"], report[name]["lost"]) == (3 * 6, 0)
        assert report[name]["tokens_per_second"] > 0
    least, ratio, peak = (report["saturated"][name] for name in ("least", "ours_to_decode.py", "most"))
    assert least <= ratio <= peak
    assert report["times"]["round_ms"] > 0 and report["times"]["request_ms"] >= 0
    for name in ("half_load", "load_120"):
        assert report[f"{name}, simulated over measured"]["whole_ms_p50"] > 0
        assert report[name]["lost"] == 0 and report[name]["requests"] == (
            report[name]["accepted"] + report[name]["refused_429"]
        )
    assert report["load_120"]["megabytes"]


@pytest.mark.full
def test_the_page_in_a_browser(server, tmp_path):
    """Chromium, playwright-core and axe-core: `npm install playwright-core axe-core`, and their folder in
    $NODE_PATH."""
    node, chromium = shutil.which("node"), shutil.which("chromium")
    modules = Path(os.environ.get("NODE_PATH", "node_modules")).resolve()
    if not (node and chromium and (modules / "playwright-core").is_dir() and (modules / "axe-core").is_dir()):
        pytest.skip("needs node, chromium, playwright-core and axe-core")
    script = tmp_path / "page.mjs"
    script.write_bytes((Path(__file__).parent / "page.mjs").read_bytes())
    (tmp_path / "node_modules").symlink_to(modules)
    done = subprocess.run(
        [node, str(script), server.url + "/", chromium, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    views = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(view["scheme"], view["width"]) for view in views] == [
        ("light", 400),
        ("light", 1200),
        ("dark", 400),
        ("dark", 1200),
    ]
    for view in views:
        assert view["violations"] == [] and view["errors"] == []  # accessibility; scripts, and other hosts
        assert view["scrolls"] <= view["width"] and view["written"] > 1 and view["verifier"] == 1
        assert view["split"] == 0 and "times as fast" in view["status"]
        assert view["folds"] == (view["width"] == 400)
        assert view["width"] > 400 or view["bottom"] < 900  # the text is in sight without scrolling
        assert view["grew"] and view["method"] == "opt"
        assert (tmp_path / f"{view['scheme']}_{view['width']}.png").stat().st_size > 10_000
