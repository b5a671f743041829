"""Joint laws: what the compiled loop writes for toy models, held against enumeration by chi-square."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import TableLM, chi_square, sequence_law, table

from speccascade_jax.core.loop import generate
from speccascade_jax.core.rules import METHODS
from speccascade_jax.core.samplers import hierarchy
from speccascade_jax.core.transforms import SamplingOptions
from speccascade_jax.evaluation.rates import check_identities

VOCAB, EOS, STEPS = 4, 3, 4
HAND_OVERS = ("need", "truncate", "keep")
FAIL_BELOW = 1e-4
PROMPTS = [(1,), (2, 0, 1)]  # uneven: half of the rows each
TABLES = [table(seed, VOCAB) for seed in (39, 40, 41, 42)]  # rules defer in about half of their contexts
TRANSFORMS = {"plain": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.05}}
FAMILIES = {"speculative": 0.0, "opt": 0.05, "token_v3": 0.4}  # lenience at which each defers and trusts
LENIENCE = {"chow": 0.5, "chow_log": 1.17, "diff": 0.03, "diff_log": 0.05, "opt": 0.05, "opt_log": 0.1,
            "token_v1": 0.3, "token_v2": 0.2, "token_v3": 0.4, "bild_star": 1.5, "lossy": 0.3,
            "typical": 0.5, "mixture": 0.4, "learned_mixture": 0.4,
            "router": 0.05, "lossy_tuned": 0.3, "lossy_greedy": 0.3,
            "speculative": 0.0}


def decoded(sampler, params, rows, options, alphas, seed=0, **per_row):
    """generate() of both prompts in turn: its result, and the prompt number of each row."""
    which = np.arange(rows) % len(PROMPTS)
    inputs = np.zeros((rows, max(map(len, PROMPTS))), np.int32)
    for n, prompt in enumerate(PROMPTS):
        inputs[which == n, :len(prompt)] = prompt
    lengths = np.array([len(p) for p in PROMPTS], np.int32)[which]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
    result = generate(sampler, params, keys, inputs, lengths, options, jnp.array(alphas),
                      max_new_tokens=STEPS, eos_id=EOS, **per_row)
    if sampler.level:
        check_identities(result.counts[1])
        assert (np.asarray(result.counts[1].emitted) == result.length).all()
    return result, which


def texts(methods, alphas, block_sizes, *, rows, seed=0, hand_over="need", **options):
    """Tokens [rows, STEPS] of the compiled loop, and the prompt number of each row."""
    models = [TableLM(VOCAB)] * (len(methods) + 1)
    sampler = hierarchy(models, [METHODS[m] for m in methods], block_sizes, hand_over)
    params = TABLES[0]
    for larger in TABLES[1:len(models)]:
        params = (params, larger)
    options = SamplingOptions(**{"temperature": 1.0, **options})
    result, which = decoded(sampler, params, rows, options, alphas, seed)
    return np.asarray(result.tokens), which


def p_value(methods, alphas, block_sizes, *, rows, **options):
    """The smaller p-value of the two prompts, times two (Bonferroni)."""
    tokens, which = texts(methods, alphas, block_sizes, rows=rows, **options)
    for name in ("seed", "hand_over"):
        options.pop(name, None)
    laws = [sequence_law(TABLES[:len(methods) + 1], methods, alphas, prompt, steps=STEPS, eos=EOS, **options)
            for prompt in PROMPTS]
    return 2 * min(chi_square(tokens[which == n], law) for n, law in enumerate(laws))


def quick(*parameters, among):
    """Parameters of which the quick suite runs those `among`, a setting each; the rest is for --full."""
    return [pytest.param(*p, marks=() if p in among else pytest.mark.full) for p in parameters]


def with_rules(hierarchies):
    """Each with one of the rules of handing over."""
    return [(*one, HAND_OVERS[number % 3]) for number, one in enumerate(hierarchies)]
