"""decode.py --ray on a local cluster of two workers, which are killed, as is the driver."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from corpora import SENTENCES, shuffled
from processes import REPOSITORY, SCRIPTS

from speccascade_jax.commands import decode
from speccascade_jax.core.errors import FieldError
from speccascade_jax.inference import ray_jobs
from speccascade_jax.inference.ray_jobs import check_address, cut, devices_of_machines, read_shards

TEXTS = shuffled(SENTENCES)[:96]


def test_shards_are_cut_in_order(tmp_path, capsys):
    for name, texts in (("b.txt", TEXTS[40:]), ("a.txt", TEXTS[:40])):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    texts = read_shards(str(tmp_path / "*.txt"))
    assert texts == TEXTS
    assert read_shards(str(tmp_path / "*.txt"), 50) == TEXTS[:50]
    shards = cut(texts, 40, tmp_path)
    assert [(Path(s.file).name, s.first, len(s.texts)) for s in shards] == [
        ("part-00000.jsonl", 0, 40),
        ("part-00001.jsonl", 40, 40),
        ("part-00002.jsonl", 80, 16),
    ]
    assert [text for shard in shards for text in shard.texts] == TEXTS
    for flags, words in (
        (["--text=x"], "needs --input"),
        ([f"--input={tmp_path}/*.csv", "--output=x"], "no file"),
        ([f"--input={tmp_path}/a.txt", "--output=x", "--shard-size=0"], "shard-size"),
    ):
        assert decode.main(["--ray=local", *flags]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def listener():
    """A function that serves one connection with these bytes, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answers(data):
            def work():
                connection, _ = server.accept()
                with connection:
                    connection.sendall(data)
                    connection.recv(100)
                    if data is SILENT:
                        connection.recv(100)

            threading.Thread(target=work, daemon=True).start()
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield answers


SILENT = b""


def test_an_address_without_a_cluster_is_reported_at_once(listener, tmp_path, monkeypatch):
    """Ray itself would retry for minutes."""
    monkeypatch.setattr(ray_jobs, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    begun = time.monotonic()
    for address in (
        nobody,
        f"ray://{nobody}",
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        listener(SILENT),
        "nowhere.invalid:1234",
        "localhost",
        "localhost:0",
        "localhost:99999999",
        ":1",
        "x:y",
        "",
    ):
        with pytest.raises(FieldError) as error:
            check_address(address)
        assert (error.value.field, error.value.value) == ("ray", address)
    assert time.monotonic() - begun < 10
    check_address(listener(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])))  # HTTP/2's settings, as gRPC answers
    for address in ("local", "auto"):
        check_address(address)
    (tmp_path / "in.txt").write_text("the cat\n")
    assert (
        decode.main([f"--ray={nobody}", f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / 'out'}"])
        == 2
    )
    assert not (tmp_path / "out").exists()


def test_a_worker_takes_all_accelerators_of_a_machine():
    """On any machine of the cluster: as many as the smallest has, of the types that exist."""

    def devices(*machines):
        return devices_of_machines(
            [{"Alive": alive, "Resources": resources} for alive, resources in machines]
        )

    assert devices((True, {"CPU": 8.0, "GPU": 8.0}), (True, {"GPU": 4.0}), (False, {})) == {"num_gpus": 4.0}
    assert devices((True, {"CPU": 8.0, "TPU": 4.0})) == {"resources": {"TPU": 4.0}}
    assert devices((True, {"CPU": 8.0}), (True, {"GPU": 1.0})) == {}


def processes_of(pid):
    """The ids of a process's descendants, and their names."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=2) for line in table.splitlines()[1:]]
    descendants, fresh = {}, {str(pid)}
    while fresh:
        children = {
            child: name for child, parent, name in rows if parent in fresh and child not in descendants
        }
        descendants |= children
        fresh = set(children)
    return {int(child): name for child, name in descendants.items()}


@pytest.mark.full
def test_workers_and_the_driver_may_be_lost(t5_pair, tmp_path):
    pytest.importorskip("ray")
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    flags = [
        f"--drafter={t5_pair / 'drafter'}",
        f"--verifier={t5_pair / 'verifier'}",
        "--max-source-length=48",
        "--max-new-tokens=24",
        "--temperature=1",
        f"--input={tmp_path / 'in.txt'}",
        "--batch-size=2",
    ]
    assert decode.main([*flags, f"--output={tmp_path / 'whole.jsonl'}"]) == 0
    begun = []

    def driver():
        process = subprocess.Popen(
            [
                sys.executable,
                SCRIPTS / "decode.py",
                *flags,
                f"--output={tmp_path / 'parts'}",
                "--ray=local",
                "--ray-workers=2",
                "--shard-size=4",
            ],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "RAY_DEDUP_LOGS": "0"},
        )
        begun.append(process)
        return process

    def until(process, words):
        for line in process.stdout:
            if words in line:
                return
        raise AssertionError(f"the driver has ended without {words!r}")

    try:
        first = driver()
        until(first, "1 of 24")
        workers = [pid for pid, name in processes_of(first.pid).items() if "MapWorker" in name]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        until(first, "4 of ")
        left = processes_of(first.pid)
        first.kill()
        for pid in left:  # its cluster, which would live on for a while
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        time.sleep(1)
        second = driver()
        before = second.stdout.readline()  # "24 shards, 4 of them done before"
        assert int(before.split(",")[1].split()[0]) >= 4
        assert second.wait(timeout=600) == 0
    finally:
        for process in begun:
            for pid in processes_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
    parts = sorted((tmp_path / "parts").glob("part-*.jsonl"))
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert len(parts) == 24
    whole = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert lines == [json.loads(line) for line in whole]
