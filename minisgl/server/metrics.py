"""GET /metrics: the server's counters as Prometheus reads them. docs/metrics.md says what each means, and is checked against this.

All series exist from the start and none is ever added: no label holds anything that a client sends. Knows the counters and no process.
Called by the app.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.message import Histogram
from minisgl.server.request_counts import RequestCounts

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "minisgl:"


class Metrics(Collector):
    """What `counts` says, under the names that dashboards know. All series have the label `model_name`."""

    def __init__(self, counts: RequestCounts, model_name: str) -> None:
        self._counts = counts
        self._model_name = model_name

    def routes(self) -> list[Route]:
        """For the application."""
        return [Route("/metrics", self.metrics)]

    async def metrics(self, _: Request) -> Response:
        """All series, as text."""
        return Response(generate_latest(self), headers={"Content-Type": CONTENT_TYPE})

    def collect(self) -> Iterator[Metric]:
        """As the base class."""
        counts, scheduler = self._counts, self._counts.scheduler
        ended = counts.num_ended
        yield self._gauge("num_requests_running", "requests that are being computed", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "requests in the queue", scheduler.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "share of the KV pool that requests use, 1 is all", scheduler.pool_usage)
        yield self._counter("num_preemptions", "retractions: a request gave its pages back", scheduler.num_retractions)
        yield self._counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache", scheduler.num_queried_tokens)
        yield self._counter("prefix_cache_hits", "prompt tokens that the prefix cache supplied", scheduler.num_hit_tokens)
        yield self._counter("prompt_tokens", "prompt tokens of requests that began to answer", counts.num_prompt_tokens)
        yield self._counter("generation_tokens", "tokens of answers", counts.num_generated_tokens)
        success = {reason: ended[reason] for reason in ("stop", "length")}
        yield self._counters("request_success", "requests that ended as they should", "finished_reason", success)
        yield self._counter("num_aborted_requests", "accepted requests that were aborted or whose client left", ended["abort"])
        yield self._counter("num_failed_requests", "accepted requests that ended with an error", ended["error"])
        yield self._histogram("time_to_first_token_seconds", "from the request to its first token", {"": counts.first_token_times})
        yield self._histogram("inter_token_latency_seconds", "between two arrivals of tokens", {"": counts.gap_times})
        yield self._histogram("e2e_request_latency_seconds", "from the request to its end", {"": counts.request_times})
        yield self._histogram("request_queue_time_seconds", "in the scheduler's queue", {"": scheduler.queue_times})
        steps = {"prefill": scheduler.prefill_times, "decode": scheduler.decode_times}
        yield self._histogram("step_time_seconds", "a turn of the scheduler, by the kind of step", steps, "kind")

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for own, value in values.items():
            family.add_metric([self._model_name, own], value)
        return family

    def _histogram(self, name: str, text: str, values: dict[str, Histogram], label: str = "") -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name", label] if label else ["model_name"])
        for own, value in values.items():
            bounds = [*map(str, value.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric([self._model_name, own] if label else [self._model_name], buckets, value.total)
        return family
