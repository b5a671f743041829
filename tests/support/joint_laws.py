"""Joint laws: what the compiled loop writes for toy models, held against enumeration by chi-square."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import CUTS, TableLM, block_law, chi_square, knows, sequence_law, table

from speccascade_jax.core.loop import begin, finish, generate, requests, run
from speccascade_jax.core.methods import Method
from speccascade_jax.core.protocols import NO_TOKEN, Markers
from speccascade_jax.core.rules import METHODS, Scores
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.core.verification import TOKEN
from speccascade_jax.evaluation.rates import check_identities

VOCAB, EOS, STEPS = 4, 3, 4
HAND_OVERS = ("need", "truncate", "keep")
FAIL_BELOW = 1e-4
PROMPTS = [(1,), (2, 0, 1)]  # uneven: half of the rows each
TABLES = [table(seed, VOCAB) for seed in (39, 40, 41, 42)]  # rules defer in about half of their contexts
BLOCK_TABLES = [table(56, VOCAB, 3.0), table(57, VOCAB, 1.5)]
"""Of texts verified as a block: by enumeration, a residual without its weights moves 2.5% of their mass where
the method is lossless, and a weight that is not cut at 1 10%. Of TABLES they would move 0.2% and 1.4%."""
TRANSFORMS = {"plain": {}, **{name: {name: value} for name, (_, value) in CUTS.items()}}
FAMILIES = {"speculative": 0.0, "opt": 0.05, "token_v3": 0.4}  # lenience at which each defers and trusts
WIDEST = 2.0  # the part of an unbounded range in which leniences are looked for
LENIENCE = {
    "chow": 0.5,
    "chow_log": 1.17,
    "diff": 0.03,
    "diff_log": 0.05,
    "opt": 0.05,
    "opt_log": 0.1,
    "token_v1": 0.3,
    "token_v2": 0.2,
    "token_v3": 0.4,
    "bild_star": 1.5,
    "lossy": 0.3,
    "typical": 0.5,
    "relaxed": 0.2,
    "relaxed_ratio": 0.4,
    "cactus": 0.1,
    "mixture": 0.4,
    "learned_mixture": 0.4,
    "router": 0.05,
    "lossy_tuned": 0.3,
    "lossy_greedy": 0.3,
    "speculative": 0.0,
}
"""Chosen by hand; lenience() finds those of other methods."""


def exact(method: Method, place: int = 0, places: int = 1):
    """A method's own target function in float64, as toys.target takes it, at one of a round's places. It is
    what a method is held against that nothing else has a formula of."""

    @cache
    def law(*position: tuple[float, ...] | float | bool) -> np.ndarray:
        *laws, alpha, greedy = position
        with jax.enable_x64(True):
            scores = Scores(*(jnp.tile(jnp.asarray(x), (1, places, 1)) for x in laws), jnp.asarray(greedy))
            pi, _ = method.target(scores, alpha)
        assert pi.dtype == np.float64
        return np.asarray(pi)[0, place]

    return lambda q, p, qs, ps, alpha, greedy=False: law(
        *(tuple(map(float, x)) for x in (q, p, qs, ps)), float(alpha), bool(greedy)
    )


def oracle(name: str):
    """What toys.target takes for this method: its name, or where it has no formula of that exact()."""
    return name if knows(name) else exact(METHODS[name])


def lenience(name: str) -> float:
    """A lenience at which the method decides both ways: LENIENCE's, or that of the declared range which keeps
    the target farthest from the nearer of the drafter's and the verifier's laws."""
    if name in LENIENCE:
        return LENIENCE[name]
    method = METHODS[name]
    q, p = (jax.nn.softmax(logits, axis=-1) for logits in TABLES[:2])
    scores = Scores(q, p, q, p, jnp.asarray(False))

    def decides(alpha: float) -> float:
        pi, _ = method.target(scores, alpha)
        return min(float(jnp.abs(pi - x).sum()) for x in (q, p))

    values = np.linspace(method.low, min(method.high, method.low + WIDEST), 22)[1:-1]
    return max(map(float, values), key=decides)


def prompts(rows, seed):
    """Both prompts in turn: the prompt number of each row, and keys, inputs and lengths."""
    which = np.arange(rows) % len(PROMPTS)
    inputs = np.zeros((rows, max(map(len, PROMPTS))), np.int32)
    for n, prompt in enumerate(PROMPTS):
        inputs[which == n, : len(prompt)] = prompt
    lengths = np.array([len(p) for p in PROMPTS], np.int32)[which]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    return which, keys, inputs, lengths


def checked(sampler, result):
    """`result`, whose counts must agree with one another and with its texts."""
    if sampler.level:
        check_identities(result.counts[1])
        assert (np.asarray(result.counts[1].emitted) == result.length).all()
    return result


def decoded(sampler, params, rows, options, alphas, seed=0, **per_row):
    """generate() of both prompts in turn: its result, and the prompt number of each row."""
    which, *inputs = prompts(rows, seed)
    result = generate(
        sampler,
        params,
        *inputs,
        options,
        jnp.array(alphas),
        max_new_tokens=STEPS,
        eos_id=EOS,
        **per_row,
    )
    return checked(sampler, result), which


class Batch:
    """decoded() for one setting after another. Random numbers take most of its time, and are made once: all
    settings have the same."""

    def __init__(self, sampler, params, rows, seed=0, verifications=None):
        self.sampler, self.params, self.rows = sampler, params, rows
        self.which, *self.prompts = prompts(rows, seed)
        self.verifications = verifications
        self.state = prefilled(sampler, params, self._requests(SamplingOptions(), np.zeros(sampler.level)))

    def _requests(self, options, alphas, methods=None):
        values = *self.prompts, options, alphas, methods
        return requests(self.sampler, *values, None, STEPS, self.verifications)

    def decoded(self, options, alphas, methods=None, params=None):
        """methods: each verifier's, by number. params: others than those that the prompts were read with."""
        params = self.params if params is None else params
        result = written(self.sampler, params, self.state, self._requests(options, alphas, methods))
        return checked(self.sampler, result), self.which


@partial(jax.jit, static_argnums=0)
def prefilled(sampler, params, batch):
    return begin(sampler, params, batch, max_new_tokens=STEPS, eos_id=EOS)


@partial(jax.jit, static_argnums=0)
def written(sampler, params, state, batch):
    """What follows the prompts of `state` as the requests of `batch` have it."""
    values = {name: getattr(batch, name) for name in ("options", "alphas", "methods")}
    state = state._replace(rows=state.rows._replace(**values))
    return finish(run(sampler, params, state, len(batch.limit), eos_id=EOS), STEPS)


def nested(tables):
    """Parameters of a hierarchy's models, from the smallest up."""
    params = tables[0]
    for larger in tables[1:]:
        params = (params, larger)
    return params


def texts(
    methods,
    alphas,
    block_sizes,
    *,
    rows,
    seed=0,
    hand_over="need",
    verification=TOKEN,
    ways=None,
    tables=TABLES,
    **options,
):
    """Tokens [rows, STEPS] of the compiled loop, and the prompt number of each row."""
    rules = [METHODS[m] for m in methods]
    sampler = hierarchy([TableLM(VOCAB)] * (len(rules) + 1), rules, block_sizes, hand_over, verification)
    params = nested(tables[: len(rules) + 1])
    options = SamplingOptions(**{"temperature": 1.0, **options})
    result, which = decoded(sampler, params, rows, options, alphas, seed, verifications=ways)
    return np.asarray(result.tokens), which


def p_value(methods, alphas, block_sizes, *, rows, tables=TABLES, **options):
    """The smaller p-value of the two prompts, times two (Bonferroni)."""
    tokens, which = texts(methods, alphas, block_sizes, rows=rows, tables=tables, **options)
    for name in ("seed", "hand_over", "verification", "ways"):
        options.pop(name, None)
    return smaller(tokens, which, laws(methods, alphas, block_sizes, tables, **options))


def smaller(tokens, which, expected):
    """The smaller p-value of the two prompts, times two."""
    return 2 * min(chi_square(np.asarray(tokens)[which == n], law) for n, law in enumerate(expected))


def laws(methods, alphas, block_sizes, tables=TABLES, **options):
    """By enumeration, of both prompts. A method that reads its place in the round stands alone."""
    tables = tables[: len(methods) + 1]
    if all(METHODS[method].by_prefix for method in methods):
        names = [oracle(method) for method in methods]
        law = partial(sequence_law, tables, names, alphas)
    else:
        places = block_sizes[0] + 1
        rules = [exact(METHODS[methods[0]], place, places) for place in range(places)]
        law = partial(block_law, tables, [partial(rule, alpha=alphas[0]) for rule in rules])
    return [law(prompt, steps=STEPS, eos=EOS, **options) for prompt in PROMPTS]


def p_values(methods, block_sizes, settings, *, rows, tables=TABLES, **form):
    """p_value() of each setting: methods, one for each verifier, at their lenience(), and options. `methods`
    are those that each verifier has, in one program for options of a kind. form: as hierarchy() takes it."""
    tables = tables[: len(methods) + 1]
    rules = [tuple(METHODS[name] for name in names) for names in methods]
    sampler = hierarchy([TableLM(VOCAB)] * len(tables), rules, block_sizes, **form)
    batch, values = Batch(sampler, nested(tables), rows), {}
    for chosen, options in settings:
        alphas, options = [lenience(name) for name in chosen], {"temperature": 1.0, **options}
        numbers = [names.index(name) for names, name in zip(methods, chosen, strict=True)]
        result, which = batch.decoded(SamplingOptions(**options), alphas, numbers)
        expected = laws(chosen, alphas, block_sizes, tables, **options)
        values[chosen, *options.items()] = smaller(result.tokens, which, expected)
    return values


def unlikely(values):
    """Those of p_values() that no right sampler gives."""
    return {setting: value for setting, value in values.items() if not value > FAIL_BELOW}


def after(markers, base):
    """The leniences after what is written: `markers` of tokens -> leniences, the shortest first."""

    def leniences(written):
        latest = base
        for end in range(1, len(written) + 1):
            for marker, values in markers:
                if written[max(end - len(marker), 0) : end] == marker:
                    latest = values
        return latest

    return leniences


def table_of(rows, longest=3, count=2):
    """Markers of rows, each a list of (tokens, leniences)."""
    levels = max((len(values) for row in rows for _, values in row), default=1)
    tokens = np.full((len(rows), count, longest), NO_TOKEN, np.int32)
    alphas = np.zeros((len(rows), count, levels), np.float32)
    for n, row in enumerate(rows):
        for m, (marker, values) in enumerate(row):
            tokens[n, m, longest - len(marker) :], alphas[n, m] = marker, values
    return Markers(tokens, alphas)


def quick(*parameters, among):
    """Parameters of which the quick suite runs those `among`, a setting each; the rest is for --full."""
    return [pytest.param(*p, marks=() if p in among else pytest.mark.full) for p in parameters]


def with_rules(hierarchies):
    """Each with one of the rules of handing over."""
    return [(*case, HAND_OVERS[number % 3]) for number, case in enumerate(hierarchies)]
