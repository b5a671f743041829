"""Prometheus metrics, under vLLM's names where they fit, so that dashboards made for it work."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from speccascade_jax.scheduling.blocks import Blocks
from speccascade_jax.scheduling.prefixes import PrefixCache
from speccascade_jax.scheduling.scheduler import Result
from speccascade_jax.serving.engine import Job, Update

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Load(NamedTuple):
    """A model's requests and prefix cache."""

    model: str
    running: int
    waiting: int
    prefixes: PrefixCache | None
    blocks: Sequence[Blocks] = ()  # of its batches whose block size follows the load


class Metrics:
    """The server's counters, in their own registry."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(name, about, ("model_name",), registry=self.registry, buckets=SECONDS)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, ("model_name", *labels), registry=self.registry)

        self.running = gauge("vllm:num_requests_running", "Requests being decoded.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests waiting for a row.")
        self.first = histogram(
            "vllm:time_to_first_token_seconds", "Seconds from arrival to the first tokens."
        )
        self.between = histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between tokens: the time between deliveries, per token.",
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Seconds from arrival to the end.")
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens read.")
        self.queried = counter(
            "vllm:prefix_cache_queries", "Prompt tokens read or found in the prefix cache."
        )
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.kept = gauge("speccascade:prefix_cache_bytes", "Bytes in the prefix cache, per device.")
        self.evicted = counter(
            "speccascade:prefix_cache_evictions", "Segments evicted from the prefix cache."
        )
        self.evictions: dict[str, int] = {}  # by model, as of the last text()
        self.generated = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter("vllm:request_success", "Requests that finished.", "finished_reason")
        self.block_size = gauge("speccascade:block_size", "The block size chosen for the current load.")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Verified drafts, one per round.")
        self.drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.positions = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted at least up to this position, counted from 0.",
            "position",
        )
        self.calls = counter("speccascade:verifier_calls", "Calls of the verifier, by method.", "method")
        self.by_method = {
            name: counter(f"speccascade:{name}_tokens", about, "method")
            for name, about in (
                ("drafted", "Tokens drafted, by method."),
                ("accepted", "Drafted tokens accepted, by method."),
                ("deferred", "Drafted positions at which the rule deferred to the verifier, by method."),
                ("emitted", "Tokens generated, by method."),
            )
        }
        self.rate = gauge(
            "speccascade:deferral_rate", "Deferred / drafted since the start, by method.", "method"
        )
        self.refused = Counter(
            "speccascade:requests_refused",
            "Requests answered with an error, by status.",
            ("status",),
            registry=self.registry,
        )
        self.cancelled = counter(
            "speccascade:requests_cancelled", "Requests whose client left or whose time ran out."
        )
        self.deferrals: dict[tuple[str, str], list[int]] = {}  # (model, method) -> deferred, drafted

    def heard(self, job: Job, update: Update) -> None:
        """Counts a job's update before it is delivered."""
        model = job.lane.model
        if update.fresh:
            if update.result is not None and update.fresh == len(update.result.tokens):
                self.first.labels(model).observe(update.gap)
            else:
                self.between.labels(model).observe(update.gap / update.fresh)
            self.generated.labels(model).inc(update.fresh)
        if update.finished:
            self.success.labels(model, job.reason(update)).inc()
            self.whole.labels(model).observe(time.monotonic() - job.came)
            self.prompt.labels(model).inc(len(job.request.tokens))
            self.queried.labels(model).inc(len(job.request.tokens))
            self.hits.labels(model).inc(job.cached)
            if update.result is not None:
                self._count(model, job, update.result)

    def _count(self, model: str, job: Job, result: Result) -> None:
        counts, method = result.counts, job.request.settings.name
        rounds = counts.get("rounds", counts.get("model_passes", 0))
        self.calls.labels(model, method).inc(rounds)
        for name, total in self.by_method.items():
            total.labels(model, method).inc(len(result.tokens) if name == "emitted" else counts.get(name, 0))
        if "histogram" not in counts:
            return
        self.drafts.labels(model).inc(rounds)
        self.drafted.labels(model).inc(counts["drafted"])
        self.accepted.labels(model).inc(counts["accepted"])
        for position in range(len(counts["histogram"]) - 1):
            self.positions.labels(model, str(position)).inc(sum(counts["histogram"][position + 1 :]))
        sums = self.deferrals.setdefault((model, method), [0, 0])
        sums[0] += counts["deferred"]
        sums[1] += counts["drafted"]
        if sums[1]:
            self.rate.labels(model, method).set(sums[0] / sums[1])

    def text(self, loads: Iterable[Load]) -> bytes:
        """All metrics in Prometheus' text format."""
        for model, running, waiting, prefixes, blocks in loads:
            self.running.labels(model).set(running)
            self.waiting.labels(model).set(waiting)
            if prefixes is not None:
                evictions, before = prefixes.evictions, self.evictions.get(model, 0)
                self.kept.labels(model).set(prefixes.bytes)
                self.evicted.labels(model).inc(evictions - before)
                self.evictions[model] = evictions
            for chosen in blocks:
                self.block_size.labels(model).set(chosen.size)
        return generate_latest(self.registry)
