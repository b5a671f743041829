"""Log probabilities of a text's tokens under its sampler's distribution, computed afterwards in one pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from speccascade_jax.core import loop
from speccascade_jax.core.protocols import Params, Sampler, laws
from speccascade_jax.parallel import fetched, whole_on
from speccascade_jax.scheduling.kernels import compiler_options
from speccascade_jax.scheduling.programs import Plan, placed_as, with_keys
from speccascade_jax.scheduling.prompts import Request
from speccascade_jax.scheduling.scheduler import arguments

Array = jax.Array
LIKELIEST = 20  # most likely tokens reported at each position
LEAST = -9999.0  # represents log 0, which JSON cannot express


class TokenScores(NamedTuple):
    """Log probabilities of a text's tokens, and the most likely tokens at each position with their log
    probabilities."""

    logprobs: Float[np.ndarray, " N"]
    likeliest: Int[np.ndarray, "N K"]
    likeliest_logprobs: Float[np.ndarray, "N K"]


def score(
    sampler: Sampler, params: Params, requests: loop.Requests, tokens: Int[Array, "B N"]
) -> tuple[Float[Array, "B N"], Int[Array, "B N K"], Float[Array, "B N K"]]:
    """log pi of each of `tokens` [B, N] given its request and the tokens before it, the most likely tokens
    there, and their log pi."""
    state = loop.begin(sampler, params, requests, max_new_tokens=tokens.shape[1])
    read = jnp.concatenate([state.rows.last[:, None], tokens[:, :-1]], axis=1)
    _, law = laws(sampler, params, state.caches, state.rows, read)
    log_law = jnp.maximum(jnp.log(law), LEAST)
    logprobs = jnp.take_along_axis(log_law, tokens[..., None], axis=-1)[..., 0]
    likeliest_logprobs, likeliest = jax.lax.top_k(log_law, min(LIKELIEST, law.shape[-1]))
    return logprobs, likeliest, likeliest_logprobs


class Scorer:
    """Applies score() to one request at a time. It is compiled once, for inputs of up to `width` tokens, and
    uses all devices of a mesh."""

    def __init__(self, plan: Plan, params: Params, width: int, mesh: Mesh | None = None):
        self.plan, self.params, self.width, self.mesh = plan, params, width, mesh
        self.compiled: Any = None

    def precompile(self) -> None:
        tokens = jax.ShapeDtypeStruct((1, self.plan.max_new_tokens), jnp.int32)

        @jax.jit
        def function(params: Params, requests: loop.Requests, tokens: Any) -> Any:
            return score(self.plan.sampler, params, with_keys(requests), tokens)

        shapes = self.plan.requests(1, self.width), tokens
        if self.mesh is not None:
            at = NamedSharding(self.mesh, P())
            shapes = placed_as(shapes, jax.tree.map(lambda _: at, shapes))
        lowered = function.lower(self.params, *shapes)
        self.compiled = lowered.compile(compiler_options(lowered))

    def __call__(self, request: Request, tokens: list[int]) -> TokenScores:
        """Scores the `tokens` that a request wrote."""
        if self.compiled is None:
            self.precompile()
        padded = np.zeros((1, self.plan.max_new_tokens), np.int32)
        padded[0, : len(tokens)] = tokens
        read = whole_on(self.mesh, (arguments(self.plan, [request], self.width, 0), padded))
        scores = fetched(self.compiled(self.params, *read))
        return TokenScores._make(x[0, : len(tokens)] for x in scores)
