"""Starting and ending a server of real processes: with a scheduler that has no model, except where the command itself is run."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.server_process import END_S, START_S, server_process, wait_until, write_byte_model

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

slow = pytest.mark.slow
BODY = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_byte_model(tmp_path_factory.mktemp("byte-model"))


OPTIONS = {"drain_timeout": 0.3, "served_model_name": "shop/clerk"}


@pytest.fixture
def running(model_dir):
    """A server that does not wait long for requests that go on and on."""
    with server_process(model_dir, options=OPTIONS) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def lasting(model_dir):
    """Shared by the tests that leave it as it was."""
    with server_process(model_dir, options=OPTIONS) as server:
        server.wait_until_ready()
        yield server


def stream(url, started):
    """Read a stream to its end, however it ends; the events without the [DONE]."""
    events = []
    with (
        contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}, timeout=END_S) as response,
    ):
        for line in response.iter_lines():
            if line:
                events.append(json.loads(line.removeprefix("data: ")))
                started.set()
    return events


def send_plain(url):
    """A plain request that has been sent; its answer is to be read."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=END_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY))
    return connection


@contextlib.contextmanager
def requests_in_flight(url):
    """Two plain requests and two streams that have begun; yields the connections and the streams' futures."""
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(2))
        plains = [stack.enter_context(contextlib.closing(send_plain(url))) for _ in range(2)]
        begun = [threading.Event(), threading.Event()]
        streams = [threads.submit(stream, url, event) for event in begun]
        assert all(event.wait(END_S) for event in begun)
        yield streams, plains


def has_ended_with_an_error(streams, plains):
    for future in streams:
        events = future.result(END_S)
        assert set(events[-1]) == {"error"}
        assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    for connection in plains:
        response = connection.getresponse()
        assert response.status == 503
        assert json.load(response)["error"]["type"] == "server_error"
    return True


def test_a_server_says_what_it_is_and_answers(lasting):
    answer = httpx.post(f"{lasting.url}/v1/chat/completions", json={**BODY, "max_tokens": 3}, timeout=END_S)
    assert answer.json()["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "xxx", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert httpx.get(f"{lasting.url}/v1/models").json()["data"][0]["id"] == answer.json()["model"] == "shop/clerk"
    assert lasting.said[0] == "minisgl serves shop/clerk"
    assert {"  drain_timeout = 0.3", "  page_size = 0", "  ranks = 1"} <= set(lasting.said)
    assert [name for name in ("api", "tokenizer", "scheduler") if not re.search(rf"\d s  {name}: ", "\n".join(lasting.said))] == []
    for name in ("api", "tokenizer"):
        assert "libtorch" not in Path(f"/proc/{lasting.children[name]}/maps").read_text()


@pytest.mark.parametrize(
    ("number", "is_group"),
    [
        pytest.param(signal.SIGINT, True, id="2-to the whole group"),
        pytest.param(signal.SIGINT, False, id="2-to the launcher", marks=slow),
        pytest.param(signal.SIGTERM, False, id="15-to the launcher", marks=slow),
        pytest.param(signal.SIGTERM, True, id="15-to the whole group", marks=slow),
    ],
)
def test_a_signal_under_load_leaves_nothing_behind(running, number, is_group):
    with requests_in_flight(running.url) as futures:
        if is_group:
            os.killpg(running.process.pid, number)
        else:
            running.process.send_signal(number)
        assert has_ended_with_an_error(*futures)
    assert running.wait_for_exit() == 128 + number
    assert running.leaves_nothing_behind()
    assert "Traceback" not in running.stderr


def test_an_upload_that_has_not_ended_is_told_that_the_server_stops(running):
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=END_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        httpx.get(f"{running.url}/health")
        running.process.send_signal(signal.SIGINT)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "server_stopped"
    assert running.wait_for_exit() == 128 + signal.SIGINT
    assert "Traceback" not in running.stderr


@slow
def test_a_stopped_api_does_not_keep_the_server_for_longer_than_ten_seconds(model_dir):
    with server_process(model_dir, options={"drain_timeout": 5}) as server:
        server.wait_until_ready()
        os.kill(server.children["api"], signal.SIGSTOP)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_exit() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 10.5
        assert server.leaves_nothing_behind()


def refusal(url, client=httpx):
    """Why a new request is refused now; "" if it is not."""
    response = client.post(f"{url}/v1/chat/completions", json={**BODY, "max_tokens": 1}, timeout=END_S)
    return response.json()["error"]["code"] if response.status_code == 503 else ""


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(model_dir):
    """The one request runs for two seconds, in which all else is asked over one connection."""
    with server_process(model_dir, options={"drain_timeout": 60}) as server, ThreadPoolExecutor(1) as thread, httpx.Client() as client:
        server.wait_until_ready()
        long = thread.submit(httpx.post, f"{server.url}/v1/chat/completions", json={**BODY, "max_tokens": 400}, timeout=30)
        assert wait_until(lambda: client.get(f"{server.url}/health/progress").json()["num_requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: refusal(server.url, client) == "draining")
        assert [client.get(f"{server.url}/health{path}").status_code for path in ("", "/ready")] == [200, 503]
        assert long.result(END_S).json()["usage"]["completion_tokens"] == 400
        assert server.wait_for_exit() == 128 + signal.SIGTERM
        assert server.leaves_nothing_behind()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=slow), signal.SIGTERM])
def test_a_second_signal_ends_the_drain_at_once(model_dir, number):
    with server_process(model_dir, options={"drain_timeout": 60}) as server:
        server.wait_until_ready()
        with requests_in_flight(server.url) as futures:
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: refusal(server.url) == "draining")
            server.process.send_signal(number)
            assert has_ended_with_an_error(*futures)
        assert server.wait_for_exit(3) == 128 + signal.SIGTERM
        assert server.leaves_nothing_behind()


def test_a_worker_that_dies_during_the_drain_ends_the_server(model_dir):
    with server_process(model_dir, options={"drain_timeout": 60}) as server:
        server.wait_until_ready()
        with requests_in_flight(server.url) as futures:
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: refusal(server.url) == "draining")
            os.kill(server.children["scheduler"], signal.SIGKILL)
            assert has_ended_with_an_error(*futures)
        assert server.wait_for_exit() == 1
        assert server.leaves_nothing_behind()


def test_a_second_server_of_the_same_name_is_refused_and_the_first_goes_on(lasting, model_dir):
    with server_process(model_dir, suffix=lasting.suffix) as second:
        assert second.wait_for_exit(START_S) == 1
        assert "a live server listens on" in second.stderr
    assert refusal(lasting.url) == ""
    assert len(lasting.sockets()) == 3


def test_a_killed_launcher_leaves_nothing_behind(running):
    with requests_in_flight(running.url) as futures:
        running.process.kill()
        assert has_ended_with_an_error(*futures)
    assert running.leaves_nothing_behind()


def says_who_died(server, name):
    """The server has ended because this child was killed, and says so."""
    assert server.wait_for_exit() == 1
    assert server.leaves_nothing_behind()
    return f"the {name} process (pid {server.children[name]}) died: it was ended by SIGKILL" in server.stderr


@pytest.mark.parametrize("name", [pytest.param("scheduler", marks=slow), "tokenizer"])
def test_a_killed_worker_ends_the_server_and_every_request(running, name):
    with requests_in_flight(running.url) as futures:
        os.kill(running.children[name], signal.SIGKILL)
        assert has_ended_with_an_error(*futures)
    assert says_who_died(running, name)


@pytest.mark.parametrize("name", ["api", *(pytest.param(name, marks=slow) for name in ("tokenizer", "scheduler"))])
def test_a_killed_worker_ends_an_idle_server(running, name):
    os.kill(running.children[name], signal.SIGKILL)
    assert says_who_died(running, name)


@slow
def test_a_killed_api_breaks_all_connections_off(running):
    with requests_in_flight(running.url) as (streams, plains):
        os.kill(running.children["api"], signal.SIGKILL)
        events = [event for future in streams for event in future.result(END_S)]
        assert all(choice["finish_reason"] is None for event in events for choice in event["choices"])
        for connection in plains:
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                connection.getresponse()
    assert says_who_died(running, "api")


def test_a_second_ctrl_c_ends_a_server_that_hangs(running):
    for name in ("api", "tokenizer"):
        os.kill(running.children[name], signal.SIGSTOP)
    start = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: not is_port_open(running.url) or time.monotonic() - start > 0.5)
    running.process.send_signal(signal.SIGINT)
    assert running.wait_for_exit() == 130
    assert running.leaves_nothing_behind()


def is_port_open(url):
    host, port = url.removeprefix("http://").split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=0.05):
        return True
    return False


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("refuse", "the scheduler process failed: the weights are of cheese"),
        ("bug", "the scheduler process failed: ZeroDivisionError: a bug while loading"),
        pytest.param("vanish", "died: it was ended by SIGKILL", marks=slow),
    ],
)
def test_a_scheduler_that_dies_while_loading_ends_the_server_with_the_cause(model_dir, how, cause):
    with server_process(model_dir, FAKE_SCHEDULER=how) as server:
        assert server.wait_for_exit(30) == 1
        assert cause in server.stderr
        assert ("Traceback" in server.stderr) == (how == "bug")
        assert server.leaves_nothing_behind()


@pytest.mark.parametrize("number", [signal.SIGINT, *(pytest.param(number, marks=slow) for number in (signal.SIGTERM, signal.SIGKILL))])
def test_a_signal_while_loading_leaves_nothing_behind(model_dir, number):
    with server_process(model_dir, FAKE_SCHEDULER="hang") as server:
        assert wait_until(lambda: len(server.sockets()) == 2, 30)  # the API's and the tokenizer's
        server.find_children()
        assert len(server.children) == 3
        server.process.send_signal(number)
        assert server.wait_for_exit() == (-number if number == signal.SIGKILL else 128 + number)
        assert server.leaves_nothing_behind()


def test_a_broken_tokenizer_ends_the_server_with_the_cause(model_dir, tmp_path):
    broken = write_byte_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with server_process(broken) as server:
        assert server.wait_for_exit(30) == 1
        assert "the tokenizer process failed" in server.stderr
        assert "tokenizer.json" in server.stderr
        assert server.leaves_nothing_behind()


def test_two_servers_run_side_by_side(lasting, model_dir):
    with server_process(model_dir) as second:
        second.wait_until_ready()
        assert second.url != lasting.url
        assert [httpx.get(f"{url}/health").status_code for url in (lasting.url, second.url)] == [200, 200]


def serve(*words):
    command = [sys.executable, "-m", "minisgl", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL)


def test_a_busy_port_is_told_at_once(model_dir):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = serve(str(model_dir), "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/no/such/model"], "/no/such/model"),
        (["--port", "70000"], "port: 70000 found"),
        pytest.param(["--page-size", "-1"], "--page-size", marks=slow),
        pytest.param(["a", "--model", "b"], "name one model", marks=slow),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
    ],
)
def test_a_wrong_flag_is_one_line_on_stderr(words, told, model_dir):
    done = serve(*words, *([str(model_dir)] if words[0] == "--host" else []))
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
