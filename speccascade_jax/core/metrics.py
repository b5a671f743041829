"""Counters of speculative decoding, the rates made of them, and the identities they obey."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

Array = jax.Array


class Counters(NamedTuple):
    """Sums over a row's rounds (SPEC section 7). Tokens cut off by the end of the text are
    neither emitted nor accepted."""

    rounds: Int[Array, " B"]       # = verifier calls
    drafted: Int[Array, " B"]
    accepted: Int[Array, " B"]
    deferred: Int[Array, " B"]     # drafted positions at which the rule deferred
    emitted: Int[Array, " B"]
    histogram: Int[Array, "B G+1"]  # rounds by number of accepted tokens

    @classmethod
    def of_round(cls, active: Bool[Array, " B"], block_size: int, accepted: Int[Array, " B"],
                 emitted: Int[Array, " B"], deferred: Int[Array, " B"]) -> "Counters":
        """One round's counts; rows that rest count nothing."""
        one = active.astype(jnp.int32)
        return cls(one, one * block_size, one * accepted, one * deferred, one * emitted,
                   one[:, None] * jax.nn.one_hot(accepted, block_size + 1, dtype=jnp.int32))


class Tally(NamedTuple):
    """What a baseline counts, sums over a row's rounds (baselines)."""

    drafter_passes: Int[Array, " B"]
    rounds: Int[Array, " B"]    # = verifier calls
    drafted: Int[Array, " B"]   # positions for which the drafter was asked to write
    accepted: Int[Array, " B"]  # of them, those that keep its token
    deferred: Int[Array, " B"]  # times the drafter was not trusted
    emitted: Int[Array, " B"]


def check_identities(counters: Counters) -> None:
    """Raises AssertionError unless sum(histogram) = rounds, sum(i * histogram[i]) = accepted and
    emitted = accepted + rounds, less one where a row's last round was cut inside its draft."""
    c = jax.tree.map(np.asarray, counters)
    weights = np.arange(c.histogram.shape[-1])
    assert (c.histogram.sum(-1) == c.rounds).all(), "the histogram does not sum to the rounds"
    assert (c.histogram @ weights == c.accepted).all(), "the histogram does not weigh to the accepted"
    missing = c.accepted + c.rounds - c.emitted
    assert ((missing == 0) | (missing == 1)).all(), "emitted is not accepted + rounds"


def check_tally(tally: Tally) -> None:
    """Raises AssertionError unless every row has emitted = accepted + rounds, less one where the
    verifier found nothing to add to a finished text; or both models gave every token (the oracle)."""
    t = jax.tree.map(np.asarray, tally)
    missing = t.accepted + t.rounds - t.emitted
    both = (t.rounds == t.emitted) & (t.drafter_passes == t.emitted) & (t.accepted + t.deferred == t.emitted)
    assert ((missing == 0) | (missing == 1) | both).all(), "emitted is not accepted + rounds"
    assert ((t.accepted <= t.drafted) & (t.drafted <= t.drafter_passes)).all(), "more accepted than drafted"


def check_counts(rows: list[dict[str, Any]], lengths: list[int]) -> None:
    """The identities of every row's counts (text.row_counts) and its number of tokens; AssertionError
    where one does not hold. Rows of empty inputs have no counts."""
    counted = [(row, size) for row, size in zip(rows, lengths, strict=True) if row]
    for row, size in counted:
        assert size == row.get("emitted", row.get("model_passes")), "the tokens are not those counted"
    rounds = [row for row, _ in counted if "histogram" in row]
    tallies = [row for row, _ in counted if "emitted" in row and "histogram" not in row]
    if rounds:
        check_identities(Counters(*_columns(rounds, Counters._fields)))
    if tallies:
        check_tally(Tally(*_columns(tallies, Tally._fields)))


def _columns(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[Any]:
    return [np.array([row[name] for row in rows]) for name in names]


def summarize(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Ratios of sums over `rows`, dicts of a row's counts; None where nothing was counted."""
    def ratio(a: str, b: str) -> float | None:
        below = sum(row.get(b, 0) for row in rows)
        return sum(row.get(a, 0) for row in rows) / below if below else None

    return {"acceptance_rate": ratio("accepted", "drafted"),
            "tokens_per_verifier_call": ratio("emitted", "rounds"),
            "deferral_rate": ratio("deferred", "drafted")}


def position_acceptance(origins: list[list[str]]) -> float:
    """accepted / tested drafted positions, from who wrote each row's tokens: the `a` of SPEC
    section 6. (acceptance_rate also divides by the drafts after a rejection or the end.)"""
    accepted = sum(origin.count("draft") for origin in origins)
    return accepted / max(accepted + sum(origin.count("correction") for origin in origins), 1)


def expected_tokens_per_call(acceptance: Float[np.ndarray, "..."] | float, block_size: int) -> Any:
    """(1 - a^(gamma+1)) / (1 - a): tokens per verifier call with independent acceptance a."""
    a = np.asarray(acceptance, np.float64)
    return np.sum([a**i for i in range(block_size + 1)], axis=0)


def relative_cost(acceptance: float, block_size: int, step_ratio: float, overhead: float = 0.0) -> float:
    """Predicted time per token relative to the verifier alone (SPEC section 6).

    step_ratio: drafter step / verifier step; overhead: everything else a round costs beyond one
    verifier step, in verifier steps.
    """
    cost = (block_size + 1) * step_ratio + 1.0 + overhead
    return float(cost / expected_tokens_per_call(acceptance, block_size))
