"""A toy language model and the exactly enumerated law of what any cascade of toys emits.

Nothing here shares code with the package's rules, sampling or decoding: it is their oracle.
"""

import dataclasses
from functools import cache, partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from speccascade_jax.core.nests import insert_rows
from speccascade_jax.core.protocols import NO_TOKEN, Prefix
from speccascade_jax.models.cache import write
from speccascade_jax.models.members import members
from speccascade_jax.tokenizers.tokenizer import Tokenizer


class TableCache(NamedTuple):
    tokens: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class TableLM:
    """An order-2 Markov model that reads its context from its own cache and nowhere else.

    Its parameters are a table of logits [V, V, V]: (last but one, last) -> next; before the
    first token stands token 0.
    """

    vocab_size: int

    def prefill(self, params, inputs, input_length, max_length):
        tokens = jnp.zeros((inputs.shape[0], max_length), jnp.int32)
        cache = TableCache(tokens, jnp.zeros_like(input_length))
        _, cache = self.extend(params, inputs, cache)
        return Prefix(inputs, input_length), cache._replace(length=input_length - 1)

    def extend(self, params, tokens, cache):
        written = write(cache.tokens, tokens, cache.length)
        position = cache.length[:, None] + jnp.arange(tokens.shape[1])
        last = jnp.take_along_axis(written, position, axis=1)
        before = jnp.take_along_axis(written, jnp.maximum(position - 1, 0), axis=1)
        before = jnp.where(position > 0, before, 0)
        return params[before, last], TableCache(written, cache.length + tokens.shape[1])

    def roll_back(self, cache, length):
        return cache._replace(length=length)


@dataclasses.dataclass(frozen=True)
class TableBlock:
    """A network of a TableLM and of a drafter that writes several tokens at once, whose law of each place is
    made of the last two committed tokens. It reads the last but one from the TableLM's cache.

    Its parameters are the drafter's table of logits [V, V, P, V], of P places, and the TableLM's.
    """

    vocab_size: int
    names: ClassVar[tuple[str, ...]] = ("drafter", "verifier")
    config: ClassVar[None] = None
    draft_size: ClassVar[int] = 16
    by_prefix: ClassVar[bool] = False

    @property
    def members(self):
        return members(self)

    def prefill(self, params, inputs, input_length, max_length):
        return TableLM(self.vocab_size).prefill(params[1], inputs, input_length, max_length)

    def extend(self, params, tokens, cache):
        return self.extend_member(1, params, tokens, cache)

    def extend_member(self, number, params, tokens, cache):
        if number:
            return TableLM(self.vocab_size).extend(params[1], tokens, cache)
        count = tokens.shape[1]
        known = jnp.sum(tokens >= 0, axis=1)  # of the tokens, the committed ones
        text = write(cache.tokens, tokens, cache.length)
        last = (cache.length + known)[:, None] - jnp.arange(2, 0, -1)
        context = jnp.where(last < 0, 0, jnp.take_along_axis(text, jnp.maximum(last, 0), axis=1))
        place = jnp.arange(count) - (known - 1)[:, None]
        laws = params[0][context[:, 0], context[:, 1]]
        return jnp.take_along_axis(laws, jnp.maximum(place, 0)[..., None], axis=1), cache

    def lengths(self, cache):
        return jnp.stack([cache.length] * 2, axis=1)

    def roll_back(self, cache, length):
        return cache._replace(length=jnp.minimum(cache.length, length))

    def insert(self, cache, fresh, slots, like_fresh):
        return insert_rows(cache, fresh, slots, like_fresh)


def places_table(seed: int, vocab_size: int, places: int, scale: float = 1.0) -> np.ndarray:
    """A drafter's table of TableBlock."""
    rng = np.random.default_rng(seed)
    return scale * rng.normal(size=(vocab_size, vocab_size, places, vocab_size)).astype(np.float32)


def table(seed: int, vocab_size: int, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(seed).normal(size=(vocab_size,) * 3).astype(np.float32)


def likeliest(probs: np.ndarray, k: int, whole: np.ndarray) -> np.ndarray:
    keep = np.zeros(len(probs), bool)
    keep[np.argsort(-probs, kind="stable")[:k]] = True
    return keep


def nucleus(probs: np.ndarray, mass: float, whole: np.ndarray) -> np.ndarray:
    order = np.argsort(-probs, kind="stable")
    return likeliest(probs, np.searchsorted(np.cumsum(probs[order]), mass - 1e-9) + 1, whole)


def likely(probs: np.ndarray, share: float, whole: np.ndarray) -> np.ndarray:
    return probs >= share * probs.max()


def within_sigmas(probs: np.ndarray, number: float, whole: np.ndarray) -> np.ndarray:
    logits = np.log(whole)
    return logits >= logits.max() - number * logits.std()


CUTS = {
    "top_k": (likeliest, 3),
    "top_n_sigma": (within_sigmas, 1.5),
    "top_p": (nucleus, 0.8),
    "min_p": (likely, 0.05),
}
"""Truncation -> which tokens it keeps, of the law so far, its value and the untransformed law; and a value at
which joint laws are held against it. In the order in which they follow one another."""


def transform(probs: np.ndarray, temperature: float, **values: float | None) -> np.ndarray:
    """The law that is sampled. Raises ValueError for a truncation that nothing here has a formula of."""
    if temperature == 0:
        return np.eye(len(probs))[np.argmax(probs)]
    whole, probs = probs, probs ** (1 / temperature)
    probs = probs / probs.sum()
    for name in sorted(values, key=list(CUTS).index):
        if values[name] is not None:
            probs = np.where(CUTS[name][0](probs, values[name], whole), probs, 0)
            probs = probs / probs.sum()
    return probs


def entropy(x):
    return -sum(v * np.log(v) for v in x if v > 0)


RELAXED_TOP_K = 10  # of relaxed and relaxed_ratio, where nothing else is said
NEAR = {
    "relaxed": lambda p, alpha: p >= p.max() - alpha,
    "relaxed_ratio": lambda p, alpha: p >= (1 - alpha) * p.max(),
}
"""Which tokens are near the verifier's best, by its untransformed law."""


def relaxed(name: str, k: int, q, p, qs, ps, alpha: float, greedy: bool) -> np.ndarray:
    """The procedure: a token of q~, kept where near the best of p and among its k likeliest; else one of
    p~."""
    kept = NEAR[name](p, alpha) & likeliest(p, k, p)
    return sum(qs[v] * (np.eye(len(q))[v] if kept[v] else ps) for v in range(len(q)))


def cactus(qs, ps, delta: float) -> np.ndarray:
    """The procedure, a drafted token at a time: h of that token, accepted by h/q~, else of (h - q~)+."""
    law = np.zeros(len(qs))
    for drafted, h in cactus_targets(qs, ps, delta):
        accepted = min(1, h[drafted] / qs[drafted])
        law[drafted] += qs[drafted] * accepted
        if accepted < 1:
            residual = np.maximum(h - qs, 0)
            law += qs[drafted] * (1 - accepted) * residual / residual.sum()
    return law


def cactus_targets(qs, ps, delta: float):
    """(drafted token, the law it is verified towards), of every token that may be drafted."""
    for drafted in np.flatnonzero(qs):
        its = ps[drafted]
        best = min(1, its + np.sqrt(2 * delta * its * (1 - its)))
        others = (1 - best) / (1 - its) if its < 1 else 0.0
        yield drafted, np.where(np.arange(len(qs)) == drafted, best, others * ps)


class UnknownMethod(LookupError):
    """A method that target() has no formula of."""


def target(method, q, p, qs, ps, alpha: float, greedy: bool) -> np.ndarray:
    """Each method's target distribution, a token at a time, in float64; or that of a function of these.

    Raises UnknownMethod for a name that stands nowhere here.
    """
    if callable(method):
        return method(q, p, qs, ps, alpha, greedy)
    size, tv = len(q), np.maximum(ps - qs, 0).sum()
    cross = -np.log(p[np.argmax(q)]) if greedy else -(q * np.log(p)).sum()
    position = {
        "speculative": True,
        "chow": q.max() < 1 - alpha,
        "chow_log": entropy(q) > alpha,
        "diff": q.max() < p.max() - alpha,
        "diff_log": entropy(q) > entropy(p) + alpha,
        "router": q.max() < p.max() - alpha * tv,
        "opt": q.max() < p.max() - alpha * tv,
        "opt_log": entropy(q) > entropy(p) + alpha * tv,
        "bild_star": cross > alpha,
    }
    token = {
        "token_v1": lambda v: q[v] < p.max() - alpha,
        "token_v2": lambda v: p[v] < p.max() - alpha,
        "token_v3": lambda v: p[v] < (1 - alpha) * p.max(),
        "lossy_greedy": lambda v: p[v] < (1 - alpha) * p.max(),
    }
    if method in ("mixture", "learned_mixture"):
        return alpha * qs + (1 - alpha) * ps
    if method in NEAR:
        return relaxed(method, RELAXED_TOP_K, q, p, qs, ps, alpha, greedy)
    if method == "cactus":
        return cactus(qs, ps, alpha)
    if method == "typical":  # the procedure: a token of q, kept where typical of p, else a new one of p
        threshold = min(1 - alpha, np.sqrt(1 - alpha) * np.exp(-entropy(ps)))
        return sum(qs[v] * (np.eye(size)[v] if ps[v] > threshold else ps) for v in range(size))
    if method in position:
        return ps if position[method] else qs
    if method in token:
        deferred = [token[method](v) for v in range(size)]
        refill = np.eye(size)[np.argmax(p)] if method == "lossy_greedy" else ps
        mass = sum(qs[v] for v in range(size) if deferred[v])
        return np.array([(0 if deferred[v] else qs[v]) + mass * refill[v] for v in range(size)])
    if method not in ("lossy", "lossy_tuned"):
        raise UnknownMethod(f"this oracle has no formula of {method!r}.")
    # Lossy: simulate the procedure's one position. beta by bisection on R = g(beta).
    accept = np.array([min(1, ps[v] / ((1 - alpha) * qs[v])) if qs[v] > 0 else 0 for v in range(size)])
    rejected = (qs * (1 - accept)).sum()
    beta = 1.0
    if method == "lossy_tuned" and rejected > 1e-12:
        low, high = 1.0, 1.0 / rejected
        for _ in range(200):
            beta = (low + high) / 2
            low, high = (beta, high) if np.maximum(ps / beta - qs, 0).sum() > rejected else (low, beta)
    spill = np.maximum(ps / beta - qs, 0)
    return qs * accept + (rejected * spill / spill.sum() if rejected > 1e-12 else 0)


def knows(method: str) -> bool:
    """Whether target() has a formula of this name."""
    half = np.full(2, 0.5)
    try:
        target(method, half, half, half, half, 0.5, False)
    except UnknownMethod:
        return False
    return True


def sequence_law(
    tables,
    methods,
    alphas,
    prompt,
    *,
    steps: int,
    eos: int,
    temperature: float = 1.0,
    **truncations: float | None,
) -> dict[tuple[int, ...], float]:
    """Every text of at most `steps` tokens (shorter only after eos) -> its probability.

    tables, methods, alphas run from the smallest model up; level n's target builds on level n-1's.
    """
    laws = [cache(partial(table_law, logits)) for logits in tables]
    return text_law(
        [lambda context, law=law: law(*context[-2:]) for law in laws],
        methods,
        alphas,
        prompt,
        steps=steps,
        eos=eos,
        temperature=temperature,
        **truncations,
    )


def table_law(logits: np.ndarray, before: int, last: int) -> np.ndarray:
    """What follows these two tokens."""
    row = logits[before, last].astype(np.float64)
    weights = np.exp(row - row.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def text_law(
    laws,
    methods,
    alphas,
    prompt,
    *,
    steps: int,
    eos: int,
    temperature: float = 1.0,
    **truncations: float | None,
) -> dict[tuple[int, ...], float]:
    """As sequence_law, of models that are functions: (0, the prompt's tokens, those after it) -> law.

    alphas may be a function of what is written before a token, too.
    """

    @cache
    def law(context: tuple[int, ...]) -> tuple[float, ...]:
        untransformed, sampled = None, None
        leniences = alphas(context[1 + len(prompt) :]) if callable(alphas) else alphas
        for level, model in enumerate(laws):
            probs = model(context)
            shaped = transform(probs, temperature, **truncations)
            if level == 0:
                untransformed, sampled = probs, shaped
            else:
                rule = (methods[level - 1], leniences[level - 1], temperature == 0)
                untransformed, sampled = (
                    target(rule[0], untransformed, probs, untransformed, probs, *rule[1:]),
                    target(rule[0], untransformed, probs, sampled, shaped, *rule[1:]),
                )
        return tuple(sampled)

    texts, open_texts = {}, {(): 1.0}
    for step in range(steps):
        grown = {}
        for text, mass in open_texts.items():
            context = (0, *prompt, *text)
            for token, chance in enumerate(law(context)):
                if chance > 0:
                    closed = token == eos or step == steps - 1
                    (texts if closed else grown)[(*text, token)] = mass * chance
        open_texts = grown
    return texts


def lookahead(place, gamma, alpha, acceptance, round_cost, q, p, qs, ps):
    """The look-ahead rule's target at one position of a round: 0 .. gamma, which is the bonus one."""
    lost, whole = (sum(acceptance**n for n in range(left)) for left in (gamma - place, gamma + 1))
    price = alpha * round_cost * lost / whole
    return ps if q.max() < p.max() - price * np.maximum(ps - qs, 0).sum() else qs


def block_law(tables, at, prompt, **options) -> dict[tuple[int, ...], float]:
    """As sequence_law, of two models, where the target depends on the position's place in its round: see
    placed_law.

    A drafter's table of TableBlock gives q by the text before the round and by the place in it. A function
    from a text, prompt included, to its law, or to the laws [P, V] of the places after it, may stand for a
    table."""
    at_once = callable(tables[0]) or tables[0].ndim > 3

    def law_of(logits):
        of_two = cache(partial(table_law, logits))
        return lambda text: of_two(*(0, *text)[-2:])

    laws = [cache(made) if callable(made) else law_of(made) for made in tables]

    def drafted(context, place):
        text = context[1:]
        return laws[0](text[: len(text) - place])[place] if at_once else laws[0](text)

    return placed_law([drafted, lambda context, place: laws[1](context[1:])], at, prompt, **options)


def law_as_a_whole(tables, at, prompt, *, steps: int, eos: int) -> dict[tuple[int, ...], float]:
    """As block_law, at temperature 1, of drafts that are verified as a whole, by the definition (Sun et al.,
    Algorithm 2, with pi for their target): round by round, every draft and every number of its tokens that
    may stand."""
    at_once, gamma = tables[0].ndim > 3, len(at) - 1
    laws = [cache(partial(table_law, logits)) for logits in tables]
    masses: dict[tuple[int, ...], float] = {(): 1.0}
    texts: dict[tuple[int, ...], float] = {}

    def drafts(q, done=()):
        if len(done) == gamma or done[-1:] == (eos,):
            yield done, 1.0
            return
        for v, chance in enumerate(q(done)):
            for draft, share in drafts(q, (*done, v)):
                yield draft, chance * share

    def add(text, mass):
        into = texts if text[-1] == eos or len(text) == steps else masses
        into[text] = into.get(text, 0.0) + mass

    while masses:
        text = min(masses, key=len)
        whole, mass = (0, *prompt, *text), masses.pop(text)

        def q(done, whole=whole):
            return laws[0](*whole[-2:])[len(done)] if at_once else laws[0](*(*whole, *done)[-2:])

        for draft, share in drafts(q):
            pi, qs = [], []
            for n in range(len(draft) + 1):
                p = laws[1](*(*whole, *draft[:n])[-2:])
                qs.append(q(draft[:n]))
                pi.append(at[n](qs[n], p, qs[n], p))
            weights, left = [1.0], mass * share
            for n, v in enumerate(draft):
                weights.append(min(1.0, weights[-1] * pi[n][v] / qs[n][v]))
            for n in range(len(draft), -1, -1):
                rest, stands = np.maximum(weights[n] * pi[n] - qs[n], 0), 1.0
                if n == len(draft):
                    rest, stands = pi[n], weights[n]
                elif n:
                    stands = rest.sum() / max(rest.sum() + 1 - weights[n], 1e-300)
                chance, left = left * stands, left * (1 - stands)
                kept = (*text, *draft[:n])[:steps]
                if kept[-1:] == (eos,) or len(kept) == steps:
                    add(kept, chance)
                elif chance > 0:
                    for v in np.flatnonzero(rest):
                        add((*kept, int(v)), chance * rest[v] / rest.sum())
    np.testing.assert_allclose(sum(texts.values()), 1)
    return {text: mass for text, mass in texts.items() if mass > 0}


def placed_law(
    laws, at, prompt, *, steps: int, eos: int, stop_below: float | None = None, **options
) -> dict[tuple[int, ...], float]:
    """As text_law, of two models, whose laws are functions of the context and of the position's place in its
    round. at[place] makes the target of (q, p, q~, p~), the last one at the bonus position. stop_below:
    adaptive blocks'."""
    texts: dict[tuple[int, ...], float] = {}
    begun = ((), 0, 1.0, 0.0, (0, 0, 0.0))  # text; place, chance and hopes of the round; of those before it
    open_texts = {begun: 1.0}
    for step in range(steps):
        grown: dict[tuple, float] = {}
        for (text, place, chance, hoped, seen), mass in open_texts.items():
            q, p = (law((0, *prompt, *text), place) for law in laws)
            qs, ps = (transform(x, **{"temperature": 1.0, **options}) for x in (q, p))
            sure = q.max() / np.sort(q)[-2:].sum()
            chance *= min(max(sure + (seen[1] - seen[2]) / (seen[0] + 32), 0), 1)
            drafts = place < len(at) - 1 and (stop_below is None or chance >= stop_below)
            pi = at[place](q, p, qs, ps)
            ended = (seen[0] + place + drafts, seen[1] + place, seen[2] + hoped + drafts * sure)
            for token, mine in enumerate(pi):
                kept = min(qs[token], mine) if drafts else 0
                for share, state in (
                    (kept, (place + 1, chance, hoped + sure, seen)),
                    (mine - kept, (0, 1.0, 0.0, ended)),
                ):
                    if share > 0:
                        closed, own_text = token == eos or step == steps - 1, (*text, token)
                        masses, key = (texts, own_text) if closed else (grown, (own_text, *state))
                        masses[key] = masses.get(key, 0.0) + mass * share
        open_texts = grown
    return texts


def chi_square(texts: np.ndarray, law: dict[tuple[int, ...], float]) -> float:
    """p-value of texts [N, steps] (padded with -1) against the law; 0 for a text of no mass.

    Cells expecting fewer than 10 are pooled.
    """
    base, steps = int(texts.max(initial=0)) + 2, texts.shape[1]
    assert base**steps < 2**63
    numbers = (texts.astype(np.int64) + 1) @ base ** np.arange(steps)  # a tenth of the time of rows' own
    _, places, counts = np.unique(numbers, return_index=True, return_counts=True)
    seen = {
        tuple(int(t) for t in row if t >= 0): int(n) for row, n in zip(texts[places], counts, strict=True)
    }
    if any(law.get(text, 0.0) < 1e-9 for text in seen):
        return 0.0
    expected = {text: mass * len(texts) for text, mass in law.items()}
    cells = [(seen.get(t, 0), e) for t, e in expected.items() if e >= 10]
    rest = [(seen.get(t, 0), e) for t, e in expected.items() if e < 10]
    if rest:
        cells.append((sum(s for s, _ in rest), sum(e for _, e in rest)))
    observed, wanted = np.array(cells, float).T
    if len(cells) == 1:
        return 1.0
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(stats.chi2.sf(statistic, len(cells) - 1))


class Digits(Tokenizer):
    """A tokenizer of the toys' four tokens."""

    def __init__(self):
        self.pad_id, self.eos_id, self.bos_id = 0, 3, -1

    def id_of(self, piece):
        return int(piece) if piece in ("0", "1", "2", "3") else None

    def encode_batch(self, texts):
        return [[max("0123456789".find(c), 0) for c in text] for text in texts]

    def decode(self, tokens):
        return "".join(str(int(t)) for t in tokens)


class Endless(Digits):
    """No token of it ends a text."""

    def __init__(self):
        super().__init__()
        self.eos_id = NO_TOKEN


def pair(**fields):
    """A cascade of two toys, whose texts are digits below 4."""
    from speccascade_jax.inference.text import Cascade

    model = TableLM(4)
    return Cascade(
        (model, model),
        (table(39, 4), table(40, 4)),
        Digits(),
        max_source_length=16,
        max_new_tokens=3,
        **fields,
    )
