"""Prometheus metrics. Counters of the engine are read when scraped; latencies are observed as they happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from m40llm.engine_stats import EngineStats, StepStats
from m40llm.generation import GenerationResult

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

Snapshot = Callable[[], EngineStats | None]


class Metrics:
    """What `GET /metrics` answers. `snapshot` gives the engine's numbers, None while it loads."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, snapshot: Snapshot) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(snapshot))
        ProcessCollector(registry=self._registry)  # process_resident_memory_bytes, process_cpu_seconds_total, … (Linux)
        r = self._registry
        self._requests = Counter("m40llm_requests", "Generations that ended.", ["finish_reason"], registry=r)
        self._responses = Counter("m40llm_http_responses", "HTTP responses.", ["method", "status"], registry=r)
        self._prompt_seconds = Counter("m40llm_prompt_seconds", "Seconds of prefill, over requests.", registry=r)
        self._decode_seconds = Counter("m40llm_generation_seconds", "Seconds of decode, over requests.", registry=r)
        self._cache_hits = Counter(
            "m40llm_cache_hits", "Requests whose prompt began in a slot or the cache.", registry=r
        )
        self._ttft = self._histogram("m40llm_time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._gap = self._histogram("m40llm_inter_token_seconds", "From one token to the next.", _SECONDS)
        self._queued = self._histogram("m40llm_queue_seconds", "From arrival to the first step.", _SECONDS)
        self._step = self._histogram("m40llm_step_seconds", "Time of a step.", _SECONDS)
        self._rows = self._histogram("m40llm_step_rows", "Tokens computed by a step.", _ROWS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def step(self, stats: StepStats) -> None:
        """On the engine's thread, after each step."""
        self._step.observe(stats.seconds)
        self._rows.observe(stats.rows)
        for gap in stats.token_gaps:
            self._gap.observe(gap)

    def request_ended(self, result: GenerationResult, finish_reason: str) -> None:
        timings = result.timings
        self._requests.labels(finish_reason).inc()
        self._prompt_seconds.inc(max(0.0, timings.prefill_s))
        self._decode_seconds.inc(max(0.0, timings.decode_s))
        self._queued.observe(timings.queued_s)
        if result.cached_tokens:
            self._cache_hits.inc()
        if result.generated_tokens:
            self._ttft.observe(timings.queued_s + timings.prefill_s)

    def response(self, method: str, status: int) -> None:
        known = method in ("GET", "POST", "OPTIONS", "HEAD", "DELETE", "PUT", "PATCH")
        self._responses.labels(method if known else "other", str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        if stats is None:
            return
        for name, text, value in (
            ("m40llm_requests_active", "Requests that hold a slot.", stats.active),
            ("m40llm_requests_waiting", "Requests that wait for a slot.", stats.waiting),
            ("m40llm_slots", "Sequences that can run at once.", len(stats.slots)),
        ):
            yield GaugeMetricFamily(name, text, float(value))
        for name, text, total in (
            ("m40llm_steps", "Steps run.", stats.steps),
            ("m40llm_steps_failed", "Steps that failed; their requests did too.", stats.failed_steps),
            ("m40llm_prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("m40llm_cached_prompt_tokens", "Prompt tokens taken from a slot or the cache.", stats.cached_tokens),
            ("m40llm_generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("m40llm_preemptions", "Background requests that gave up a slot.", stats.preemptions),
        ):
            yield CounterMetricFamily(name, text, float(total))
        kv = GaugeMetricFamily("m40llm_kv_bytes", "Bytes of KV cache that hold something.", labels=["tier"])
        kv.add_metric(["slots"], float(stats.kv_bytes_resident))
        kv.add_metric(["ram"], float(stats.cache_ram_bytes))
        kv.add_metric(["disk"], float(stats.cache_disk_bytes))
        yield kv
        yield GaugeMetricFamily("m40llm_kv_bytes_allocated", "Bytes of KV cache on the device.", float(stats.kv_bytes))
