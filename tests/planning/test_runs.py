"""Expected calls on texts, compared with enumerated rounds, for each verification.

Drafts and targets are random functions of the last two tokens; token 0 ends a text.
"""

import itertools
from functools import cache

import numpy as np
import pytest

from speccascade_jax.core.errors import FieldError
from speccascade_jax.core.verification import BLOCK, TOKEN, VERIFICATIONS
from speccascade_jax.planning.prediction import Candidates, predict
from speccascade_jax.planning.runs import Runs, windows

VOCAB, LENGTH, END = 3, 4, 0


class Pair:
    def __init__(self, seed, sharpness=0.7):
        rng = np.random.default_rng(seed)
        contexts = [c for size in range(3) for c in itertools.product(range(VOCAB), repeat=size)]
        self.q, self.pi = ({c: rng.dirichlet(np.full(VOCAB, sharpness)) for c in contexts} for _ in range(2))

    def chance(self, laws, text, begin=0):
        return np.prod([laws[text[:n][-2:]][text[n]] for n in range(begin, len(text))])

    def texts(self):
        """All texts that end, or are cut at LENGTH tokens."""
        texts = [()]
        for text in texts:
            if not ended(text):
                texts += [(*text, v) for v in range(VOCAB)]
        return [text for text in texts if ended(text)]


def ended(text):
    return len(text) == LENGTH or text[-1:] == (END,)


def cut(text):
    """Up to and with the end."""
    return next(text[:n] for n in range(len(text) + 1) if ended(text[:n]) or n == len(text))


def accepted_by_token(pair, prefix, draft):
    """The chance that exactly j tokens are accepted, for j = 0 .. n, and pi's weight after them."""
    ratios = [law_ratio(pair, prefix + draft[:n], v) for n, v in enumerate(draft)]
    stands = np.cumprod([1.0, *np.minimum(1, ratios)])
    return stands - np.append(stands[1:], 0), np.ones(len(draft) + 1)


def accepted_by_block(pair, prefix, draft):
    """By the definition: the largest j with u_j < h_j."""
    weights, below = [1.0], list[float]()
    for n, v in enumerate(draft):
        weights.append(min(1.0, weights[-1] * law_ratio(pair, prefix + draft[:n], v)))
    for n in range(1, len(draft) + 1):
        context = (prefix + draft[:n])[-2:]
        rest = np.maximum(weights[n] * pair.pi[context] - pair.q[context], 0).sum()
        below.append(weights[n] if n == len(draft) else rest / (rest + 1 - weights[n]))
    chances, left = np.zeros(len(draft) + 1), 1.0
    for n in range(len(draft), 0, -1):
        chances[n] = left * below[n - 1]
        left -= chances[n]
    chances[0] = left
    return chances, np.array(weights)


def law_ratio(pair, context, v):
    return pair.pi[context[-2:]][v] / pair.q[context[-2:]][v]


ACCEPTED = {TOKEN.name: accepted_by_token, BLOCK.name: accepted_by_block}


def enumerated_calls(pair, way, sizes):
    """Of the verifier, expected in a text; sizes: the chance of each number of drafted tokens."""

    @cache
    def calls(prefix):
        if ended(prefix):
            return 0.0
        total = 1.0
        for size, share in enumerate(sizes):
            for draft in itertools.product(range(VOCAB), repeat=size) if share else ():
                mass = share * pair.chance(pair.q, prefix + draft, len(prefix))
                counts, weights = ACCEPTED[way](pair, prefix, draft)
                for n, chance in enumerate(counts):
                    context = (prefix + draft[:n])[-2:]
                    rest = pair.pi[context]
                    if n < size:
                        rest = np.maximum(weights[n] * pair.pi[context] - pair.q[context], 0)
                    if chance * rest.sum() > 0:
                        for v in range(VOCAB):
                            text = cut((*prefix, *draft[:n], v))
                            total += mass * chance * rest[v] / rest.sum() * calls(text)
        return total

    return calls(())


def runs_of(pair, way, max_size):
    """Along every text, and each text's chance."""
    texts = pair.texts()
    ratios = np.ones((len(texts), LENGTH))
    for n, text in enumerate(texts):
        ratios[n, : len(text)] = [1 / law_ratio(pair, text[:k], v) for k, v in enumerate(text)]
    shares = np.array([pair.chance(pair.pi, text) for text in texts])
    return Runs.of(ratios, np.array(list(map(len, texts))), VERIFICATIONS[way], max_size), shares


@pytest.mark.parametrize("way", VERIFICATIONS)
@pytest.mark.parametrize("sizes", [(0, 1), (0, 0, 1), (0, 0, 0, 1), (0.2, 0.3, 0, 0.5)])
def test_expected_calls_are_those_of_the_rounds(way, sizes):
    """Whatever the size of a draft, one that is random included."""
    at_least = 1 - np.cumsum((0, *sizes[:-1]))
    for seed in range(5):
        pair = Pair(seed)
        runs, shares = runs_of(pair, way, len(sizes) - 1)
        assert shares.sum() == pytest.approx(1)
        assert shares @ runs.calls(at_least) == pytest.approx(enumerated_calls(pair, way, sizes), abs=1e-12)


def test_blocks_take_fewer_calls():
    """So the two verifications are distinguished."""
    fewer = []
    for seed in range(20):
        by_token, by_block = (runs_of(Pair(seed), way, 3)[0] for way in (TOKEN.name, BLOCK.name))
        _, shares = runs_of(Pair(seed), TOKEN.name, 3)
        fewer.append(shares @ (by_token.calls(np.ones(4)) - by_block.calls(np.ones(4))))
    assert min(fewer) > 0 and np.median(fewer) > 1e-3


def test_ratios_of_any_size():
    """Sums of logarithms, because products of these ratios overflow."""
    ratios = np.array([[1e300, 1e300, 0.0, 1e300], [0.5, 4.0, 0.5, 1e-300]])
    np.testing.assert_allclose(BLOCK.standing(ratios), [[1, 1, 1, 0, 0], [1, 0.5, 0.5, 0.5, 1e-300]])
    np.testing.assert_allclose(TOKEN.standing(ratios), [[1, 1, 1, 0, 0], [1, 0.5, 0.5, 0.25, 2.5e-301]])


def test_survival_of_equal_tokens_is_a_power():
    """Also where few texts are long enough to see the last tokens of a draft."""
    lengths = np.array([2, 9, 3])
    runs = Runs.of(np.full((3, 9), 0.8), lengths, TOKEN, 12)
    np.testing.assert_allclose(runs.survival(12), 0.8 ** np.arange(13))


def test_laws_that_depend_on_the_length_of_a_draft():
    """The calls are those of drafts of that length, whatever the others would be."""
    rng, lengths = np.random.default_rng(0), np.array([5, 2, 7])
    ratios = rng.gamma(1, 1, (4, 3, 7))
    ratios = np.where(np.arange(7) < lengths[:, None], ratios, 1.0)
    runs = Runs.of_drafts(np.stack([windows(ratio, 4) for ratio in ratios]), lengths, BLOCK)
    for size in range(1, 5):
        alone = Runs.of(ratios[size - 1], lengths, BLOCK, size)
        np.testing.assert_array_equal(runs.calls(np.ones(size + 1)), alone.calls(np.ones(size + 1)))
        np.testing.assert_array_equal(runs.survival(size), alone.survival(size))
    assert not np.allclose(runs.survival(4)[:2], runs.survival(1))  # the control


@pytest.mark.parametrize("hand_over", ["need", "truncate", "keep"])
def test_a_plan_takes_the_verifiers_calls_from_its_texts(hand_over):
    runs, _ = runs_of(Pair(0), BLOCK.name, 8)
    acceptance = np.triu(np.full((3, 3), 0.5), 1)
    models = Candidates(
        ("a", "b", "c"), np.ones((3, 10)), acceptance, tuple(runs.lengths), runs={(1, 2): runs}
    )
    pair, three = (predict(models, names, (1,) * (len(names) - 1), hand_over) for names in ("bc", "abc"))
    fewest, calls = (runs.calls_per_token(np.ones(n)) for n in (3, 2))
    assert pair.passes_per_token == pytest.approx((calls, calls))
    if hand_over == "keep":  # a block holds one token or two
        assert fewest < three.passes_per_token[-1] < calls
    else:
        assert three.passes_per_token[-1] == calls
    with pytest.raises(FieldError) as refused:
        Candidates(("a", "b"), np.ones((2, 11)), acceptance[:2, :2], runs={(0, 1): runs})
    assert (refused.value.field, refused.value.value) == ("runs", 8)
