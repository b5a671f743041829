"""The prefix cache: whatever is kept, partly found or evicted, each row writes the same as alone."""

import dataclasses
import itertools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from digests import Digest, logits
from kept_prompts import (
    CHUNK,
    HOW,
    Case,
    bucket,
    decoded,
    hierarchy,
    pair,
    programs_of,
    requests_like,
    served,
)
from schedules import alone, calls
from shapes import TINY_GEMMA
from toy_vocabularies import OWN, TARGET, Words
from toys import TableLM, table

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.models import model_of
from speccascade_jax.scheduling import chunks, prefixes, prompts
from speccascade_jax.scheduling import programs as programs_module
from speccascade_jax.scheduling.prefixes import Owner, PrefixCache, blocks_of, shared_lengths
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.vocabularies.joining import translated
from speccascade_jax.vocabularies.translated import Resized

# The store


def test_a_prompt_shares_the_longest_beginning_that_another_has():
    draw = np.random.default_rng(0)
    for _ in range(200):
        texts = [draw.integers(0, 2, draw.integers(0, 9)).tolist() for _ in range(draw.integers(1, 7))]
        others = [draw.integers(0, 2, draw.integers(0, 9)).tolist() for _ in range(draw.integers(0, 3))]

        def common(a, b):
            return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905

        expected = [
            max((common(text, other) for k, other in enumerate([*texts, *others]) if k != n), default=0)
            for n, text in enumerate(texts)
        ]
        assert shared_lengths(texts, others) == expected


def test_the_last_token_of_a_prompt_is_in_no_block():
    for size in range(1, 10):
        for length in range(30):
            whole = blocks_of(list(range(length)), size)
            assert len(whole) == max(length - 1, 0) // size
            assert [token for block in whole for token in block] == list(range(len(whole) * size))


def test_the_cache_never_exceeds_its_bytes():
    """10,000 prompts by three owners, read from the beginning or from what was found."""
    draw, kept = np.random.default_rng(0), PrefixCache(3000)
    shape, segment = jax.ShapeDtypeStruct((), jnp.int32), {}
    owners = [Owner(f"model {n}", (), shape) for n in range(3)]
    arrays = {size: jnp.zeros(size, jnp.int8) for size in (1, 30, 100)}
    for _ in range(10_000):
        owner = owners[draw.integers(3)]
        blocks = [(int(token),) for token in draw.integers(0, 5, draw.integers(1, 9))]
        hits = kept.find(owner, blocks)
        assert hits == [segment[owner, *blocks[: n + 1]] for n in range(len(hits))]
        for n in range(len(hits), len(blocks)):
            array = arrays[[1, 30, 100][len(segment) % 3]]
            segment[owner, *blocks[: n + 1]] = [array]  # an object of its own
            kept.add(owner, blocks[: n + 1], segment[owner, *blocks[: n + 1]])
            assert kept.bytes <= kept.limit
    assert kept.bytes == sum(node.bytes for node in kept.order) > kept.limit // 2
    assert kept.evictions > 1000
    places = {node: n for n, node in enumerate(kept.order)}
    assert all(places[node] < places.get(node.parent, len(places)) for node in kept.order)
    first, deep = owners[0], [(9,), (9,), (9,)]
    for n in range(3):
        kept.add(first, deep[: n + 1], [arrays[100]])
    for n in range(200):  # what is found stays; what was not used for longest makes room
        assert len(kept.find(first, deep)) == 3
        kept.add(owners[1], [(100 + n,)], [arrays[100]])
    kept.clear()
    assert kept.bytes == 0 and kept.find(first, deep) == [] and not kept.order and not kept.roots


def test_a_chain_longer_than_the_cache_keeps_its_beginning():
    kept, owner = PrefixCache(250), Owner("model", (), jax.ShapeDtypeStruct((), jnp.int32))
    blocks = [(n,) for n in range(5)]
    for n in range(5):
        kept.add(owner, blocks[: n + 1], jnp.zeros(100, jnp.int8))
    assert len(kept.find(owner, blocks)) == 2 and kept.bytes == 200 and kept.evictions == 0
    kept.add(owner, [(7,)], jnp.zeros(300, jnp.int8))  # would take more than everything
    assert len(kept.find(owner, blocks)) == 2 and kept.bytes == 200


# Schedulers


def test_memory_for_the_cache_is_reserved(monkeypatch):
    """But for what the cache holds already, and not where the models keep nothing."""
    monkeypatch.setattr(programs_module, "free_memory", lambda: 500_000)  # far more than the rows need
    kept, toy = PrefixCache(10**6), Speculative(Autoregressive(TableLM(97)), TableLM(97), METHODS["opt"], 3)
    tables = table(39, 97)

    def check(sampler, params, prefixes):
        programs_of(sampler, params, prefixes=prefixes)._check_memory(2, ())

    check(*pair(), None)
    check(toy, (tables, tables), kept)
    with pytest.raises(FieldError) as refused:
        check(*pair(), kept)
    assert (refused.value.field, refused.value.value) == ("max_new_tokens", 8)
    kept.add(Owner("model", (), jax.ShapeDtypeStruct((), jnp.int32)), [(1,)], jnp.zeros(600_000, jnp.int8))
    check(*pair(), kept)


@pytest.fixture(scope="module")
def toys():
    return Case(*pair(), requests_like(16))


def check_that_rows_write_the_same(case, monkeypatch):
    """A cache with room for nothing, for some of it and for everything, and what that keeps for another
    scheduler."""
    named, reads, segment = calls(case.programs, monkeypatch), [], 4 * CHUNK  # bytes
    for kept in (None, PrefixCache(segment - 1), PrefixCache(15 * segment), PrefixCache(10**6)):
        named.clear()
        results, cached = served(case.programs, kept, case.asked)
        assert results == case.whole
        assert all(n <= len(request.tokens) - 1 for n, request in zip(cached, case.asked, strict=True))
        reads.append(named.count("read"))
    assert reads[0] == reads[1] > reads[2] > reads[3] and kept.evictions == 0
    results, cached = served(case.programs, kept, case.asked[::-1])
    assert results == case.whole[::-1]
    assert cached[::-1] == [(len(request.tokens) - 1) // CHUNK * CHUNK for request in case.asked]


def test_a_rows_text_does_not_depend_on_the_cache(toys, monkeypatch):
    check_that_rows_write_the_same(toys, monkeypatch)


@pytest.mark.full
def test_texts_of_a_hierarchy_do_not_depend_on_the_cache(monkeypatch):
    check_that_rows_write_the_same(Case(*hierarchy(), requests_like(16, 2)), monkeypatch)


def foreign_requests(models, count=14):
    """Texts of letters, as two vocabularies read them, that begin like others."""
    draw, target, drafter = np.random.default_rng(3), Words(TARGET), Words(OWN)
    heads = ["".join(draw.choice(["a", "b"], 24)) for _ in range(2)]
    texts = [
        heads[draw.integers(2)][: draw.integers(0, 25)]
        + "".join(draw.choice(["a", "b"], draw.integers(1, 18)))
        for _ in range(count)
    ]
    rows = [(target.cut(text), drafter.cut(text)) for text in texts]
    return [Request(row, HOW, n, foreign={models[0]: ids}) for n, (row, ids) in enumerate(rows)]


def foreign_pair():
    """A drafter of the pieces OWN and a verifier of TARGET."""
    size, target = len(TARGET), Words(TARGET)
    drafter, params = translated(Digest(len(OWN)), logits(5, len(OWN)), Words(OWN), target, size, None)
    verifier = Digest(size)
    return Speculative(Autoregressive(drafter), verifier, METHODS["token_v3"], 2), (params, logits(6, size))


@pytest.fixture(scope="module")
def foreign():
    sampler, params = foreign_pair()
    asked = foreign_requests(sampler.models)
    return Case(sampler, params, asked, eos_id=TARGET.index("end"), vocab_size=len(TARGET))


@pytest.mark.full
def test_each_vocabulary_has_its_own_beginnings(foreign):
    """What two texts have in common ends within a token of one of the vocabularies or of both."""
    kept = PrefixCache(10**6)
    for _ in range(2):
        results, cached = served(foreign.programs, kept, foreign.asked)
        assert results == foreign.whole
    assert cached == [(len(request.tokens) - 1) // CHUNK * CHUNK for request in foreign.asked]


def by_block(self, owner, blocks):
    """PrefixCache.find, wherever in a prompt a block stands."""
    known = {node.block: node.segment for node in self.order if node.owner == owner}
    return [known[block] for block in itertools.takewhile(lambda block: block in known, blocks)]


PLANTED = {
    "the last token is in a block": (
        prompts,
        "blocks_of",
        lambda tokens, size: [tuple(tokens[n : n + size]) for n in range(0, len(tokens) - size + 1, size)],
    ),
    "a token less is compared": (
        prompts,
        "blocks_of",
        lambda tokens, size: [(*block[:-1], 0) for block in blocks_of(tokens, size)],
    ),
    "a segment is known by its own tokens": (prefixes.PrefixCache, "find", by_block),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_bugs_change_the_texts(planted, toys, monkeypatch):
    monkeypatch.setattr(*PLANTED[planted])
    kept = PrefixCache(10**6)
    served(toys.programs, kept, toys.asked)
    assert served(toys.programs, kept, toys.asked)[0] != toys.whole


@pytest.mark.full
def test_using_another_vocabularys_tokens_would_change_the_texts(foreign, monkeypatch):
    monkeypatch.setattr(chunks.Reader, "tokens", lambda self, request: request.tokens)
    assert served(foreign.programs, PrefixCache(10**6), foreign.asked)[0] != foreign.whole


@pytest.mark.full(quick=["False"])
@pytest.mark.parametrize("planted", [False, True])
def test_other_parameters_find_nothing(planted, toys, monkeypatch):
    """Two pairs of one shape share a cache; with the planted bug it does not tell them apart."""
    if planted:
        monkeypatch.setattr(Owner, "__eq__", lambda self, other: self.identity[0] == other.identity[0])
        monkeypatch.setattr(Owner, "__hash__", lambda self: hash(self.identity[0]))
    kept, sampler = PrefixCache(10**6), toys.sampler
    other = programs_of(sampler, pair(50)[1], chunk=CHUNK)
    served(other, kept, toys.asked)
    assert (served(toys.programs, kept, toys.asked)[0] == toys.whole) is not planted


# Files


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", CHUNK)
    monkeypatch.setattr(prompts, "WORTH", 1)


@pytest.mark.full(quick=["4"])
@pytest.mark.parametrize("rows", [1, 4])
def test_shared_prefixes_of_a_file_are_read_once(rows, small_chunks, monkeypatch):
    sampler, params = pair()
    head = np.random.default_rng(4).integers(3, 90, 22).tolist()
    asked = [Request([*head, 3 + n, *range(20, 30 + n)], HOW, n) for n in range(8)]
    whole = alone(programs_of(sampler, params), asked, bucket)
    programs, kept = programs_of(sampler, params), PrefixCache(10**6)
    named = calls(programs, monkeypatch)
    assert decoded(programs, kept, asked, rows) == whole
    assert named.count("cut") == 22 // CHUNK  # each block once, of both models at a time
    assert kept.bytes == 2 * (22 // CHUNK) * 4 * CHUNK
    named.clear()
    assert decoded(programs, kept, asked, rows) == whole and named.count("cut") == 0


def test_a_file_of_unlike_prompts_is_read_as_a_whole(small_chunks, monkeypatch):
    sampler, params = pair()
    draw = np.random.default_rng(5)
    asked = [Request([3 + n, *draw.integers(3, 90, 20).tolist()], HOW, n) for n in range(6)]
    programs, kept = programs_of(sampler, params), PrefixCache(10**6)
    named = calls(programs, monkeypatch)
    decoded(programs, kept, asked, 3)
    assert "read" not in named and kept.bytes == 0


def test_a_named_beginning_is_read_before_the_first_prompt(toys, small_chunks, monkeypatch):
    """Also with one row, where no second prompt is known yet; mixed beginnings are put where they belong."""
    asked, whole = toys.asked, toys.whole
    programs, kept = programs_of(toys.sampler, toys.params), PrefixCache(10**6)
    named, first = calls(programs, monkeypatch), asked[0]
    shown = Request([*first.tokens[:-1], 91], HOW)
    assert decoded(programs, kept, [first], 1, [shown]) == whole[:1]
    assert named.count("cut") == (len(first.tokens) - 1) // CHUNK
    assert decoded(programs, kept, asked, 4, [shown]) == whole


def test_beginnings_that_do_not_fit_are_read_with_each_prompt(small_chunks, monkeypatch):
    sampler, params = pair()
    head = np.random.default_rng(4).integers(3, 90, 22).tolist()
    asked = [Request([*head, 3 + n, 40], HOW, n) for n in range(8)]
    whole = alone(programs_of(sampler, params), asked, bucket)
    programs, kept = programs_of(sampler, params), PrefixCache(5 * 4 * CHUNK)
    named = calls(programs, monkeypatch)
    assert decoded(programs, kept, asked, 1) == whole
    assert 0 < kept.bytes <= kept.limit and named.count("cut") == 22 // CHUNK


# Several devices


SCRIPT = """
import sys
sys.path[:0] = ["tests/support"]
from kept_prompts import CHUNK, alone, bucket, decoded, pair, programs_of, requests_like, served
from speccascade_jax.parallel import local_mesh
from speccascade_jax.scheduling import prompts
from speccascade_jax.scheduling.prefixes import PrefixCache

sampler, params = pair()
asked = requests_like(12)
whole = alone(programs_of(sampler, params), asked, bucket)
prompts.CHUNK, prompts.WORTH = CHUNK, 1
for chunk in (CHUNK, 0):
    kept = PrefixCache(10**6)
    programs = programs_of(sampler, params, mesh=local_mesh(), chunk=chunk)
    for _ in range(2):
        found = served(programs, kept, asked, 2)[0] if chunk else decoded(programs, kept, asked, 2)
        assert found == whole
    assert kept.bytes
print(programs.devices)
"""


@pytest.mark.full
def test_segments_of_one_device_are_used_on_another():
    assert processes.run(SCRIPT, XLA_FLAGS=processes.devices(2), PYTHONPATH=os.pathsep.join(sys.path)) == "2"


# Real models


def gemma():
    """A drafter with fewer logits than the verifier; windows are shorter than the prompts."""
    model = model_of(dataclasses.replace(TINY_GEMMA, num_layers=2))
    large = model.init(0)
    small = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, large, model.init(1))
    return Speculative(Autoregressive(Resized(model, 97, 90)), model, METHODS["token_v3"], 3), (small, large)


@pytest.mark.full
def test_real_models_continue_from_the_cache():
    case, kept = Case(*gemma(), requests_like(8)), PrefixCache(40_000)
    assert served(case.programs, kept, case.asked)[0] == case.whole
    results, cached = served(case.programs, kept, case.asked[::-1])
    assert results == case.whole[::-1] and sum(cached) > 40 and kept.evictions > 0
