"""Random bodies: each is answered, and invalid ones with a 4xx and a sentence."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from served_toys import ask, gauges, serving

from speccascade_jax.serving.protocol import FIELDS

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 200),
    st.integers(1, 2000).flatmap(lambda digits: st.sampled_from([10**digits, -(10**digits)])),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["1", "201", "", "opt", "speculative", "verifier", "toy", "\x00", "\ud800", "🦜"]),
    st.recursive(
        st.one_of(st.none(), st.integers(-1, 5), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
        max_leaves=8,
    ),
)
NAMES = st.one_of(st.sampled_from(sorted(FIELDS["completion"] | FIELDS["chat"])), st.text(max_size=12))
NEARLY = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["1", "201", "", ["1", "2"]])},
    optional={
        "n": st.integers(0, 4),
        "temperature": st.floats(-0.5, 2),
        "max_tokens": st.integers(0, 4),
        "method": st.sampled_from(["opt", "speculative", "verifier", "chow"]),
        "alpha": st.floats(-1, 2),
        "block_size": st.integers(0, 3),
        "top_k": st.integers(-2, 5),
        "top_p": st.floats(0, 1.1),
        "logprobs": st.integers(0, 6),
        "stop": st.one_of(st.text("0123", max_size=3), st.lists(st.text())),
        "stream": st.just(False),
        "origin": st.booleans(),
        "seed": st.integers(-(2**64), 2**64),
    },
)
SIZES = st.dictionaries(
    st.sampled_from(["max_tokens", "n", "block_size", "top_k", "logprobs", "seed", "alpha", "temperature"]),
    st.sampled_from(
        ["1", "0", "-0", "1e2", "1E400", "-1e-400", *("9" * n for n in (10, 20, 400, 5000, 100_000))]
    ),
    min_size=1,
    max_size=2,
)
"""Numbers as they are written, which Python's json would not write."""
BODIES = st.one_of(
    NEARLY,
    st.dictionaries(NAMES, VALUES, max_size=5),
    st.dictionaries(NAMES, VALUES, min_size=1, max_size=3).map(lambda fields: {"prompt": "201", **fields}),
    VALUES,
)


# Draws differ from version to version; these are always among them, so that refusing everything would fail.
RIGHT = [
    {"prompt": "1"},
    {"prompt": ["1", "201"], "n": 2, "temperature": 0.5},
    {"prompt": "201", "method": "opt"},
]


@pytest.mark.full
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_body_is_answered(path, toy):
    right = []
    with serving(toy, max_queue=500) as (url, _):

        @settings(
            max_examples=1000,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(BODIES, st.booleans())
        @example(RIGHT[0], False)
        @example(RIGHT[1], False)
        @example(RIGHT[2], False)
        def check(body, cut):
            data = json.dumps(body).encode()
            status, answer, _ = ask(url, data[:-1] if cut else data, path)
            if status == 200:
                right.append(body)
                return
            assert 400 <= status < 500, (status, answer, body)
            said = answer["error"]["message"]
            assert 10 < len(said) < 500 and "\n" not in said and "Traceback" not in said

        check()
        assert gauges(url) == [0, 0]
    assert path.endswith("/chat/completions") or all(body in right for body in RIGHT)


@pytest.mark.full
def test_every_size_is_answered(toy):
    with serving(toy, max_queue=500) as (url, _):

        @settings(
            max_examples=300,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(SIZES)
        def check(sizes):
            fields = "".join(f', "{name}": {digits}' for name, digits in sizes.items())
            status, answer, _ = ask(url, b'{"prompt": "1"' + fields.encode() + b"}")
            assert status == 200 or 400 <= status < 500, (status, sizes)
            assert status == 200 or 10 < len(answer["error"]["message"]) < 500, answer

        check()
        assert gauges(url) == [0, 0]


@pytest.mark.full
def test_the_description_describes(toy):
    """Schemathesis draws requests from /openapi.json and holds the answers to it."""
    schemathesis = pytest.importorskip("schemathesis")
    with serving(toy, max_queue=500) as (url, _):
        schema = schemathesis.openapi.from_dict(ask(url, path="/openapi.json")[1])
        schema.config.update(base_url=url)
        codes = set()
        for operation in schema.get_all_operations():

            @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.ok().as_strategy())
            def check(case):
                answer = case.call(base_url=url)
                codes.add(answer.status_code)
                assert answer.status_code < 500
                case.validate_response(answer, checks=(schemathesis.checks.status_code_conformance,))

            check()
        assert {200, 400} <= codes
