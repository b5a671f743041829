"""Log probabilities of a text's tokens under the distribution that its sampler follows, computed afterwards
in one pass."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from speccascade_jax.core import loop
from speccascade_jax.core.methods import Method
from speccascade_jax.core.nests import network_of, top
from speccascade_jax.core.protocols import Cache, Params, Rows, Sampler
from speccascade_jax.core.rounds import is_greedy
from speccascade_jax.core.rules import Scores
from speccascade_jax.core.samplers import Autoregressive, Speculative
from speccascade_jax.core.samplers.block import Parallel
from speccascade_jax.core.transforms import token_probs
from speccascade_jax.core.verification import Draft
from speccascade_jax.parallel import fetched, whole_on
from speccascade_jax.scheduling.programs import Plan, placed_as
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import arguments

Array = jax.Array
LIKELIEST = 20  # tokens whose probabilities are given at each position
LEAST = -9999.0  # stands for the logarithm of 0, which JSON has no number for


class TokenScores(NamedTuple):
    """Log probabilities of a text's tokens, and the most likely tokens at each position with theirs."""

    logprobs: Float[np.ndarray, " N"]
    likeliest: Int[np.ndarray, "N K"]
    likeliest_logprobs: Float[np.ndarray, "N K"]


def states_law(sampler: Sampler, rules: Sequence[Method]) -> bool:
    """Whether laws() gives the law of what `rules` write, one for each verifier from the smallest up.

    A lossless rule's law is its verifier's. Another's is also made of the drafter's, which must be a law by
    prefix: that of a drafter that reads its verifier's states, or proposes tokens without a law, depends on
    where the rounds began.
    """
    if not rules or not isinstance(sampler, Speculative):
        return isinstance(sampler, Autoregressive)
    *below, rule = rules
    reads_states = sampler.shares and not getattr(network_of(sampler.verifier), "by_prefix", True)
    by_prefix = rule.by_prefix and sampler.by_prefix and not reads_states
    return rule.lossless or (by_prefix and states_law(sampler.drafter, below))


def laws(
    sampler: Sampler, params: Params, caches: Cache, rows: Rows, tokens: Int[Array, "B N"]
) -> tuple[Float[Array, "B N V"], Float[Array, "B N V"]]:
    """The law of the token after each prefix of `tokens`, whose first is the one the caches lack: built from
    the models' own distributions, and from the transformed ones. The second is what a text is drawn from.

    Raises ValueError for a sampler whose law is not one of the prefix.
    """
    if isinstance(sampler, Autoregressive | Parallel):
        logits, _ = sampler.model.extend(params, tokens, caches)
        return jax.nn.softmax(logits, axis=-1), token_probs(logits, rows.options)
    if not isinstance(sampler, Speculative) or not all(method.by_prefix for method in sampler.methods):
        raise ValueError(f"{type(sampler).__name__} states no law of its tokens by their prefix.")
    below = (params, caches) if sampler.shares else (params[0], caches[0])
    q, q_sampled = laws(sampler.drafter, *below, rows, tokens)
    cache = top(sampler.drafter.models, caches) if sampler.shares else caches[1]
    logits, _ = sampler.verifier.extend(top(sampler.models, params), tokens, cache)
    scores = Scores(
        q, jax.nn.softmax(logits, axis=-1), q_sampled, token_probs(logits, rows.options), is_greedy(rows)
    )
    draft = Draft(tokens[:, 1:], q_sampled, jnp.full_like(rows.room, tokens.shape[1] - 1))
    untransformed, _ = sampler.target(scores._replace(q_sampled=scores.q, p_sampled=scores.p), rows, draft)
    return untransformed, sampler.target(scores, rows, draft)[0]


def score(
    sampler: Sampler, params: Params, requests: loop.Requests, tokens: Int[Array, "B N"]
) -> tuple[Float[Array, "B N"], Int[Array, "B N K"], Float[Array, "B N K"]]:
    """log pi of each of `tokens` [B, N] after its request and the tokens before it; the most likely tokens
    there, and theirs."""
    state = loop.begin(sampler, params, requests, max_new_tokens=tokens.shape[1])
    read = jnp.concatenate([state.rows.last[:, None], tokens[:, :-1]], axis=1)
    _, law = laws(sampler, params, state.caches, state.rows, read)
    log_law = jnp.maximum(jnp.log(law), LEAST)
    logprobs = jnp.take_along_axis(log_law, tokens[..., None], axis=-1)[..., 0]
    likeliest_logprobs, likeliest = jax.lax.top_k(log_law, min(LIKELIEST, law.shape[-1]))
    return logprobs, likeliest, likeliest_logprobs


class Scorer:
    """score() of one request at a time, compiled once for inputs of up to `width` tokens; with a mesh, on all
    its devices."""

    def __init__(self, plan: Plan, params: Params, width: int, mesh: Mesh | None = None):
        self.plan, self.params, self.width, self.mesh = plan, params, width, mesh
        self.compiled: Any = None

    def precompile(self) -> None:
        tokens = jax.ShapeDtypeStruct((1, self.plan.max_new_tokens), jnp.int32)
        function = jax.jit(partial(score, self.plan.sampler))
        shapes = self.plan.requests(1, self.width), tokens
        if self.mesh is not None:
            at = NamedSharding(self.mesh, P())
            shapes = placed_as(shapes, jax.tree.map(lambda _: at, shapes))
        self.compiled = function.lower(self.params, *shapes).compile()

    def __call__(self, request: Request, tokens: list[int]) -> TokenScores:
        """Scores the `tokens` that a request wrote."""
        if self.compiled is None:
            self.precompile()
        padded = np.zeros((1, self.plan.max_new_tokens), np.int32)
        padded[0, : len(tokens)] = tokens
        read = arguments(self.plan, [request], self.width, 0), padded
        if self.mesh is not None:
            read = whole_on(self.mesh, read)
        scores = fetched(self.compiled(self.params, *read))
        return TokenScores._make(x[0, : len(tokens)] for x in scores)
