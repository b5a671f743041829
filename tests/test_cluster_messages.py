"""The messages between the processes of a job, here within one process."""

import concurrent.futures
import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time

import jax
import pytest
from processes import free_address

from speccascade_jax import cluster
from speccascade_jax.cluster import LOST, Job, Member
from speccascade_jax.core.errors import FieldError
from speccascade_jax.parallel import decoding_mesh


@pytest.fixture
def ended(monkeypatch):
    """The sentences and codes with which threads would have ended the process."""
    sentences, over = [], threading.Event()

    def end(sentence, code):
        sentences.append((sentence, code))
        over.set()

    monkeypatch.setattr(cluster, "exit_saying", end)
    monkeypatch.setattr(cluster, "FAILED", threading.Event())
    monkeypatch.setattr(cluster.jax.distributed, "shutdown", lambda: None)
    return lambda seconds=10: over.wait(seconds) and sentences


@pytest.fixture
def pair(ended):
    """The first process and another one, connected as they would be."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        here = stack.enter_context(socket.create_connection(server.getsockname()))
        there = stack.enter_context(server.accept()[0])
        members = Member(0, 2, {1: there}), Member(1, 2, {0: here})
        yield members
        for connection in (here, there):
            with contextlib.suppress(OSError):  # closed by the test
                connection.shutdown(socket.SHUT_RDWR)
        for listener in (*members[0].listeners, *members[1].listeners):
            listener.join(10)  # one that outlived `ended` would end the tests' own process
            assert not listener.is_alive()


def meeting(*numbers, processes=3):
    """The port where they meet, and what each of these processes gets there: connections, or a sentence."""
    port = int(free_address().rpartition(":")[2])

    def meet(number):
        try:
            return cluster._meet(cluster.Place("localhost", port, processes, number))
        except ValueError as error:
            return str(error)

    pool = concurrent.futures.ThreadPoolExecutor()
    return port, [pool.submit(meet, number) for number in numbers]


def test_the_connections_of_the_meeting_last():
    _, came = meeting(2, 0, 1)
    second, first, other = (peers.result(10) for peers in came)
    assert sorted(first) == [1, 2] and list(second) == list(other) == [0]
    for number, peers in ((1, other), (2, second)):
        first[number].sendall(b"x")
        assert peers[0].recv(2) == b"x"
    for peer in (*first.values(), *second.values(), *other.values()):
        peer.close()


def test_a_process_that_dies_before_all_have_come_ends_the_others_at_once():
    port, [first] = meeting(0, processes=4)
    with connected(port) as waiting:
        waiting.sendall(b"4 1\n")  # waits for its turn before the other one does
        with connected(port) as dying:
            dying.sendall(b"4 2\n")
        sentence = "process 2 of 4 has died before all had come: start all again."
        assert first.result(10) == waiting.makefile().readline().rstrip() == sentence


def connected(port):
    """A connection to a process that may still be starting."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(("localhost", port), timeout=10)


def test_the_death_of_the_first_process_ends_those_that_have_come():
    with socket.create_server(("localhost", 0)) as server:
        place = cluster.Place("localhost", server.getsockname()[1], 3, 1)
        came = concurrent.futures.ThreadPoolExecutor().submit(cluster._join, place)
        caller, _ = server.accept()
        caller.recv(10)
        caller.close()
    with pytest.raises(ValueError, match=f"process 0 of 3, at localhost:{place.port}, has died"):
        came.result(10)


def test_values_made_by_the_first_process_reach_all(pair):
    first, second = pair
    assert first.first and not second.first
    assert first.share(lambda: ["a\nb", 1]) == second.share(lambda: 1 / 0) == ["a\nb", 1]
    for message in ({"rows": [1, 2]}, None, "end"):
        first.tell(message)
    assert [second.hear() for _ in range(3)] == [{"rows": [1, 2]}, None, "end"]


def test_a_refusal_by_the_first_process_is_raised_by_all(pair):
    first, second = pair

    def refuse():
        raise FieldError("input", "x", "give another.")

    with pytest.raises(FieldError):
        first.share(refuse)
    with pytest.raises(ValueError, match="process 0: input is 'x'; give another"):
        second.share(refuse)


def test_a_refusal_is_no_death_for_a_process_that_hears_of_it_later(pair, ended):
    """It may still be connecting when the first process, which waits for it, has given up and exited."""
    first, second = pair
    with pytest.raises(OSError, match="no such file"):
        first.share(refuse)
    exiting = threading.Thread(target=first.fail, args=[OSError("no such file")])
    exiting.start()
    exiting.join(0.2)
    assert exiting.is_alive()
    first.peers[1].shutdown(socket.SHUT_RDWR)
    for listener in second.listeners:
        listener.join(10)
    exiting.join(10)
    assert not exiting.is_alive() and not ended(0)
    with pytest.raises(ValueError, match="process 0: no such file"):
        second.share(refuse)


def refuse():
    raise OSError("no such file")


def test_processes_that_hang_delay_the_first_one_together(monkeypatch, ended):
    """Not one after the other."""
    monkeypatch.setattr(cluster, "WORD", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = [socket.create_connection(server.getsockname()) for _ in range(4)]
        ours = [server.accept()[0] for _ in theirs]
    first = Member(0, 5, dict(enumerate(ours, 1)))
    with pytest.raises(OSError, match="no such file"):
        first.share(refuse)
    begun = time.monotonic()
    first.fail(OSError("no such file"))
    assert 0.5 <= time.monotonic() - begun < 1.5
    for hanging in theirs:
        hanging.close()
    for listener in first.listeners:
        listener.join(10)
    assert not ended(0)
    for connection in ours:
        connection.close()


def test_other_flags_are_named(pair):
    first, second = pair
    first.agree({"alpha": 0.1, "stop": ("a",)})
    second.agree({"alpha": 0.1, "stop": ("a",)})
    first.agree({"alpha": 0.1})
    with pytest.raises(ValueError, match=r"another alpha than process 0 \(0\.2, not 0\.1\): "):
        second.agree({"alpha": 0.2})


@pytest.mark.parametrize("victim", [0, 1])
def test_a_connection_that_breaks_ends_the_process_and_names_the_other(victim, pair, ended):
    pair[victim].failed = True  # a dead process does not report the other one's end
    [connection] = pair[victim].peers.values()
    connection.shutdown(socket.SHUT_RDWR)
    assert any(f"process {victim} of 2, at 127.0.0.1, has died" in sentence for sentence, _ in ended())


def test_a_process_that_died_before_anyone_listened_is_noticed(ended):
    """A connection that was reset no longer says whose it was."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dying = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    dying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    dying.close()
    with peer:
        Member(0, 2, {1: peer})
        assert any("process 1 of 2, at an unknown address, has died" in sentence for sentence, _ in ended())


def test_an_error_is_reported_with_its_reason(pair, ended):
    pair[1].fail(OSError(28, "No space left on device"))
    assert cluster.FAILED.is_set()
    end = "process 1 of 2 has failed ([Errno 28] No space left on device), and the job ends"
    assert ended() == [(f"error: {end}; the same command resumes.\n", LOST)]


@pytest.mark.parametrize("refusing", [0, 1])
def test_bad_input_of_one_process_is_that_of_all(refusing, pair, ended):
    """The same command would fail again."""
    pair[refusing].fail(ValueError("Start all with the same flags."))
    end = f"process {refusing} of 2 has failed (Start all with the same flags), and the job ends"
    assert ended() == [(f"error: {end}.\n", 2)]


def test_the_first_process_passes_on_why_the_job_ends(ended):
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = [socket.create_connection(server.getsockname()) for _ in range(2)]
        first = Member(0, 3, {number: server.accept()[0] for number in (1, 2)})
    members = [Member(number, 3, {0: peer}) for number, peer in enumerate(theirs, 1)]
    members[0].fail(ValueError("other flags"))
    for listener in (*members[1].listeners, first.listeners[0]):
        listener.join(10)
    assert {*ended()} == {("error: process 1 of 3 has failed (other flags), and the job ends.\n", 2)}
    first.failed = True
    for connection in theirs:
        connection.shutdown(socket.SHUT_RDWR)
    for listener in (*first.listeners, *members[0].listeners):
        listener.join(10)
    for connection in (*theirs, *first.peers.values()):
        connection.close()


def test_the_sentence_is_the_last_line_whatever_else_is_reported():
    script = (
        "import os\n"
        "from speccascade_jax.cluster import exit_saying\n"
        "end = os._exit\n"
        "os._exit = lambda code: os.write(2, b'Socket closed\\n') and end(code)\n"
        f"exit_saying('error: process 0 of 2 has died.\\n', {LOST})\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (LOST, "error: process 0 of 2 has died.\n")


def test_processes_leave_together(pair, ended):
    first, second = pair
    leaving = threading.Thread(target=second.leave)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    first.leave()
    leaving.join(10)
    assert not leaving.is_alive() and not any(x.is_alive() for x in (*first.listeners, *second.listeners))


def test_a_single_process_makes_everything_itself():
    job = Job()
    assert job.first and job.share(lambda: {1}) == {1}
    job.agree({"alpha": 0.1})


def test_groups_of_devices(monkeypatch):
    assert decoding_mesh(1, batched=False) is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda: 6)
    with pytest.raises(FieldError) as refused:
        decoding_mesh(4)
    assert (refused.value.field, refused.value.value) == ("tensor_parallel", 4)
