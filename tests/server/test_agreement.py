"""A server whose ranks do not agree ends with the reason, and one that records leaves a file that replays: as whole processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minisgl.replay import replay
from minisgl.scheduler.agreement import steps_path
from tests.server.server_process import END_S, START_S, server_process, started, wait_until, write_byte_model

pytestmark = [pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc"), pytest.mark.timeout(300)]

PROCESS = "tests.server.faulty_rank_process"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20_000, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("byte-model"))


@contextlib.contextmanager
def faulty_server(model_dir, fault, engine="fake", **options):
    with server_process(model_dir, scheduler=PROCESS, options={"tp": 2, **options}, FAULT=fault, ENGINE=engine) as server:
        try:
            yield server
        finally:
            for rank in (0, 1):
                steps_path(server.suffix, rank).unlink(missing_ok=True)


def ask(url, **body):
    return httpx.post(f"{url}/v1/chat/completions", json={**BODY, **body}, timeout=START_S)


def last_words(url):
    """The last event of a stream, which begins while others run."""
    last = ""
    with (
        contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=START_S) as response,
    ):
        for line in response.iter_lines():
            last = line or last
    return json.loads(last.removeprefix("data: "))


def check_token_difference(server):
    """What it said names step, field and both values, which are those of the two files. The step."""
    found = re.search(
        r"rank 1 differs from rank 0 at step (\d+) in: tokens; rank 0 has (\[[^]]*\]), rank 1 has (\[[^]]*\]); "
        r"their last steps stand in (\S+) and (\S+)",
        server.stderr,
    )
    assert found, server.stderr
    step = int(found[1])
    for rank, shown in enumerate(found.groups()[1:3]):
        path = steps_path(server.suffix, rank)
        assert found[4 + rank] == str(path)
        assert path.stat().st_mode & 0o777 == 0o600
        kept = {handled["step"]: handled for handled in json.loads(path.read_text())["steps"]}
        assert str(kept[step]["tokens"]) == shown
    return step


@pytest.mark.parametrize("engine", ["fake", pytest.param("real", marks=pytest.mark.slow)])
def test_another_token_on_one_rank_ends_the_server_with_both_values(engine, byte_model, request):
    model = byte_model if engine == "fake" else request.getfixturevalue("tiny_models")("llama")
    with faulty_server(model, "token:4", engine) as server, ThreadPoolExecutor(4) as threads:
        server.wait_until_ready()
        plain = [threads.submit(ask, server.url) for _ in range(2)]
        streams = [threads.submit(last_words, server.url) for _ in range(2)]
        for future in plain:
            answer = future.result()
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert [set(future.result()) for future in streams] == [{"error"}] * 2
        assert server.wait_for_exit() == 1
        assert server.leaves_nothing_behind()
        assert check_token_difference(server) > 2


@pytest.mark.slow
def test_another_token_in_the_trial_keeps_the_server_from_being_ready(byte_model):
    with faulty_server(byte_model, "token:1") as server:
        assert server.wait_for_exit(START_S) == 1
        assert server.url == ""
        assert check_token_difference(server) == 0
        assert server.leaves_nothing_behind()


@pytest.mark.slow  # tests/scheduler/test_agreement.py drops a message by default
def test_a_rank_that_has_not_heard_the_only_request_says_so_while_it_waits(byte_model):
    with faulty_server(byte_model, "deaf") as server, ThreadPoolExecutor(1) as thread:
        server.wait_until_ready()
        begin = time.monotonic()
        answer = thread.submit(ask, server.url).result()
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert server.wait_for_exit(END_S) == 1
        assert time.monotonic() - begin < END_S
        assert "in: waiting; rank 0 computes and rank 1 waits for a message" in server.stderr
        assert server.leaves_nothing_behind()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_recording_of_a_server_replays_with_its_trial_and_its_aborts(ranks, byte_model, tmp_path):
    path = tmp_path / "recording"
    with faulty_server(byte_model, "", tp=ranks, record=str(path)) as server, ThreadPoolExecutor(4) as threads:
        server.wait_until_ready()
        assert path.stat().st_mode & 0o777 == 0o600
        answers = [threads.submit(ask, server.url, max_tokens=count) for count in (1, 30, 50)]
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=START_S) as response:
            next(response.iter_lines())  # and away: an abort
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert wait_until(lambda: b"AbortBackendMsg" in path.read_bytes())  # the server need not have seen the client leave yet
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_exit(END_S) == 128 + signal.SIGTERM
    outcome = replay(path)
    assert (outcome.difference, outcome.is_complete, outcome.num_ranks) == (None, True, ranks)
    assert outcome.num_steps >= 52


@pytest.mark.slow  # tests/test_replay.py breaks recordings off anywhere
def test_the_recording_of_a_killed_rank_replays_up_to_its_end(byte_model, tmp_path):
    path = tmp_path / "recording"
    with faulty_server(byte_model, "", record=str(path)) as server, ThreadPoolExecutor(1) as thread:
        server.wait_until_ready()
        answer = thread.submit(ask, server.url)
        assert wait_until(lambda: path.stat().st_size > 100_000)
        os.kill(server.children["scheduler"], signal.SIGKILL)
        assert server.wait_for_exit(END_S) == 1
        assert answer.result().status_code == 503
    outcome = replay(path)
    assert (outcome.difference, outcome.is_complete) == (None, False)
    assert outcome.num_steps > 100


@pytest.mark.slow
def test_a_real_model_on_two_ranks_is_recorded_by_the_command_and_replayed(tiny_models, tmp_path):
    path = tmp_path / "recording"
    # Pages for two of the four requests: some are retracted.
    flags = ["--tp", "2", "--num-pages", "8", "--max-seq-len", "96", "--page-size", "16", "--reserve-tokens", "4", "--record", str(path)]
    with started(["minisgl", "--model", str(tiny_models("llama")), "--port", "0", *flags]) as server, ThreadPoolExecutor(4) as threads:
        server.wait_until_ready()
        texts = ["The sea is", "The sea is", "One, two, three", "Once upon a time"]
        body = {"max_tokens": 50, "temperature": 0, "ignore_eos": True, "seed": 1}
        url = f"{server.url}/v1/completions"
        answers = [threads.submit(httpx.post, url, json={**body, "prompt": text}, timeout=START_S) for text in texts]
        texts = [answer.result().json()["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1]
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_exit(END_S) == 128 + signal.SIGTERM
    outcome = replay(path)
    assert (outcome.difference, outcome.is_complete, outcome.num_ranks) == (None, True, 2)
    with started(["minisgl", "--model", str(tiny_models("llama")), "--port", "0", "--record", str(path)]) as server:
        assert server.wait_for_exit(START_S) == 2
        assert f"--record: {path} exists" in server.stderr
