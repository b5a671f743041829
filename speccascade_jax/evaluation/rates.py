"""Rates computed from counts, and checks of identities between counts."""

from typing import Any

import numpy as np

from speccascade_jax.baselines.tally import Tally
from speccascade_jax.core.counters import Counters
from speccascade_jax.planning.prediction import expected_tokens


def check_identities(counters: Counters) -> None:
    """Raises ValueError unless sum(histogram) = rounds, sum(i * histogram[i]) = accepted and emitted =
    accepted + rounds, or one less if a row's last round ended inside its draft."""
    c: Any = Counters._make(map(np.asarray, counters))
    weights = np.arange(c.histogram.shape[-1])
    _must_hold(c.histogram.sum(-1) == c.rounds, "the histogram does not sum to the rounds")
    _must_hold(c.histogram @ weights == c.accepted, "the histogram does not weigh to the accepted")
    missing = c.accepted + c.rounds - c.emitted
    _must_hold((missing == 0) | (missing == 1), "emitted is not accepted + rounds")


def check_tally(tally: Tally) -> None:
    """Raises ValueError unless every row has emitted = accepted + rounds, or one less if the verifier had
    nothing to add to a finished text, or unless both models were called for every token (the oracle)."""
    t: Any = Tally._make(map(np.asarray, tally))
    missing = t.accepted + t.rounds - t.emitted
    both = (t.rounds == t.emitted) & (t.drafter_passes == t.emitted) & (t.accepted + t.deferred == t.emitted)
    _must_hold((missing == 0) | (missing == 1) | both, "emitted is not accepted + rounds")
    _must_hold((t.accepted <= t.drafted) & (t.drafted <= t.drafter_passes), "more accepted than drafted")


def check_counts(rows: list[dict[str, Any]], lengths: list[int], stopped: bool = False) -> None:
    """Raises ValueError if an identity of a row's counts (Output.counts) does not hold, or if its number of
    tokens differs from the counts; with stop sequences (`stopped`) it may have fewer tokens. Rows of empty
    inputs have no counts. Other counts of a sampler have no known identities."""
    for row, size in zip(rows, lengths, strict=True):
        said = row.get("emitted", row.get("model_passes"))
        if said is not None:
            _must_hold(
                np.array(size <= said if stopped else size == said), "the tokens are not those counted"
            )
    rounds = [row for row in rows if row.keys() >= {*Counters._fields}]
    tallies = [row for row in rows if row.keys() >= {*Tally._fields} and row not in rounds]
    if rounds:
        check_identities(Counters(*_columns(rounds, Counters._fields)))
    if tallies:
        check_tally(Tally(*_columns(tallies, Tally._fields)))


def _must_hold(identity: np.ndarray, otherwise: str) -> None:
    if not identity.all():
        raise ValueError(
            f"the counts do not fit each other: {otherwise}. This is a fault of the decoder; "
            "please report it with the command."
        )


def _columns(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[Any]:
    return [np.array([row[name] for row in rows]) for name in names]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of sums over `rows`, which are dicts of counts; None if nothing was counted. For a hierarchy,
    also `levels`: each model's passes, and the tokens that it verified and accepted, smallest model first."""

    def ratio(a: str, b: str) -> float | None:
        below = sum(row.get(b, 0) for row in rows)
        return sum(row.get(a, 0) for row in rows) / below if below else None

    rates: dict[str, Any] = {
        "acceptance_rate": ratio("accepted", "drafted"),
        "tokens_per_verifier_call": ratio("emitted", "rounds"),
        "deferral_rate": ratio("deferred", "drafted"),
    }
    hierarchies = [[*row["below"], row] for row in rows if "below" in row]
    if hierarchies:
        rates["levels"] = [
            {
                "passes": sum(level.get("rounds", level.get("passes")) for level in same),
                **{name: sum(level[name] for level in same) for name in ("drafted", "accepted") if n},
            }
            for n, same in enumerate(zip(*hierarchies, strict=True))
        ]
    return rates


def position_acceptance(origins: list[list[str]]) -> float:
    """Accepted / tested drafted positions, from the origins of each row's tokens. (The denominator of
    acceptance_rate also includes drafts after a rejection or the end.)"""
    accepted = sum(origin.count("draft") for origin in origins)
    return accepted / max(accepted + sum(origin.count("correction") for origin in origins), 1)


def relative_cost(acceptance: float, block_size: int, step_ratio: float, overhead: float = 0.0) -> float:
    """Predicted time per token relative to the verifier's.

    step_ratio: drafter step / verifier step. overhead: all other costs of a round beyond one verifier step,
    in verifier steps.
    """
    cost = (block_size + 1) * step_ratio + 1.0 + overhead
    return float(cost / expected_tokens(acceptance, block_size))
