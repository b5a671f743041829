"""--cluster: the devices of several processes act as one machine, and a dead process ends the job."""

import concurrent.futures
import json
import os
import random
import signal
import time
import urllib.request

import numpy as np
import pytest
from corpora import SENTENCES
from processes import devices, finish, free_address, start, start_cluster, start_code
from served_toys import ask

from speccascade_jax import config as configs
from speccascade_jax.cluster import LOST
from speccascade_jax.commands import decode

COUNT = int(os.environ.get("SERVED_REQUESTS", 30))
TEXTS = [f"{text} {n}" for n in range(2) for text in SENTENCES]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Two devices in each process, and programs that are compiled once."""
    return {
        **os.environ,
        "XLA_FLAGS": devices(2),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
    }


@pytest.fixture(scope="module")
def arguments(t5_pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs") / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return [
        f"--input={path}",
        f"--drafter={t5_pair / 'drafter'}",
        f"--verifier={t5_pair / 'verifier'}",
        "--router=None",
        "--method=token_v3",
        "--temperature=1",
        "--max-source-length=32",
        "--max-new-tokens=24",
        "--batch-size=1",
    ]


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory):
    """What one process with one device writes."""
    output = tmp_path_factory.mktemp("alone") / "texts.jsonl"
    assert decode.main([*arguments, f"--output={output}"]) == 0
    return output.read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("sharers", [1, 2])
def test_two_processes_decode_as_one(sharers, arguments, alone, environment, tmp_path):
    output = tmp_path / "texts.jsonl"
    flags = [*arguments, f"--output={output}", f"--tensor-parallel={sharers}"]
    finish(start_cluster("decode.py", flags, environment))
    assert output.read_bytes() == alone


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_and_the_same_command_resumes(
    victim, arguments, alone, environment, tmp_path
):
    output = tmp_path / "texts.jsonl"
    flags = [*arguments, "--tensor-parallel=4", f"--output={output}"]
    processes = start_cluster("decode.py", flags, environment)
    while not (output.is_file() and output.stat().st_size):
        time.sleep(0.01)
        assert all(process.poll() is None for process in processes)
    processes[victim].send_signal(signal.SIGKILL)
    errors = processes[1 - victim].communicate(timeout=60)[1]
    assert processes[1 - victim].returncode == LOST
    assert f"process {victim} of 2" in errors.splitlines()[-1]
    assert output.read_bytes() != alone
    processes[victim].communicate()
    finish(start_cluster("decode.py", flags, environment))
    assert output.read_bytes() == alone


DYING = """
import os, signal
import jax
from speccascade_jax.cluster import joined

if {dies}:
    jax.distributed.initialize = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with joined({cluster!r}):
    pass
"""


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_while_jax_connects_ends_the_other(victim):
    """JAX itself would wait for five minutes."""
    address = free_address()
    processes = [
        start_code(DYING.format(cluster=f"{address},2,{number}", dies=number == victim)) for number in (0, 1)
    ]
    errors = processes[1 - victim].communicate(timeout=60)[1]
    processes[victim].communicate()
    assert processes[1 - victim].returncode == LOST
    assert f"process {victim} of 2, at 127.0.0.1, has died" in errors.splitlines()[-1]


@pytest.mark.full
def test_a_refusal_by_the_first_process_ends_all_with_its_sentence(arguments, environment, tmp_path):
    flags = [*arguments, f"--input={tmp_path / 'nothing.txt'}", "--tensor-parallel=2"]
    processes = start_cluster("decode.py", flags, environment)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert all("nothing.txt" in said and "Traceback" not in said for said in errors)


@pytest.mark.full
def test_other_flags_of_a_process_end_all_as_bad_input(arguments, environment, tmp_path):
    address = free_address()
    flags = [*arguments, f"--output={tmp_path / 'texts.jsonl'}", "--tensor-parallel=2"]
    commands = [[*flags, f"--alpha=0.{n + 1}", f"--cluster={address},2,{n}"] for n in (0, 1)]
    processes = start("decode.py", *commands, environment=environment)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert all("process 1 has another alpha than process 0 (0.2, not 0.1)" in said for said in errors)
    assert not any("Traceback" in said or "resumes" in said for said in errors)


def requests(count, seed=0):
    """Bodies of unlike requests, each with a seed, and how many lines of it are read, if it streams."""
    rng = random.Random(seed)
    for number in range(count):
        body = {"prompt": rng.choice(SENTENCES), "max_tokens": rng.randint(1, 24), "seed": number}
        body |= {
            "temperature": rng.choice([0, 1]),
            "method": rng.choice(["token_v3", "speculative", "verifier"]),
        }
        body |= rng.choice([{}, {"top_k": 5}, {"logprobs": 2}, {"stop": ["a"]}, {"n": 2}])
        yield body | rng.choice([{}, {}, {"stream": True}]), rng.choice([1, 3, 100])


def answered(url, body, pieces):
    """The choices of a server's answer; None for a stream, whose client may leave early."""
    if not body.get("stream"):
        status, answer, _ = ask(url, body)
        assert status == 200, answer
        return answer["choices"]
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as stream:
        for _, _line in zip(range(pieces), stream, strict=False):
            pass
    return None


def session(processes, count, clients=8):
    """The answers of a server to so many requests, several at a time, in order; it is stopped then."""
    try:
        url = next(line.strip() for line in processes[0].stdout if line.startswith("http"))
        while ask(url, path="/ready")[0] != 200:
            time.sleep(0.1)
            assert processes[0].poll() is None, processes[0].stderr.read()
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            answers = [pool.submit(answered, url, *request) for request in requests(count)]
            answers = [answer.result() for answer in answers]
    finally:
        processes[0].send_signal(signal.SIGTERM)
    finish(processes)
    return answers


@pytest.mark.full
def test_two_processes_serve_as_one(arguments, environment):
    """Streams that clients leave early are cancelled in both."""
    pair = [flag for flag in arguments if not flag.startswith(("--input", "--batch-size", "--temperature"))]
    flags = [*pair, "--port=0", "--rows=2", "--methods", "speculative", "verifier"]
    single_env, two = ({**environment, "XLA_FLAGS": devices(count)} for count in (1, 2))
    alone = session(start("serve.py", flags, environment=single_env), COUNT)
    assert len({str(answer) for answer in alone}) > COUNT / 3
    served = session(start_cluster("serve.py", [*flags, "--tensor-parallel=2"], two), COUNT)
    for a, b in zip(alone, served, strict=True):
        assert (a is None) == (b is None)
        for choice, other in zip(a or [], b or [], strict=True):
            logprobs, others = choice.pop("logprobs"), other.pop("logprobs")
            assert choice == other
            if logprobs:  # sums of another order
                assert logprobs["token_logprobs"] == pytest.approx(others["token_logprobs"], abs=1e-4)


@pytest.mark.full
def test_two_processes_are_timed_as_one(t5_pair, environment, tmp_path):
    small, large = (str(t5_pair / name) for name in ("drafter", "verifier"))
    (tmp_path / "pair.py").write_text(
        "from speccascade_jax.config import DecodeConfig\n"
        f"config = DecodeConfig(drafter={small!r}, verifier={large!r}, tensor_parallel=4, "
        "max_source_length=32, max_new_tokens=16)\n"
    )
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"source": text}) + "\n" for text in SENTENCES))
    flags = [f"--config={tmp_path / 'pair.py'}", f"--input={tmp_path / 'texts.jsonl'}", "--min-tokens=1"]
    flags += ["--block-sizes", "2", f"--output={tmp_path / 'figures.jsonl'}"]
    first, second = finish(start_cluster("benchmark.py", flags, environment))
    assert "times as fast as the verifier alone" in first and "verifier" not in second
    figures = [json.loads(line)["figure"] for line in (tmp_path / "figures.jsonl").open()]
    assert len(figures) == len(set(figures)) > 8


SLOW_CLOCK = """
import sys
from speccascade_jax.commands import plan
from speccascade_jax.planning import timing

real = timing.timed
timing.timed = lambda work: real(work) / 1000
sys.exit(plan.main({flags}))
"""


@pytest.mark.full
def test_two_processes_plan_as_one(t5_pair, environment, tmp_path):
    """Their acceptances are those of one process with as many devices. Times are not: the first process's
    decide, and the other one, whose clock is slow here, follows, also in --check, and writes nothing."""
    pair, texts = (f"{t5_pair / name}" for name in ("drafter", "verifier")), tmp_path / "texts.txt"
    (tmp_path / "pair.py").write_text(
        "from speccascade_jax.config import DecodeConfig\n"
        f"config = DecodeConfig(models={(*pair,)!r}, max_source_length=32, max_new_tokens=8)\n"
    )
    texts.write_text("".join(f"{text}\n" for text in SENTENCES[:4]))
    flags = [f"--config={tmp_path / 'pair.py'}", f"--input={texts}", "--tensor-parallel=2"]
    flags += ["--temperature=1", "--max-block=1", "--repetitions=1"]

    def written_by(name):
        return [f"--output={tmp_path / name}.py", f"--acceptance-to={tmp_path / name}.json"]

    single_env = {**environment, "XLA_FLAGS": devices(4)}
    finish(start("plan.py", [*flags, *written_by("one")], environment=single_env), timeout=900)
    address = free_address()
    together = [
        [*flags, "--check", *written_by(name), f"--cluster={address},2,{number}"]
        for number, name in enumerate(("first", "second"))
    ]
    processes = start("plan.py", together[0], environment=environment)
    processes.append(start_code(SLOW_CLOCK.format(flags=together[1]), **environment))
    first, second = finish(processes, timeout=900)
    assert "written:" in first and "verifier" not in second
    assert not [*tmp_path.glob("second*")]
    alone, shared = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "first"))
    assert np.shape(alone["probs"]) == np.shape(shared["probs"]) == (len(SENTENCES[:4]), 2, 8)
    np.testing.assert_allclose(shared["acceptance"], alone["acceptance"], atol=1e-5)
    np.testing.assert_allclose(shared["probs"], alone["probs"], atol=1e-5)
    planned, output = tmp_path / "first.py", tmp_path / "texts.jsonl"
    assert configs.load(planned).tensor_parallel == 2
    here = [f"--config={planned}", f"--input={texts}", "--tensor-parallel=1", f"--output={output}"]
    assert decode.main(here) == 0
    assert len(output.read_text().splitlines()) == len(SENTENCES[:4])
