"""Random servers: several on one port, and clients whose keys are any bytes."""

import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from served_toys import ask, serving
from variations import KEYS

from speccascade_jax.commands import serve

HOSTS = ("127.0.0.1", "localhost", "0.0.0.0", "127.0.0.2", "::1", "::", "")
BODY = b'{"prompt": "1"}'
FULL = 100  # draws of the full suite


def taken(host, port):
    """A socket of a server's, or None where one is refused in a sentence."""
    try:
        return serve.bound(host, port)
    except ValueError as error:
        assert len(str(error)) < 600 and "\n" not in str(error)
        return None


def overlap(first, second):
    """Whether two listening sockets would take the same connections: `::` takes those of IPv4, too."""
    addresses = {first.getsockname()[0], second.getsockname()[0]}
    families = {first.family, second.family}
    wildcards = {"0.0.0.0", "::"} & addresses
    return len(addresses) == 1 or "::" in addresses or bool(wildcards and len(families) == 1)


def started_at_once(host, port, count=8):
    """The sockets of so many servers, None for each that is refused."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: taken(host, port), range(count), timeout=10))


def test_a_port_has_one_server(full):
    """Whichever two hosts servers are started with, the second is refused where both would take the same
    connections. Of eight that start at once, one serves."""
    for number in range(FULL if full else FULL // 10):
        rng = random.Random(number)
        host, other = rng.choice(HOSTS), rng.choice(HOSTS)
        first = taken(host, 0)
        if first is None:  # a machine without IPv6
            continue
        with first:
            second = taken(other, first.getsockname()[1])
            if second is not None:
                with second:
                    assert not overlap(first, second), (host, other)
            port = first.getsockname()[1]
        winners = [listening for listening in started_at_once(host, port) if listening is not None]
        for listening in winners:
            listening.close()
        assert len(winners) == 1, (host, port)


def test_invalid_ports_and_hosts_are_refused(full):
    for number in range(FULL if full else FULL // 10):
        rng = random.Random(number)
        host = rng.choice(
            ("127.0.0.1", "\ud800", "a" * 300, "a\0b", "256.0.0.1", "[::1]", ".", " ", "\u2028", "-")
        )
        port = rng.choice((-1, 65536, 10**9, 2**63, 10**400, -(10**30)))
        if rng.random() < 0.5 and host != "127.0.0.1":
            port = 0
        listening = taken(host, port)
        if listening is not None:
            listening.close()
        assert port == 0 or listening is None


def authorized(url, header):
    """The status of a request with this Authorization header, None where the connection just ends."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nAuthorization: " + header + b"\r\nContent-Length: 15\r\n\r\n" + BODY
        )
        answer = connection.recv(64)
        return int(answer.split()[1]) if answer else None


@pytest.mark.full
def test_any_bytes_as_a_key(toy, tmp_path):
    """A key of the file's is taken as UTF-8; anything else is refused, and nothing ends in a 500."""
    (tmp_path / "keys").write_text("\n".join(KEYS), "utf-8")
    keys = tuple(serve.keys_in(str(tmp_path / "keys")))
    known = [key.encode() for key in keys]
    statuses = set()
    with serving(toy, keys=keys, max_queue=500) as (url, _):
        for number in range(3 * FULL):
            rng = random.Random(number)
            offered = rng.choice((rng.choice(known), rng.randbytes(rng.choice((0, 1, 8, 300)))))
            offered = offered.translate(None, b"\r\n\0")
            scheme = rng.choice((b"Bearer ", b"bearer  ", b"BEARER ", b"Basic ", b"", b"Bearer", b"\xff "))
            status = authorized(url, scheme + offered)
            statuses.add(status)
            right = scheme.strip().lower() == b"bearer" and scheme[-1:] == b" " and offered in known
            assert status in ((200,) if right else (400, 401)), (scheme, offered, status)
        assert ask(url, {"prompt": "1"}, Authorization=b"Bearer " + known[0])[0] == 200
    assert {200, 401} <= statuses
