"""How a text is decoded: what a person may choose, spelt once."""

import dataclasses
import math

from speccascade_jax.baselines import BASELINES, Baseline
from speccascade_jax.core.methods import METHODS, SINGLE_MODEL, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How one text is decoded. Configs extend it, flags are its fields, `Cascade.generate` takes it."""

    method: str | Method = "speculative"  # a rule or baseline of --list, or verifier / drafter alone
    alpha: float = 0.0             # lenience: larger defers less and is cheaper
    block_size: int = 5            # gamma, the tokens drafted per verifier call
    temperature: float = 0.0       # 0 is greedy
    top_k: int | None = None       # sample among the k likeliest tokens
    top_p: float | None = None     # sample among the likeliest tokens that reach this mass
    min_p: float | None = None     # sample among tokens at least this share as likely as the likeliest
    seed: int = 0                  # with an input's number it fixes the output, whatever the batch
    max_new_tokens: int | None = None  # the end-of-sequence token included; None: the cascade's limit
    stop: tuple[str, ...] = ()     # pieces or texts that end an output, besides the end of the sequence

    @property
    def name(self) -> str:
        """The method's name; that of a Method object which METHODS does not hold is `custom`."""
        if isinstance(self.method, str):
            return self.method
        return next((name for name, method in METHODS.items() if method is self.method), "custom")

    def check(self, vocab_size: int) -> None:
        """Raises ValueError for an unknown method or a value out of its range."""
        known: dict[str, Method | Baseline] = {**METHODS, **BASELINES}
        method = known.get(self.method) if isinstance(self.method, str) else self.method
        if method is None and self.method not in SINGLE_MODEL:
            raise ValueError(f"unknown method {self.method!r}; known: {', '.join([*known, *SINGLE_MODEL])}.")
        if not isinstance(method, Method | Baseline | None):
            raise ValueError(f"method is {self.method!r}; give a name or a speccascade_jax.Method.")
        if method is not None and not method.low <= self.alpha <= method.high:
            raise ValueError(f"alpha is {self.alpha}; for {self.name} it lies in "
                             f"[{method.low}, {method.high}].")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0 (0 is greedy).")
        if isinstance(method, Baseline) and method.greedy and self.temperature != 0:
            raise ValueError(f"temperature is {self.temperature}; {self.name} decodes greedily: make it 0, "
                             "or take bild_star.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it lies in (0, 1].")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it lies in [0, 1].")
        if self.top_k is not None and not 1 <= self.top_k <= vocab_size:
            raise ValueError(f"top_k is {self.top_k}; it lies in [1, {vocab_size}].")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1.")
        if not -2**63 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it lies in [-2**63, 2**63).")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is {self.stop!r}; give a tuple of texts, such as ({self.stop!r},).")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which ends every output: leave it out.")
