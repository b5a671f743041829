"""Verification of a draft as a whole, enumerated in float64: its law, and that it accepts no fewer tokens.

Drafts and targets are random functions of the prefix, and so is where a draft ends.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speccascade_jax.core import verification
from speccascade_jax.core.verification import Draft, residual

VOCAB, LONGEST = 3, 3
DRAFTS = VOCAB**LONGEST


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        jax.clear_caches()
        yield
    jax.clear_caches()


class Case:
    """Laws by prefix, and the prefixes at which the draft ends."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        sharpness, short = rng.choice([0.2, 1.0, 5.0]), rng.choice([0.0, 0.3])
        self.q, self.pi, self.ends = {}, {}, {}
        for size in range(LONGEST + 1):
            for prefix in itertools.product(range(VOCAB), repeat=size):
                self.q[prefix], self.pi[prefix] = rng.dirichlet(np.full(VOCAB, sharpness), 2)
                self.ends[prefix] = size == LONGEST or rng.random() < short

    def drafts(self, prefix=(), chance=1.0):
        """Every draft that may be written, with its chance."""
        if self.ends[prefix]:
            return [(prefix, chance)]
        shares = enumerate(chance * self.q[prefix])
        return [draft for v, share in shares if share > 0 for draft in self.drafts((*prefix, v), share)]

    def target(self):
        """The law of LONGEST + 1 tokens."""
        law = np.ones(())
        for size in range(LONGEST + 1):
            prefixes = itertools.product(range(VOCAB), repeat=size)
            law = law[..., None] * np.array([self.pi[p] for p in prefixes]).reshape((VOCAB,) * (size + 1))
        return law


class Joined(Case):
    """Laws as the ways to join two vocabularies make them, by prefix."""

    def __init__(self, seed, way):
        super().__init__(seed)
        rng = np.random.default_rng(seed)
        for prefix, size in ((prefix, len(prefix)) for prefix in self.q):
            only = rng.integers(VOCAB)  # a token that one of the two lacks
            cut = {"q": self.q, "pi": self.pi}.get(way)
            if cut is None:  # one proposal, or none
                self.q[prefix] = np.eye(VOCAB)[only]
                self.ends[prefix] = size == LONGEST or rng.random() < 0.3
            else:
                law = np.where(np.arange(VOCAB) == only, 0.0, cut[prefix] + 1e-3)
                cut[prefix] = law / law.sum()


def arrays(case, drafts):
    """The drafts as verify() takes them, padded to one number and one length; and pi."""
    drafts = [draft for draft, _ in drafts] + [()] * (DRAFTS - len(drafts))
    tokens = np.array([(*draft, *(0,) * (LONGEST - len(draft))) for draft in drafts])
    laws = [
        np.array([[table[draft[: min(n, len(draft))]] for n in range(LONGEST + 1)] for draft in drafts])
        for table in (case.q, case.pi)
    ]
    size = jnp.array([len(draft) for draft in drafts])
    return Draft(jnp.asarray(tokens), jnp.asarray(laws[0]), size), jnp.asarray(laws[1])


@jax.jit
def left_over(draft, pi, weights):
    """The law of the token after each number of accepted ones."""
    bonus = (jnp.arange(LONGEST + 1) == draft.size[:, None])[..., None]
    target = jnp.where(bonus, 1.0, weights[..., None]) * pi
    flat = residual(target.reshape(-1, VOCAB), jnp.where(bonus, 0.0, draft.probs).reshape(-1, VOCAB))
    return (flat / flat.sum(axis=-1, keepdims=True)).reshape(pi.shape)


def enumerated(case, chances_of=None):
    """The law of what a round writes, continued by pi to LONGEST + 1 tokens; the accepted tokens expected."""
    drafts = case.drafts()
    draft, pi = arrays(case, drafts)
    chances, weights = map(np.asarray, (chances_of or verification.block_chances)(draft, pi))
    after = np.asarray(left_over(draft, pi, jnp.asarray(weights)))
    law, accepted = np.zeros((VOCAB,) * (LONGEST + 1)), 0.0
    for number, (tokens, mass) in enumerate(drafts):
        stays = mass
        for count in range(len(tokens), -1, -1):
            chance = stays * (chances[number, count - 1] if count else 1.0)
            stays -= chance
            accepted += chance * count
            for token in range(VOCAB) if chance > 0 else ():  # nothing is left over where no draft can stand
                rest = np.array(chance * after[number, count, token])
                text = (*tokens[:count], token)
                for size in range(len(text), LONGEST + 1):
                    prefixes = itertools.product(range(VOCAB), repeat=size - len(text))
                    more = np.array([case.pi[(*text, *p)] for p in prefixes])
                    rest = rest[..., None] * more.reshape((VOCAB,) * (size - len(text) + 1))
                law[text] += rest
    return law, accepted


def accepted_by_token(case):
    """The accepted tokens expected where each is accepted by itself."""

    def stand(prefix, mass):
        if case.ends[prefix]:
            return 0.0
        kept = [mass * min(case.q[prefix][v], case.pi[prefix][v]) for v in range(VOCAB)]
        return sum(share + stand((*prefix, v), share) for v, share in enumerate(kept))

    return stand((), 1.0)


def test_the_law_is_the_targets():
    for seed in range(200):
        case = Case(seed)
        law, _ = enumerated(case)
        np.testing.assert_allclose(law, case.target(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("way", ["q", "pi", "proposals"])
def test_the_law_with_a_drafter_of_another_vocabulary(way):
    """The drafter lacks tokens (tli, slrs), the verifier lacks some (union), or drafts are one-hot (slem); of
    these exactly as many are accepted as one by one."""
    for seed in range(100):
        case = Joined(seed, way)
        law, accepted = enumerated(case)
        np.testing.assert_allclose(law, case.target(), rtol=0, atol=1e-14)
        assert accepted >= accepted_by_token(case) - 1e-12
        if way == "proposals":
            assert accepted == pytest.approx(accepted_by_token(case), abs=1e-12)


def test_no_fewer_tokens_are_accepted_than_one_by_one():
    """In 1,000 cases; and more in most."""
    gains = []
    for seed in range(1000):
        case = Case(seed)
        draft, pi = arrays(case, drafts := case.drafts())
        chances, _ = map(np.asarray, verification.block_chances(draft, pi))
        total = 0.0
        for number, (tokens, mass) in enumerate(drafts):
            none_above = 1.0
            for count in range(len(tokens), 0, -1):
                total += mass * none_above * chances[number, count - 1] * count
                none_above *= 1 - chances[number, count - 1]
        gains.append(total - accepted_by_token(case))
    assert min(gains) > -1e-12
    assert np.mean(np.array(gains) > 1e-6) > 0.6


def uncut(draft, pi):
    """w is not cut at 1."""
    ratios = [jnp.ones(len(pi))]
    for n in range(LONGEST):
        p, q = (jnp.take_along_axis(x[:, n], draft.tokens[:, n : n + 1], 1)[:, 0] for x in (pi, draft.probs))
        ratios.append(ratios[-1] * p / q)
    weights = jnp.stack(ratios, axis=1)
    left = jnp.sum(jnp.maximum(weights[..., None] * pi - draft.probs, 0), axis=-1)[:, 1:]
    at_end = draft.size[:, None] == 1 + jnp.arange(LONGEST)
    return jnp.clip(jnp.where(at_end, weights[:, 1:], left / (left + 1 - weights[:, 1:])), 0, 1), weights


def unweighted(draft, pi):
    """The residual is that of pi itself."""
    chances, weights = verification.block_chances(draft, pi)
    return chances, jnp.ones_like(weights)


def last_as_others(draft, pi):
    """h_n has the formula of the other h_j."""
    _, weights = verification.block_chances(draft, pi)
    left = jnp.sum(jnp.maximum(weights[..., None] * pi - draft.probs, 0), axis=-1)[:, 1:]
    return left / (left + 1 - weights[:, 1:] + 1e-300), weights


def first_failure(draft, pi):
    """The block ends at the first j that fails, not after the last that holds."""
    chances, weights = verification.block_chances(draft, pi)
    together = jnp.cumprod(jnp.where(draft.inside, chances, 1), axis=1)
    # As chances that are asked from the last one down: P(j stand | no more do).
    at_least = jnp.pad(together, ((0, 0), (0, 1)))
    inside = jnp.pad(draft.inside, ((0, 0), (0, 1)))
    exactly = at_least[:, :-1] - jnp.where(inside[:, 1:], at_least[:, 1:], 0)
    above = jnp.where(inside[:, 1:], at_least[:, 1:], 0)
    return exactly / (1 - above + 1e-300), weights


def last_by_ratio(draft, pi):
    """The last token stands by its own ratio."""
    chances, weights = verification.block_chances(draft, pi)
    at_end = draft.size[:, None] == 1 + jnp.arange(LONGEST)
    drafted = [jnp.take_along_axis(x[:, :-1], draft.tokens[..., None], -1)[..., 0] for x in (pi, draft.probs)]
    ratio = jnp.minimum(1, drafted[0] / drafted[1])
    return jnp.where(at_end, ratio, chances), weights


@pytest.mark.parametrize("wrong", [uncut, unweighted, last_as_others, first_failure, last_by_ratio])
def test_mistakes_are_seen(wrong):
    errors = [np.abs(enumerated(case, wrong)[0] - case.target()).max() for case in map(Case, range(20))]
    assert not max(errors) < 1e-3


def test_a_bonus_of_the_residual_is_seen(monkeypatch):
    """Control of left_over(): a bonus drawn from what is left of pi at the draft's own law."""

    def wrong(draft, pi, weights):
        flat = residual((weights[..., None] * pi).reshape(-1, VOCAB), draft.probs.reshape(-1, VOCAB))
        return (flat / flat.sum(axis=-1, keepdims=True)).reshape(pi.shape)

    monkeypatch.setitem(globals(), "left_over", wrong)
    assert max(np.abs(enumerated(case)[0] - case.target()).max() for case in map(Case, range(20))) > 1e-3


def test_one_hot_drafts_are_accepted_as_one_by_one():
    """At temperature 0, and wherever a draft's law is one-hot: the same number on average."""
    for seed in range(50):
        case = Case(seed)
        case.q = {prefix: np.eye(VOCAB)[np.argmax(law)] for prefix, law in case.q.items()}
        law, accepted = enumerated(case)
        np.testing.assert_allclose(law, case.target(), rtol=0, atol=1e-14)
        np.testing.assert_allclose(accepted, accepted_by_token(case), rtol=0, atol=1e-14)
