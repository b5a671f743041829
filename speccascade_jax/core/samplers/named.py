"""Samplers with names: SAMPLERS declares each once.

To add one, write its class and its entry here. Flags, the HTTP schema and sweeps derive from the entry.
(Baselines from papers are declared in baselines.)
"""

from speccascade_jax.core.methods import Scheme
from speccascade_jax.core.samplers.autoregressive import Autoregressive


def _alone(name: str, place: int, summary: str) -> Scheme:
    return Scheme(
        lambda models: Autoregressive(models[place]), summary, model=place, verifications=(), name=name
    )


VERIFIER = _alone("verifier", -1, "the large model alone")
DRAFTER = _alone("drafter", 0, "the small model alone")
SAMPLERS: dict[str, Scheme] = {scheme.name: scheme for scheme in (VERIFIER, DRAFTER)}
SINGLE_MODEL = {name: scheme for name, scheme in SAMPLERS.items() if scheme.model is not None}
