"""A sweep's results, made by hand."""

from speccascade_jax.evaluation.reductions import Comparison, Time
from speccascade_jax.settings import Settings


def result(method, alpha, quality, latency, block_size=5, temperature=1.0, **point):
    """The models alone have a block size of 1."""
    point = Settings(method=method, alpha=alpha, block_size=block_size, temperature=temperature, **point)
    rates = (None, None) if method in ("verifier", "drafter") else (latency / 2, latency / 3)
    return Comparison(
        point,
        quality,
        (quality - 32, quality - 28),
        (quality - 22, quality - 18),
        *rates,
        latency / 4,
        Time(latency, (latency - 0.05, latency + 0.05), latency),
    )


FOUND = [
    result("verifier", 0.0, 30.0, 1.0, 1),
    result("drafter", 0.0, 20.0, 0.1, 1),
    result("opt", 0.0, 30.0, 0.9),
    result("opt", 0.3, 31.0, 0.6),
    result("opt", 0.9, 24.0, 0.3),
    result("opt", 1.0, 33.0, 1.1),
    result("chow", 0.5, 29.0, 0.8),
    result("chow", 0.9, 22.0, 0.4),
]
