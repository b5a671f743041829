"""How a text is decoded: what a person may choose, spelt once."""

import dataclasses
import functools
import math
from typing import Any, Literal, get_args

from speccascade_jax.baselines import BASELINES, Baseline
from speccascade_jax.core import rules
from speccascade_jax.core.methods import METHODS, SINGLE_MODEL, TRAINED, Method
from speccascade_jax.core.samplers import HandOver
from speccascade_jax.core.samplers.adaptive import STOP_BELOW

MOST_TOKENS = 2**17  # a text's
Vocabulary = Literal["auto", "tli", "union", "slem", "slrs"]
"""How a drafter of another vocabulary than the verifier's drafts for it; auto is tli."""
LOOKAHEAD = "lookahead"
NO_FILE = "method {} is a trained network: give its file with --router; scripts/finetune.py trains one."
ADAPTIVE = "adaptive"  # each text's rounds end where more drafts are not worth their time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How one text is decoded. Configs extend it, flags are its fields, `Cascade.generate` takes it.

    With more than two models, method, alpha and block_size are one value for all verifiers, or a tuple of
    one for each, from the smallest up; "speculative+opt" is a tuple of methods, too.
    """

    method: str | Method | tuple[str | Method, ...] = "speculative"  # of --list, or verifier / drafter alone
    alpha: float | tuple[float, ...] = 0.0   # lenience: larger defers less and is cheaper
    block_size: int | Literal["adaptive"] | tuple[int, ...] = 5  # gamma, the tokens drafted per verifier
                                             # call; adaptive: up to max_block_size
    max_block_size: int = 12       # of adaptive blocks
    stop_below: float = STOP_BELOW  # adaptive drafting stops where the chance that all of the draft stands
                                    # is estimated to fall below this; 0: never, as if blocks were fixed
    acceptance: float = 0.8        # of lookahead: how likely a drafted token is accepted
    round_cost: float = 2.0        # of lookahead: a round's time, in steps of the verifier
    hand_over: HandOver = "need"   # need, truncate, keep: see core.samplers.Speculative; for three models on
    temperature: float = 0.0       # 0 is greedy
    top_k: int | None = None       # sample among the k likeliest tokens
    top_p: float | None = None     # sample among the likeliest tokens that reach this mass
    min_p: float | None = None     # sample among tokens at least this share as likely as the likeliest
    seed: int = 0                  # with an input's number it fixes the output, whatever the batch
    max_new_tokens: int | None = None  # the end-of-sequence token included; None: the cascade's limit
    stop: tuple[str, ...] = ()     # pieces or texts that end an output, besides the end of the sequence

    @property
    def name(self) -> str:
        """The method's name, or those of the levels with a + between them; that of a Method object which
        METHODS does not hold is `custom`."""
        return self.method if isinstance(self.method, str) else "+".join(map(_name, _each(self.method)))

    @property
    def defers(self) -> bool:
        """Whether there are deferrals to count: some method is a deferral rule, or no Method at all."""
        return any(rule is None or rule.defers for rule in self._known)

    @property
    def lossless(self) -> bool:
        """Whether the outputs follow the largest model's distribution, by law."""
        return all(rule is not None and rule.lossless for rule in self._known)

    @property
    def _known(self) -> list[Method | None]:
        """The Method of each level, None for what is none."""
        return [METHODS.get(one) if isinstance(one, str) else one for one in _each(self.method)]

    def of_levels(self, field: str, levels: int) -> tuple[Any, ...]:
        """The value of method, alpha or block_size for each of `levels` verifiers, from the smallest up; none
        for a model by itself.

        Raises ValueError where there are values for another number of them.
        """
        values = _each(getattr(self, field)) if levels else ()
        if levels and len(values) not in (1, levels):
            raise ValueError(f"{field} has {len(values)} values; {levels + 1} models have {levels} "
                             f"verifiers: give one value, or {levels}.")
        return values * levels if len(values) == 1 else values

    @property
    def adaptive(self) -> bool:
        return self.block_size == ADAPTIVE

    @property
    def stops(self) -> float | None:
        """stop_below, of adaptive blocks; those that never stop are fixed ones of max_block_size."""
        return self.stop_below if self.adaptive and self.stop_below > 0 else None

    def block_sizes(self, levels: int) -> tuple[int, ...]:
        """The most tokens that are drafted for each of `levels` verifiers."""
        return dataclasses.replace(self, block_size=self.max_block_size).of_levels(
            "block_size", levels) if self.adaptive else self.of_levels("block_size", levels)

    def rules(self, levels: int) -> tuple[Method, ...]:
        """The Method of each of `levels` verifiers."""
        methods = self.of_levels("method", levels)
        return tuple(self._rule(one) if isinstance(one, str) else one for one in methods)

    def _rule(self, name: str) -> Method:
        return lookahead(self.acceptance, self.round_cost) if name == LOOKAHEAD else METHODS[name]

    def check(self, vocab_size: int, levels: int | None = None) -> None:
        """Raises ValueError for an unknown method or a value out of its range, or values for another number
        of verifiers than `levels`; None: what can be told before models are loaded."""
        fields = ("method", "alpha", "block_size")
        most = levels or max(len(_each(getattr(self, field))) for field in fields)
        for method, alpha, block_size in zip(*(self.of_levels(field, most) for field in fields), strict=True):
            self._check_level(method, alpha, block_size, most if levels is None else levels)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0 (0 is greedy).")
        if self.max_block_size < 1:
            raise ValueError(f"max_block_size is {self.max_block_size}; it must be at least 1.")
        if not 0 <= self.stop_below <= 1:
            raise ValueError(f"stop_below is {self.stop_below}; it is a chance, and lies in [0, 1].")
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance is {self.acceptance}; it is a chance, and lies in [0, 1].")
        if not 0 < self.round_cost < math.inf:
            raise ValueError(f"round_cost is {self.round_cost}; it must be above 0, in verifier steps.")
        if self.hand_over not in get_args(HandOver):
            raise ValueError(f"hand_over is {self.hand_over!r}; known: {', '.join(get_args(HandOver))}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it lies in (0, 1].")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it lies in [0, 1].")
        if self.top_k is not None and not 1 <= self.top_k <= vocab_size:
            raise ValueError(f"top_k is {self.top_k}; it lies in [1, {vocab_size}].")
        if not -2**63 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it lies in [-2**63, 2**63).")
        if self.max_new_tokens is not None and not 1 <= self.max_new_tokens <= MOST_TOKENS:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1, and at most "
                             f"{MOST_TOKENS}: no model's texts are longer.")
        if isinstance(self.stop, str):
            raise ValueError(f"stop is {self.stop!r}; give a tuple of texts, such as ({self.stop!r},).")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which ends every output: leave it out.")

    def _check_level(self, method: Any, alpha: float, block_size: Any, levels: int) -> None:
        known: dict[str, Method | Baseline] = {**METHODS, **BASELINES}
        rule = known.get(method) if isinstance(method, str) else method
        if rule is None and method not in SINGLE_MODEL:
            raise ValueError(f"unknown method {method!r}; known: {', '.join([*known, *SINGLE_MODEL])}.")
        if not isinstance(rule, Method | Baseline | None):
            raise ValueError(f"method is {method!r}; give a name or a speccascade_jax.Method.")
        if not isinstance(rule, Method) and len(_each(self.method)) > 1:
            raise ValueError(f"{method} is no rule for one level of several: it stands alone.")
        if isinstance(rule, Baseline) and levels != 1:
            raise ValueError(f"{method} is made of two models, not of {levels + 1}: take a rule of --list.")
        if isinstance(rule, Method) and levels == 0 and method != "speculative":
            raise ValueError(f"{_name(method)} needs a drafter and a verifier: give two models or more.")
        if rule is not None and not rule.low <= alpha <= rule.high:
            raise ValueError(f"alpha is {alpha}; for {_name(method)} it lies in [{rule.low}, {rule.high}].")
        if isinstance(rule, Baseline) and rule.greedy and self.temperature != 0:
            raise ValueError(f"temperature is {self.temperature}; {method} decodes greedily: make it 0, "
                             "or take bild_star.")
        if isinstance(block_size, str) and (block_size != ADAPTIVE or levels > 1):
            raise ValueError(f"block_size is {block_size!r}; give a number, or of two models {ADAPTIVE!r}.")
        if not isinstance(block_size, str) and block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1.")


@functools.cache
def lookahead(acceptance: float, round_cost: float) -> Method:
    """The rule of this name for a pair of which this was measured; the same object for the same numbers."""
    def target(s: rules.Scores, alpha: rules.Alpha) -> tuple[Any, Any]:
        delta = rules.lookahead(s, alpha, acceptance, round_cost)
        return rules.target_probs(s.q_sampled, s.p_sampled, delta), delta

    return dataclasses.replace(METHODS[LOOKAHEAD], target=target, name=LOOKAHEAD)


def with_router(settings: Settings, router: Method | None) -> Settings:
    """The settings with the trained method where they name it. Raises ValueError where there is none."""
    method = settings.method
    names = tuple(method.split("+")) if isinstance(method, str) else method
    names = names if isinstance(names, tuple) else ()
    asked = [name for name in names if name in TRAINED]
    if not asked:
        return settings
    if router is None:
        raise ValueError(NO_FILE.format(asked[0]))
    if {router.name} != set(asked):
        raise ValueError(f"method is {settings.name}, and the file of --router is of {router.name}: give a "
                         "file of the same method.")
    found = tuple(router if name in TRAINED else name for name in names)
    return dataclasses.replace(settings, method=found if len(found) > 1 else found[0])


def _each(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return tuple(value.split("+"))
    return value if isinstance(value, tuple) else (value,)


def _name(method: str | Method) -> str:
    if isinstance(method, str):
        return method
    return method.name or next((name for name, known in METHODS.items() if known is method), "custom")
