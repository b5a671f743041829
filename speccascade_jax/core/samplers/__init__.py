"""Samplers, which emit tokens together with the distribution that each was drawn from.

So any sampler can draft for a larger model, and a hierarchy is a fold. Between steps every cache, at every
level, covers all committed tokens except the last one; positions from a cache's `length` on are scratch. The
only exception is a skipped bonus pass (`Speculative.spares`), after which the caches below lag `behind`.
"""

from speccascade_jax.core.samplers.adaptive import Adaptive
from speccascade_jax.core.samplers.autoregressive import Autoregressive
from speccascade_jax.core.samplers.speculative import HandOver, Speculative, hierarchy

__all__ = ["Adaptive", "Autoregressive", "HandOver", "Speculative", "hierarchy"]
