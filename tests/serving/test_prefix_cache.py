"""A server's prefix cache: answers do not change, and report what was found."""

import pytest
from digests import Digest, logits
from served_toys import Digits, ask, serving

from speccascade_jax.config import DecodeConfig
from speccascade_jax.inference.text import Cascade
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.serving.models import ServedModel

CHUNK = 4
SEGMENT = 4 * CHUNK  # bytes, of each model


@pytest.fixture(scope="module")
def serve():
    """Serves one model, which is compiled once, with a cache of so many bytes."""
    large = logits(0, 4)
    cascade = Cascade(
        (Digest(4), Digest(4)),
        (logits(1, 4, large), large),
        Digits(),
        max_source_length=24,
        max_new_tokens=3,
    )
    config = DecodeConfig(
        drafter="toy", verifier="toy", method="opt", block_size=2, temperature=1.0, max_new_tokens=3
    )
    model = ServedModel("toy", config, cascade, ("verifier",), 2, CHUNK)

    def served(limit):
        cascade.prefixes = PrefixCache(limit) if limit else None
        for lane in model.lanes.values():
            lane.reset()
        return serving(model)

    return served


SYSTEM = "0120120210120"
ASKED = [
    {"prompt": SYSTEM + "01", "seed": 1},
    {"prompt": SYSTEM + "2110", "seed": 2, "n": 3},
    {"prompt": SYSTEM + "0122", "seed": 3, "method": "verifier"},
    {"prompt": [SYSTEM, "2" + SYSTEM, ""], "seed": 4},
]


def total(url, name):
    text = ask(url, path="/metrics")[1]
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


def answers(url):
    responses = [ask(url, body) for body in ASKED]
    assert [status for status, *_ in responses] == [200] * len(ASKED)
    return [answer for _, answer, _ in responses]


@pytest.fixture(scope="module")
def plain(serve):
    """The answers of a server that keeps nothing."""
    with serve(0) as (url, _):
        replies = answers(url)
        assert total(url, "vllm:prefix_cache_hits_total") == 0
        assert all(answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0} for answer in replies)
        return replies


@pytest.mark.full
def test_answers_equal_those_of_a_server_without_a_cache(plain, serve):
    """The batch of the verifier alone finds what the cascade's has read."""
    with serve(10**6) as (url, engine):
        replies = answers(url)
        assert [answer["choices"] for answer in replies] == [answer["choices"] for answer in plain]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in replies]
        assert cached == [0, 12, 12, 12]
        # Of three choices the second and the third find what the first has read.
        queries = [16, 3 * 18, 18, 14 + 15]  # with the token that ends each prompt
        assert total(url, "vllm:prefix_cache_queries_total") == sum(queries)
        assert total(url, "vllm:prefix_cache_hits_total") == 0 + (12 + 16 + 16) + 12 + 12
        kept = engine.lanes[0].cascade.prefixes
        assert total(url, "speccascade:prefix_cache_bytes") == kept.bytes
        assert total(url, "speccascade:prefix_cache_evictions_total") == kept.evictions == 0


def test_a_small_cache_evicts_and_keeps_its_bound(plain, serve):
    with serve(5 * SEGMENT) as (url, engine):
        replies = answers(url)
        assert [answer["choices"] for answer in replies] == [answer["choices"] for answer in plain]
        kept = engine.lanes[0].cascade.prefixes
        assert total(url, "speccascade:prefix_cache_bytes") == kept.bytes <= 5 * SEGMENT
        assert total(url, "speccascade:prefix_cache_evictions_total") == kept.evictions > 0
        assert total(url, "speccascade:prefix_cache_evictions_total") == kept.evictions  # not counted twice
