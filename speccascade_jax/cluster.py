"""Joins several processes into one job: they find each other, the first one shares its inputs, and none
outlives another.

    with joined(arguments.cluster) as job:
        texts = job.share(lambda: read(arguments.input))  # read by the first process, shared with all
        ...

Devices exchange arrays by JAX's collectives, in which a process waits for all others. Messages and notices
that a process has ended use a TCP connection from each process to the first one.
"""

import contextlib
import json
import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax

from speccascade_jax.core.errors import FieldError
from speccascade_jax.parallel import gather_text

T = TypeVar("T")
PATIENCE = 50.0
"""How many seconds the processes of a run wait for one that has not come. Starting takes a few seconds more,
so if one is killed before it comes, all end within a minute."""
LOST = os.EX_TEMPFAIL
"""The exit code if another process has ended for any reason but bad input."""
SAME = "start all at the same time, with the same cluster except for their numbers."
WORD = 10.0
"""How many seconds a process waits, at its end or after a failed collective, for notice that others have
ended."""
FAILED = threading.Event()
"""Set if this process, a member of a job, ends because of an error."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Socket options, if the system has them, that detect a lost machine within half a minute."""


def connect(cluster: str) -> None:
    """Connects to the other processes of a run: `auto` if the launcher knows them (TPU pods, Slurm, Open
    MPI), otherwise HOST:PORT,PROCESSES,NUMBER. Must be called before anything else uses a device.

    Raises FieldError for anything else, and ValueError if the processes do not find each other.
    """
    if cluster == "auto":
        _initialize_by_launcher()
        return
    place = _parse(cluster)
    for peer in _meet(place).values():
        peer.close()
    _initialize(place)


class Place(NamedTuple):
    """What one process is told about a run: the first process's address, how many there are, and which this
    is."""

    host: str
    port: int
    processes: int
    number: int


def _initialize_by_launcher() -> None:
    """Connects to the processes that the launcher knows."""
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise FieldError(
            "cluster",
            "auto",
            "start it with one, or write HOST:PORT,PROCESSES,NUMBER.",
            "cluster is auto, but no launcher (a TPU pod, Slurm, Open MPI) says who the other processes "
            f"are ({str(error).rstrip('.')})",
        ) from None


def _initialize(place: Place) -> None:
    host = f"[{place.host}]" if ":" in place.host else place.host
    jax.distributed.initialize(f"{host}:{place.port}", place.processes, place.number)


def _parse(cluster: str) -> Place:
    wrong = FieldError(
        "cluster",
        cluster,
        "write auto, or HOST:PORT,PROCESSES,NUMBER: the first process's address, how many there are, and "
        "which this is, from 0.",
    )
    try:
        address, *counts = cluster.split(",")
        host, _, port = address.rpartition(":")
        processes, number = map(int, counts)
        place = Place(host.strip("[]"), int(port), processes, number)
    except ValueError:
        raise wrong from None
    if not (place.host and 0 < place.port < 2**16 and 0 <= number < processes):
        raise wrong
    try:
        socket.getaddrinfo(place.host, place.port)
    except (OSError, UnicodeError) as error:
        raise FieldError(
            "cluster",
            cluster,
            "choose another one.",
            f"cluster is {cluster!r}, but no host {place.host!r} is known here ({error})",
        ) from None
    return place


# JAX kills the process with a stack trace if another process does not connect or the port is taken. So the
# processes first meet at that port.


def _meet(place: Place) -> dict[int, socket.socket]:
    """The connections of this process, by the number of the other: the first process is connected to all
    others, and these only to the first. Raises ValueError in all processes if one of them does not come, or
    ends before all have come."""
    return {0: _join(place)} if place.number else _gather(place.port, place.processes)


def _gather(port: int, processes: int) -> dict[int, socket.socket]:
    """The connections to all other processes, which are notified once the last one has come."""
    came = dict[int, socket.socket]()
    try:
        server = _server(port)
    except OSError as error:
        raise FieldError(
            "cluster",
            port,
            "choose another in cluster.",
            f"the port {port} cannot be used here ({error.strerror})",
        ) from None
    try:
        with server:
            _await(server, processes, came)
    except ValueError as error:
        for peer in came.values():
            _say(peer, str(error))
        raise
    for peer in came.values():
        _say(peer, "go")
    return came


def _await(server: socket.socket, processes: int, came: dict[int, socket.socket]) -> None:
    """Adds the connections of all other processes. Raises ValueError if one of them does not come in time, or
    ends before all have come."""
    deadline = time.monotonic() + PATIENCE
    while missing := [str(number) for number in range(1, processes) if number not in came]:
        heard, _, _ = select.select([server, *came.values()], [], [], max(deadline - time.monotonic(), 0))
        if not heard:
            names = f"process{'es' * (len(missing) > 1)} {' and '.join(missing)} of {processes}"
            port = server.getsockname()[1]
            raise ValueError(f"{names} did not come to port {port} within {PATIENCE:.0f} seconds: {SAME}")
        for number, peer in came.items():
            if peer in heard:  # its end: a process sends nothing more before all have come
                raise ValueError(
                    f"process {number} of {processes} has died before all had come: start all again."
                )
        if server in heard:
            _admit(server.accept()[0], processes, came)


def _admit(caller: socket.socket, processes: int, came: dict[int, socket.socket]) -> None:
    """Adds a caller to the processes that have come, if it is one that was missing."""
    caller.settimeout(5)
    with contextlib.suppress(ValueError, OSError):
        expected, number = map(int, _first_line(caller).split())
        if expected == processes and 0 < number < processes and number not in came:
            came[number] = _kept(caller)
            return
        _say(caller, f"process 0 does not accept process {number} of {expected}: {SAME}")
    caller.close()


def _join(place: Place) -> socket.socket:
    """The connection to the first process, once this has met all others."""
    deadline = time.monotonic() + PATIENCE
    name = f"process 0 of {place.processes}, at {place.host}:{place.port},"
    while True:
        try:
            first = socket.create_connection((place.host, place.port), timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise ValueError(f"{name} did not answer within {PATIENCE:.0f} seconds: {SAME}") from None
            time.sleep(0.1)
    answer = ""
    with contextlib.suppress(OSError):
        _kept(first).sendall(f"{place.processes} {place.number}\n".encode())
        answer = _first_line(first).rstrip()
    if answer != "go":
        first.close()
        raise ValueError(answer or f"{name} has died: start all again.")
    return first


def _say(peer: socket.socket, sentence: str) -> None:
    with contextlib.suppress(OSError):  # who has died hears nothing
        peer.sendall(f"{sentence}\n".encode())


def _host(peer: socket.socket) -> str:
    try:
        return peer.getpeername()[0].removeprefix("::ffff:")
    except OSError:  # a connection that was reset has no peer any more
        return "an unknown address"


class Job:
    """The processes of a run, seen from one of them. This class is for a single process."""

    number, processes = 0, 1

    @property
    def first(self) -> bool:
        """Whether this process reads inputs, writes outputs and answers requests."""
        return self.number == 0

    def share(self, make: Callable[[], T]) -> T:
        """Runs `make` in the first process and returns its JSON value in all processes, which also all raise
        its ValueError or OSError."""
        return make()

    def tell(self, message: Any) -> None:
        """Sends a JSON value from the first process to the others."""

    def hear(self) -> Any:
        """Receives the first process's next message."""
        raise RuntimeError("a single process has no others to receive from")

    def agree(self, settings: dict[str, Any]) -> None:
        """Raises ValueError if the settings of another process differ."""
        first, here = (json.loads(json.dumps(x)) for x in (self.share(lambda: settings), settings))
        names = sorted(name for name in {*first, *here} if first.get(name, ...) != here.get(name, ...))
        if names:
            name = names[0]
            raise ValueError(
                f"process {self.number} has another {name} than process 0 ({here.get(name)!r}, not "
                f"{first.get(name)!r}): start all with the same flags, but for the numbers in cluster, and "
                f"set {name} if its default depends on the machine."
            )


class Member(Job):
    """One of several processes. The first is connected to all others, and these only to the first. A thread
    listens at each connection, which breaks when the other process dies for any reason."""

    def __init__(self, number: int, processes: int, peers: dict[int, socket.socket]):
        self.number, self.processes, self.peers = number, processes, peers
        self.messages: queue.Queue[Any] = queue.Queue()
        self.failed = False  # this process ends because of an error, which the others know
        self.through = threading.Semaphore(0)  # counts the others that have finished their work
        self.listeners = [
            threading.Thread(target=self._listen, args=pair, daemon=True) for pair in peers.items()
        ]
        for listener in self.listeners:
            listener.start()

    def share(self, make: Callable[[], T]) -> T:
        if not self.first:
            message = self.hear()
            if "error" in message:
                raise ValueError(f"process 0: {message['error']}")
            return message["value"]
        try:
            value = make()
        except (ValueError, OSError) as error:
            self.failed = True
            self._send("refusal", {"error": str(error)})
            raise
        self.tell({"value": value})
        return value

    def tell(self, message: Any) -> None:
        self._send("message", message)

    def hear(self) -> Any:
        return self.messages.get()

    def leave(self) -> None:
        """Waits until all processes have finished their work. The first process, which they are connected to,
        exits last."""
        if not self.first:
            self._send("through")
        for _ in self.peers:
            self.through.acquire()
        if self.first:
            self._send("through")
        else:
            jax.distributed.shutdown()
            self.peers[0].shutdown(socket.SHUT_RDWR)
        self._await_ends()

    def _await_ends(self) -> None:
        """Waits until the others have closed their connections, for WORD seconds in all."""
        deadline = time.monotonic() + WORD
        for listener in self.listeners:
            listener.join(max(deadline - time.monotonic(), 0))

    def fail(self, error: BaseException) -> None:
        """Notifies the others that this process is exiting, unless they know. If the cause is another
        process's exit, this process reports it and exits here. After a refusal the first process exits last:
        the others may still be connecting to JAX's service, which it runs."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(WORD)
        known, self.failed = self.failed, True
        FAILED.set()
        if not known:
            reason = str(error) or type(error).__name__
            end = f"process {self.number} of {self.processes} has failed ({reason.rstrip('.')})"
            self._send("lost", [end, isinstance(error, ValueError)])
        elif self.first:
            self._await_ends()

    def _send(self, kind: str, content: Any = None) -> None:
        line = json.dumps([kind, content]).encode() + b"\n"
        for peer in self.peers.values():
            with contextlib.suppress(OSError):  # its listener handles that
                peer.sendall(line)

    def _listen(self, number: int, peer: socket.socket) -> None:
        """Receives messages from a process until it exits."""
        through, refused = False, False  # bad input is refused: the same command would fail again
        end = f"process {number} of {self.processes}, at {_host(peer)}, has died"
        with contextlib.suppress(OSError, ValueError), peer.makefile() as lines:
            for line in lines:
                kind, content = json.loads(line)
                if kind in ("message", "refusal"):
                    self.failed |= kind == "refusal"  # what follows is no death
                    self.messages.put(content)
                elif kind == "through":
                    through = True
                    self.through.release()
                else:
                    end, refused = content
                    break
        if not (through or self.failed):
            self._send("lost", [end, refused])
            resumes = "" if refused else "; the same command resumes"
            exit_saying(f"error: {end}, and the job ends{resumes}.\n", 2 if refused else LOST)


def exit_saying(sentence: str, code: int) -> None:
    """Exits with the code. The sentence is the last line on stderr: what XLA's threads report about the lost
    process at the same time comes before it or not at all."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(stderr, sentence.encode())
    os._exit(code)


def _launched() -> Member:
    """This process in a run whose launcher knows the others."""
    _initialize_by_launcher()
    number, processes = jax.process_index(), jax.process_count()
    return Member(number, processes, _connected(number) if number else _accepted(processes))


def _accepted(processes: int) -> dict[int, socket.socket]:
    """number -> connection to that process, in the first process."""
    server, token, peers = _server(0), secrets.token_hex(16), dict[int, socket.socket]()
    gather_text(f"{_address()} {server.getsockname()[1]} {token}")
    server.settimeout(PATIENCE)
    with server:
        while len(peers) < processes - 1:
            caller, _ = server.accept()
            caller.settimeout(PATIENCE)
            with contextlib.suppress(ValueError, OSError):
                word, number = _first_line(caller).split()
                if secrets.compare_digest(word, token):
                    peers[int(number)] = _kept(caller)
                    continue
            caller.close()
    return peers


def _connected(number: int) -> dict[int, socket.socket]:
    """The connection to the first process, in another process."""
    host, port, token = gather_text("")[0].split()
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(f"{token} {number}\n".encode())
    return {0: _kept(connection)}


def _server(port: int) -> socket.socket:
    """A socket that listens at a port on all of this machine's addresses. Raises OSError."""
    both = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
    )


def _address() -> str:
    """The address at which others reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        try:
            outward.connect(("192.0.2.1", 9))  # sends nothing; only selects the interface
            return outward.getsockname()[0]
        except OSError:
            return socket.gethostname()


def _first_line(connection: socket.socket) -> str:
    """The text before the first line break."""
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line.decode(errors="replace")


def _kept(connection: socket.socket) -> socket.socket:
    """Configures a connection to last as long as both processes."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


@contextlib.contextmanager
def joined(cluster: str | None) -> Iterator[Job]:
    """The job of all processes of a cluster (see connect()) or, without a cluster, of this process.

    If another process ends inside the context, this one ends with a sentence that names the other, and with
    the exit code LOST, or 2 if the other refused its input. Raises the same errors as connect().
    """
    if cluster is None:
        yield Job()
        return
    jax.config.update("jax_enable_recoverability", True)  # otherwise JAX would end this process with a trace
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM and continue
    place = None if cluster == "auto" else _parse(cluster)
    member = Member(place.number, place.processes, _meet(place)) if place else _launched()
    try:
        if place:
            _initialize(place)
        yield member
        member.leave()
    except BaseException as error:
        member.fail(error)
        raise


def ends(code: int) -> int:
    """Returns the exit code. A process that has failed as a member of a job exits here, because Python's exit
    would wait for the others."""
    if FAILED.is_set():
        sys.stdout.flush()
        os._exit(code)
    return code
