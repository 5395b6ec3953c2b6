"""GET /metrics: exact counts at rest, a fixed set of series, and the documents that name them."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import SamplingParams
from minisgl.message import AbortBackendMsg, Histogram, SchedulerStats, StatsMsg, UserMsg, UserReply
from minisgl.processes.served_scheduler import ServedScheduler
from minisgl.scheduler.config import SchedulerConfig
from minisgl.server.metrics import Metrics
from minisgl.server.request_counts import Course, RequestCounts
from minisgl.utils.heartbeat import Heart, make_heartbeat_file
from tests.scheduler.fake_engine import LIMITS, FakeEngine
from tests.server.local_server import MODEL, WAIT, local_server
from tests.server.server_process import server_process, wait_until, write_byte_model
from tests.tools.markdown import table_rows

ROOT = Path(__file__).resolve().parents[2]


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(text):
    """(name without the prefix, labels but the model's) -> value; every sample names the model."""
    found = {}
    for family in families(text).values():
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name")
            assert sample.name.startswith("minisgl:")
            key = (sample.name.removeprefix("minisgl:"), *(f"{name}={value}" for name, value in sorted(labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def scrape(server):
    response = server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert f'model_name="{MODEL}"' in response.text
    return samples(response.text)


@pytest.fixture
def fresh_server():
    with local_server() as server:
        yield server


def answer(server, text, reason, num_tokens, **body):
    """One whole answer of `num_tokens` tokens, the last of them with the ending."""
    future = server.start_chat(content=text, **body)
    uid = server.scheduler.hear_request().uid
    server.scheduler.say(uid, "a" * (num_tokens - 1))
    server.scheduler.end(uid, reason, token=256 if reason == "stop" else ord("z"))
    return future.result(WAIT)


def test_counts_are_exact_after_a_few_requests(fresh_server):
    server = fresh_server
    names_before = scrape(server).keys()
    for text, reason, num_tokens in [("hello", "stop", 3), ("hi", "length", 4), ("x", "length", 1)]:
        assert answer(server, text, reason, num_tokens).status_code == 200
    found = scrape(server)
    assert found.keys() == names_before
    assert found["request_success_total", "finished_reason=stop"] == 1
    assert found["request_success_total", "finished_reason=length"] == 2
    assert found["num_aborted_requests_total",] == found["num_failed_requests_total",] == 0
    assert (found["prompt_tokens_total",], found["generation_tokens_total",]) == (8, 8)
    assert found["time_to_first_token_seconds_count",] == found["e2e_request_latency_seconds_count",] == 3
    assert found["inter_token_latency_seconds_count",] == 2 + 3
    assert 0 < found["inter_token_latency_seconds_sum",] < found["e2e_request_latency_seconds_sum",] < 3 * WAIT


def test_who_leaves_or_is_aborted_is_counted_once_and_an_error_is_a_failure(fresh_server):
    server = fresh_server
    with server.stream_chat(content="left") as stream:
        uid = server.scheduler.hear_request().uid
        server.scheduler.say(uid, "a")
        next(line for line in stream.iter_lines() if '"a"' in line)
    assert server.scheduler.hear_abort() == uid
    with server.stream_chat(content="asked") as stream:
        uid = server.scheduler.hear_request().uid
        lines = stream.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        assert server.client.post("/abort", json={"id": name}).json() == {"aborted": 1}
        assert server.scheduler.hear_abort() == uid
        assert any("[DONE]" in line for line in lines)
    future = server.start_chat(content="broken")
    server.scheduler.end(server.scheduler.hear_request().uid, "error", error="no page left")
    assert future.result(WAIT).status_code == 500
    assert server.chat(content="long" * 100).status_code == 400  # refused: no request
    found = scrape(server)
    assert (found["num_aborted_requests_total",], found["num_failed_requests_total",]) == (2, 1)
    assert found["request_success_total", "finished_reason=stop"] == found["request_success_total", "finished_reason=length"] == 0
    assert found["e2e_request_latency_seconds_count",] == 0
    assert (found["prompt_tokens_total",], found["generation_tokens_total",]) == (4, 1)  # of the one that began


def test_each_choice_is_a_request_and_what_generates_nothing_is_none(fresh_server):
    server = fresh_server
    assert server.client.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    assert server.client.post("/detokenize", json={"tokens": [97, 98]}).json() == {"text": "ab"}
    future = server.start_chat(content="two", n=2)
    uids = [server.scheduler.hear_request().uid for _ in range(2)]
    for uid in uids:
        server.scheduler.end(uid, "length", token=ord("z"))
    assert future.result(WAIT).json()["usage"]["prompt_tokens"] == 3
    found = scrape(server)
    assert found["request_success_total", "finished_reason=length"] == 2
    assert (found["prompt_tokens_total",], found["generation_tokens_total",]) == (6, 2)


def stats(work_s, **numbers):
    made = SchedulerStats(**numbers)
    made.prefill_times.add(work_s / 2)
    made.decode_times.add(work_s / 2)
    return made


def test_the_schedulers_numbers_are_shown_as_it_said_them_last(fresh_server):
    server = fresh_server
    sent = stats(0.08, num_running=3, num_waiting=2, pool_usage=0.25, num_retractions=4, num_queried_tokens=100, num_hit_tokens=60)
    sent.queue_times.add(0.5)
    sent.queue_times.add(1e9)
    server.scheduler.send(StatsMsg(sent))
    assert wait_until(lambda: scrape(server)["num_requests_running",] == 3)
    found = scrape(server)
    assert (found["num_requests_waiting",], found["kv_cache_usage_perc",], found["num_preemptions_total",]) == (2, 0.25, 4)
    assert (found["prefix_cache_queries_total",], found["prefix_cache_hits_total",]) == (100, 60)
    buckets = [found["request_queue_time_seconds_bucket", f"le={bound}"] for bound in ("0.25", "0.5", "300.0", "+Inf")]
    assert buckets == [0, 1, 1, 2]
    for kind in ("prefill", "decode"):
        assert found["step_time_seconds_count", f"kind={kind}"] == 1
        assert found["step_time_seconds_sum", f"kind={kind}"] == pytest.approx(0.04)
        assert found["step_time_seconds_bucket", f"kind={kind}", "le=0.025"] == 0
        assert found["step_time_seconds_bucket", f"kind={kind}", "le=0.05"] == 1


def test_a_line_in_the_log_for_every_ten_seconds_of_work_and_none_when_idle(caplog):
    caplog.set_level(logging.INFO, logger="minisgl.server.request_counts")
    counts, course = RequestCounts(), Course()
    counts.note(course, UserReply(1, "accepted", num_prompt_tokens=50), 0.0)
    counts.note(course, UserReply(1, "delta", text="a", num_completion_tokens=25), 1.0)
    for _ in range(3):
        counts.take_scheduler(stats(9.5))  # idle: work does not grow
    assert not caplog.records
    counts.take_scheduler(stats(12.5, num_running=1, num_waiting=2, pool_usage=0.125, num_queried_tokens=50, num_hit_tokens=20))
    counts.take_scheduler(stats(20.0, num_queried_tokens=50, num_hit_tokens=20))
    assert [record.getMessage() for record in caplog.records] == [
        "12.5 s of work: 4.0 tokens/s in, 2.0 tokens/s out; now 1 running, 2 waiting, 12.5 % of the pool in use; "
        "40.0 % of the prompts' tokens were cached"
    ]
    counts.take_scheduler(stats(22.5))
    assert len(caplog.records) == 2


def test_a_duration_on_a_bound_belongs_below_it():
    times = Histogram.of(1.0, 2.0)
    for seconds in (0.0, 1.0, 1.5, 2.0, 2.5):
        times.add(seconds)
    assert (times.counts, times.total) == ([2, 2, 1], 7.0)


def test_text_survives_a_model_name_with_quotes_and_lines():
    name = 'a"b\\c\nd'
    for family in families(generate_latest(Metrics(RequestCounts(), name)).decode()).values():
        assert all(sample.labels["model_name"] == name for sample in family.samples)


# ---- the scheduler's side ---------------------------------------------------------------------------------------------------------


class CountingScheduler(ServedScheduler):
    """Both ends of the transport: hears what is in `heard`, one list a call, and keeps the numbers that it sends."""

    def __init__(self, limits=LIMITS, **settings):
        descriptor = make_heartbeat_file(1)
        self.heard, self.sent = [], []
        config = SchedulerConfig(model_path="unused", offline_mode=True, **settings)
        super().__init__(config, FakeEngine(limits), Heart(descriptor, 0))
        os.close(descriptor)

    def offline_receive_msg(self, blocking=False):
        return self.heard.pop(0) if self.heard else []

    def offline_send_result(self, reply):
        if isinstance(reply, StatsMsg):
            self.sent.append(msgspec.convert(msgspec.to_builtins(reply.stats), SchedulerStats))  # a copy, as by wire

    def finish(self):
        self.run_step()
        while not self.is_idle:
            self.run_step()
        self.run_step()  # says the numbers before it waits


def user(uid, prompt, num_tokens):
    return UserMsg(uid, np.array(prompt, dtype=np.int32), SamplingParams(max_tokens=num_tokens, ignore_eos=True))


def count_of(times):
    return sum(times.counts)


def test_the_scheduler_counts_what_it_did_and_not_its_trial():
    scheduler = CountingScheduler()
    scheduler.try_out()
    assert scheduler.sent == []
    prompt = list(range(1, 17))
    scheduler.heard = [[user(1, prompt, 5)]]
    scheduler.finish()
    scheduler.heard = [[user(2, prompt, 5)]]
    scheduler.finish()
    first, last = scheduler.sent[0], scheduler.sent[-1]
    assert (first.num_queried_tokens, count_of(first.decode_times)) == (0, 0)
    assert (last.num_running, last.num_waiting, last.pool_usage, last.num_retractions) == (0, 0, 0.0, 0)
    assert (last.num_queried_tokens, last.num_hit_tokens) == (32, 12)  # whole pages of 4, and one token is left to compute
    assert count_of(last.queue_times) == 2
    assert (count_of(last.prefill_times), count_of(last.decode_times)) == (2, 8)
    assert len(scheduler.sent) < 10  # of ten steps: one a second, and one before each wait


def test_a_request_that_is_refused_or_aborted_in_the_queue_has_no_time_in_it():
    scheduler = CountingScheduler()
    refused = user(1, [LIMITS.vocab_size], 1)
    scheduler.heard = [[refused, user(2, [1], 1), AbortBackendMsg(2), user(3, [1], 2)]]
    scheduler.finish()
    assert count_of(scheduler.sent[-1].queue_times) == 1
    assert scheduler.sent[-1].num_queried_tokens == 1


def test_where_pages_are_short_retractions_are_counted_and_the_queue_once():
    scheduler = CountingScheduler(replace(LIMITS, num_pages=20), reserve_tokens=4)
    scheduler.heard = [[user(uid, [uid] * 8, 30) for uid in range(1, 5)]]
    scheduler.finish()
    last = scheduler.sent[-1]
    assert last.num_retractions == scheduler.num_retractions > 0
    assert (count_of(last.queue_times), last.num_queried_tokens) == (4, 32)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_whole_server_tells_exact_numbers_at_rest(ranks, tmp_path):
    model = write_byte_model(tmp_path / "bytes")
    body = {"prompt": "The same beginning, twice.", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    with server_process(model, scheduler="tests.server.fake_engine_process", options={"tp": ranks}) as server:
        server.wait_until_ready()
        for _ in range(2):
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200

        def read():
            return samples(httpx.get(f"{server.url}/metrics").text)

        num_prompt = len(body["prompt"])
        assert wait_until(lambda: read()["step_time_seconds_count", "kind=decode"] == 10)
        found = read()
        assert found["prefix_cache_queries_total",] == found["prompt_tokens_total",] == 2 * num_prompt
        assert found["prefix_cache_hits_total",] == (num_prompt - 1) // 4 * 4
        assert found["generation_tokens_total",] == 12
        assert found["request_queue_time_seconds_count",] == found["request_success_total", "finished_reason=length"] == 2
        assert found["num_requests_running",] == found["num_requests_waiting",] == found["kv_cache_usage_perc",] == 0


# ---- the documents ----------------------------------------------------------------------------------------------------------------


def test_the_table_in_the_docs_is_what_is_exported():
    rows = table_rows((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), "metric")
    documented = {}
    for name, kind, labels, _ in rows:
        documented[name.strip("`")] = (kind, tuple(re.findall(r"`(\w+)`", labels)))
    exported = {}
    for family in Metrics(RequestCounts(), MODEL).collect():
        own = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        exported[family.name + ("_total" if family.type == "counter" else "")] = (family.type, tuple(own))
    assert documented == exported


def test_every_expression_of_the_dashboard_names_series_that_exist():
    dashboard = json.loads((ROOT / "docs" / "grafana" / "minisgl.json").read_text(encoding="utf-8"))
    exist = {f"minisgl:{key[0]}" for key in samples(generate_latest(Metrics(RequestCounts(), MODEL)).decode())}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(expressions) > 10
    used = set()
    for expression in expressions:
        named = set(re.findall(r"minisgl:\w+", expression))
        assert named, expression
        used |= named
    assert used <= exist
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert shown == {re.sub(r"_(bucket|sum|count)$", "", name) for name in exist}  # nothing is left out


def test_the_dashboards_panels_have_their_own_places():
    dashboard = json.loads((ROOT / "docs" / "grafana" / "minisgl.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels for target in panel["targets"])
