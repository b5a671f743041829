"""What --method may name: a deferral rule, a baseline, or one model alone; and which values fit it."""

from speccascade_jax.baselines import BASELINES, Baseline
from speccascade_jax.rules import METHODS, Method
from speccascade_jax.typing import SamplingOptions

SINGLE_MODEL = {"verifier": "the large model alone", "drafter": "the small model alone"}


def check_sampling(method: str, alpha: float, block_size: int, options: SamplingOptions,
                   vocab_size: int) -> None:
    """Raises ValueError for an unknown method or a value out of its range."""
    known: dict[str, Method | Baseline] = {**METHODS, **BASELINES}
    if method not in known and method not in SINGLE_MODEL:
        raise ValueError(f"unknown method {method!r}; known: {', '.join([*known, *SINGLE_MODEL])}.")
    if method in known and not known[method].low <= alpha <= known[method].high:
        raise ValueError(f"alpha is {alpha}; for {method} it lies in "
                         f"[{known[method].low}, {known[method].high}].")
    if method in BASELINES and BASELINES[method].greedy and options.temperature != 0:
        raise ValueError(f"temperature is {options.temperature}; {method} decodes greedily: make it 0, or "
                         "take bild_star.")
    if not 0 <= options.temperature < float("inf"):
        raise ValueError(f"temperature is {options.temperature}; it must be at least 0 (0 is greedy).")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ValueError(f"top_p is {options.top_p}; it lies in (0, 1].")
    if options.top_k is not None and not 1 <= options.top_k <= vocab_size:
        raise ValueError(f"top_k is {options.top_k}; it lies in [1, {vocab_size}].")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1.")
