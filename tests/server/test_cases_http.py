"""Failures that other servers had, over HTTP against whole servers: requests that are given up in each state, empty prompts, models without
a chat template, GGUF files, foreign frames on inner sockets, ranks that are asked too early, signals."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pickle
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.utils import ZmqPushQueue, run_directory
from tests.models.gguf_files import write_gguf
from tests.server.gated_engine_process import CHUNK, RUNNING
from tests.server.server_process import (
    END_S,
    START_S,
    check_endings,
    is_running,
    memory_bytes,
    server_process,
    started,
    wait_until,
    write_byte_model,
)

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
slow = pytest.mark.slow


def address(url):
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def send(url, path="/v1/completions", **body):
    """A request that has been sent; its socket."""
    client = socket.create_connection(address(url), timeout=END_S)
    data = json.dumps(body).encode()
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


def num_requests(client):
    """Outputs that are under way."""
    return client.get("/health/progress").json()["num_requests"]


def error_of(response):
    return response.status_code, response.json()["error"]["code"]


# ---- given up in each state -------------------------------------------------------------------------------------------------------


class Gate:
    """The test's end of the engine's gate: open, or closed with a byte for each step that may go on."""

    client: httpx.Client

    def __init__(self, path):
        os.mkfifo(path)
        self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._closed = Path(f"{path}.closed")

    def let_one(self):
        os.write(self._fifo, b"x")

    @contextlib.contextmanager
    def closed(self):
        self._closed.touch()
        try:
            yield
        finally:
            self._closed.unlink()
            self.let_one()  # if something waits
            assert wait_until(lambda: num_requests(self.client) == 0)
            with contextlib.suppress(BlockingIOError):
                os.read(self._fifo, 1)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A server whose model has no chat template, and whose engine has a gate."""
    folder = tmp_path_factory.mktemp("gated")
    gate = Gate(folder / "gate")
    model = write_byte_model(folder / "model")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    environment = {"GATE": str(folder / "gate"), "TALLY": str(folder / "tally")}
    with server_process(model, scheduler="tests.server.gated_engine_process", **environment) as server:
        server.wait_until_ready()
        server.gate, server.tally = gate, folder / "tally"
        with httpx.Client(base_url=server.url, timeout=END_S) as client:
            server.client = gate.client = client
            yield server
        check_endings(server, server.tally)
    assert "Traceback" not in server.stderr
    assert "ledger is wrong" not in server.stderr


def next_line(server):
    """What the scheduler says next: ("step", its request's uids and their tokens) or ("idle", (free, cached, all) pages)."""
    while True:
        line = server.lines.get(timeout=END_S)
        if step := re.search(r"step: \[(.*)\] tokens of \[(.*)\]", line):
            return "step", {int(uid): int(count) for uid, count in zip(step[2].split(","), step[1].split(","), strict=True)}
        if idle := re.search(r"idle: (\d+) free, (\d+) cached, (\d+) in all", line):
            return "idle", tuple(map(int, idle.groups()))


def next_step(server):
    """The step that now waits at the gate."""
    while True:
        kind, found = next_line(server)
        if kind == "step":
            return found


def steps_until_idle(server):
    """Let everything go on; the steps that this takes. All pages are then free or cached."""
    steps = []
    while True:
        server.gate.let_one()
        kind, found = next_line(server)
        if kind == "idle":
            free, cached, total = found
            assert free + cached == total
            return steps
        steps.append(found)


def leave(server, client, num_left):
    """Close a client's connection. The abort is then on its way to the scheduler: it has been sent before what is asked next."""
    client.close()
    assert wait_until(lambda: num_requests(server.client) == num_left)
    assert server.client.post("/tokenize", json={"prompt": "x"}).json()["count"] == 1


def answer(server, prompt):
    body = server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "seed": 1}).json()
    return body["choices"][0]["text"]


def all_pages_become_free(server):
    assert server.client.post("/flush_cache").status_code == 200
    while (found := next_line(server)) and (found[0] != "idle" or found[1][0] != found[1][2]):
        pass
    return True


NUM_CHUNKS = 5
PLACES = {"in the first chunk": 1, "in the second chunk": 2, "in the last chunk": NUM_CHUNKS, "in decode": NUM_CHUNKS + 3}


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("place", PLACES)
def test_a_request_that_is_given_up_is_computed_for_one_step_more_at_most_and_leaves_nothing(gated, place, is_streamed):
    prompt = f"{place} {is_streamed} ".ljust(CHUNK * NUM_CHUNKS, "p")
    cold = answer(gated, prompt)
    assert all_pages_become_free(gated)
    body = {"prompt": prompt, "max_tokens": 100, "seed": 1, "ignore_eos": True, "stream": is_streamed}
    with gated.gate.closed(), send(gated.url, **body) as client:
        steps = [next_step(gated)]
        while len(steps) < PLACES[place]:
            gated.gate.let_one()
            steps.append(next_step(gated))
        counts = [count for step in steps for count in step.values()]
        assert counts == ([CHUNK] * NUM_CHUNKS + [1] * 3)[: PLACES[place]]
        leave(gated, client, num_left=0)
        assert len(steps_until_idle(gated)) <= 1
    assert answer(gated, prompt) == cold  # from what it has left in the cache
    assert all_pages_become_free(gated)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "plain"])
def test_a_request_that_is_given_up_in_the_queue_is_never_computed(gated, is_streamed):
    with contextlib.ExitStack() as stack, gated.gate.closed():
        bodies = [{"prompt": f"{is_streamed}{n}", "max_tokens": 12, "ignore_eos": True, "seed": n} for n in range(RUNNING)]
        running = [stack.enter_context(send(gated.url, **body)) for body in bodies]
        assert wait_until(lambda: num_accepted(gated) == RUNNING)
        steps = [next_step(gated)]
        while len(steps[-1]) < RUNNING:  # until all have their places
            gated.gate.let_one()
            steps.append(next_step(gated))
        waiting = stack.enter_context(send(gated.url, prompt="in the queue", max_tokens=6, seed=1, stream=is_streamed))
        assert wait_until(lambda: num_accepted(gated) == RUNNING + 1)
        for _ in range(2):  # and until the scheduler has heard of it
            gated.gate.let_one()
            steps.append(next_step(gated))
        leave(gated, waiting, num_left=RUNNING)
        steps += steps_until_idle(gated)
        for client in running:
            assert b'"completion_tokens":12' in read_answer(client)
    assert len(set().union(*steps)) == RUNNING
    assert all_pages_become_free(gated)


def num_accepted(server):
    """Requests that the tokenizer has handed to the scheduler and that have not ended."""
    return len(json.loads(server.tally.read_text())["open"]) if server.tally.exists() else 0


def read_answer(client):
    """A whole answer, head and body."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return response.read()


# ---- foreign frames ---------------------------------------------------------------------------------------------------------------


class Spell:
    """What unpickles into a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def push(path, frame):
    with ZmqPushQueue(f"ipc://{path}", create=False, encoder=bytes) as queue:
        queue.put_raw(frame)


def inner_sockets(server):
    return [run_directory() / name for name in sorted(server.sockets())]


def dropped(server, frame):
    return "".join(server.errors).count(f"dropped a frame of {len(frame)} bytes")


def test_a_pickle_on_an_inner_socket_is_never_loaded(gated, tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        frame = pickle.dumps(Spell(tmp_path / "pickle-was-here"), protocol) + bytes(protocol)
        before = dropped(gated, frame)
        for path in inner_sockets(gated):
            push(path, frame)
        assert wait_until(lambda: dropped(gated, frame) == before + 3)  # noqa: B023 - called at once
    assert answer(gated, "still there") == answer(gated, "still there")
    assert list(tmp_path.iterdir()) == []
    pickle.loads(frame[: -pickle.HIGHEST_PROTOCOL])
    assert [path.name for path in tmp_path.iterdir()] == ["pickle-was-here"]  # which shows that it would have worked


def test_what_speaks_no_zmq_on_an_inner_socket_is_ignored(gated):
    text = answer(gated, "before")
    for path in inner_sockets(gated):
        for noise in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000)):
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.connect(str(path))
                client.sendall(noise)
    assert answer(gated, "before") == text


def test_the_inner_sockets_are_files_that_only_the_user_can_reach_and_one_tcp_port_listens(gated):
    assert len(inner_sockets(gated)) == 3
    assert run_directory().stat().st_mode & 0o777 == 0o700
    owned = set()
    for pid in (gated.process.pid, *gated.children.values()):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                owned.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = {row[1] for row in rows if row[3] == "0A" and row[9] in owned}
    assert listening == {f"0100007F:{address(gated.url)[1]:04X}"}


@slow
@pytest.mark.timeout(600)
def test_two_gigabytes_on_an_inner_socket_are_dropped_and_given_back(gated):
    frame = os.urandom(2**20) * 2**11
    memory = {name: memory_bytes(pid) for name, pid in gated.children.items()}
    for number, path in enumerate(inner_sockets(gated), 1):
        with ZmqPushQueue(f"ipc://{path}", create=False, encoder=bytes) as queue:  # kept until all has gone out
            queue.put_raw(frame)
            assert wait_until(lambda: dropped(gated, frame) == number, 120), path  # noqa: B023 - called at once
    assert gated.client.get("/health").status_code == 200
    assert answer(gated, "still there") == answer(gated, "still there")
    assert wait_until(lambda: all(memory_bytes(pid) < memory[name] + 2**26 for name, pid in gated.children.items()))


# ---- models -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_chat_with_a_model_without_a_template_is_a_400_that_says_what_to_do_and_completions_work(gated, is_streamed):
    messages = [{"role": "user", "content": "Hello"}]
    for path, more in (("/v1/chat/completions", {"stream": is_streamed}), ("/tokenize", {})):
        response = gated.client.post(path, json={"messages": messages, **more})
        assert error_of(response) == (400, "chat_template_missing")
        assert "/v1/completions" in response.json()["error"]["message"]
    body = gated.client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2}).json()
    assert body["usage"]["completion_tokens"] == 2


EMPTY = ("", [""], [], [[]], ["a", ""], [[97], []])


@pytest.mark.parametrize("prompt", EMPTY, ids=json.dumps)
def test_an_empty_prompt_is_a_400_where_nothing_is_put_before_it(gated, prompt):
    response = gated.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert gated.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2


BOS_ID = 1
PROMPT = "he said"
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """(client, what the offline class answers to PROMPT) for a GGUF file whose tokenizer puts a BOS token before every text."""
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "little-one.gguf"
    write_gguf(path, extra_keys={"tokenizer.ggml.add_bos_token": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_CACHE", str(folder / "cache"))
        with LLM(str(path), num_pages=64) as llm:
            offline = llm.generate([PROMPT], SamplingParams(**GREEDY))[0]
        with started(["minisgl", "--model", str(path), "--port", "0", "--num-pages", "64"]) as server:
            server.wait_until_ready()
            with httpx.Client(base_url=server.url, timeout=30) as client:
                yield client, offline


def test_a_gguf_file_is_served_under_its_name_and_answers_as_offline(gguf):
    client, offline = gguf
    assert offline.error is None
    body = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY}).json()
    assert (body["model"], body["choices"][0]["text"]) == ("little-one", offline.text)
    assert body["usage"]["prompt_tokens"] == offline.num_prompt_tokens
    ids = client.post("/generate", json={"prompt": PROMPT, "sampling_params": GREEDY}).json()["token_ids"]
    assert ids == list(offline.token_ids)
    assert client.get("/v1/models").json()["data"][0]["id"] == "little-one"


def test_the_chat_template_of_a_gguf_file_is_used(gguf):
    client, _ = gguf
    ids = client.post("/tokenize", json={"messages": [{"role": "user", "content": PROMPT}]}).json()["tokens"]
    assert ids == client.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": PROMPT}], **GREEDY}).json()
    assert chat["usage"] == {**chat["usage"], "prompt_tokens": len(ids), "completion_tokens": 12}


@pytest.mark.parametrize("prompt", ["", [""]], ids=json.dumps)
def test_an_empty_text_is_a_prompt_of_one_token_where_the_model_has_a_bos(gguf, prompt):
    client, _ = gguf
    assert client.post("/tokenize", json={"prompt": ""}).json() == {"tokens": [BOS_ID], "count": 1}
    body = client.post("/v1/completions", json={"prompt": prompt, **GREEDY}).json()
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (1, 12)
    same = client.post("/v1/completions", json={"prompt": [BOS_ID], **GREEDY}).json()
    assert same["choices"][0]["text"] == body["choices"][0]["text"]


@pytest.mark.parametrize("prompt", [[], [[]], [[BOS_ID], []]], ids=json.dumps)
def test_no_ids_are_a_400_even_where_the_model_has_a_bos(gguf, prompt):
    client, offline = gguf
    response = client.post("/v1/completions", json={"prompt": prompt, **GREEDY})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    body = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY}).json()
    assert body["choices"][0]["text"] == offline.text


# ---- two ranks --------------------------------------------------------------------------------------------------------------------


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def first_answer(url, body):
    """Ask, without a pause, from before the port is open until something other than "the model is still being loaded" comes."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.ConnectError):
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=START_S)
            if response.status_code != 503 or response.json()["error"]["code"] != "starting":
                return response
    raise AssertionError("the server has not begun to answer")


@slow
@pytest.mark.timeout(1800)
def test_a_request_that_is_sent_the_moment_two_ranks_can_take_it_is_never_lost(tiny_models):
    body = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0}
    texts = []
    for _ in range(30):
        port = free_port()
        words = [
            "minisgl",
            "--model",
            str(tiny_models("llama")),
            "--port",
            str(port),
            "--num-pages",
            "64",
            "--max-seq-len",
            "128",
            "--tp",
            "2",
        ]
        with started(words) as server:
            response = first_answer(f"http://127.0.0.1:{port}", body)
            assert response.status_code == 200, response.text
            texts.append(response.json()["choices"][0]["text"])
            server.wait_until_ready()
            server.process.send_signal(signal.SIGINT)
            assert server.wait_for_exit() == 128 + signal.SIGINT
            assert server.leaves_nothing_behind()
    assert len(set(texts)) == 1
    assert texts[0] != ""


def stream_until_its_end(url, begun):
    """The last event of a stream."""
    last = ""
    body = {"prompt": "x", "max_tokens": 200_000, "ignore_eos": True, "stream": True}
    with (
        contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=START_S) as response,
    ):
        for line in response.iter_lines():
            last = line or last
            begun.set()
    return last


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def ends(server, number):
    """To the launcher alone: status, children and sockets are as they should be within ten seconds."""
    start = time.monotonic()
    server.process.send_signal(number)
    assert server.wait_for_exit() == (-number if number == signal.SIGKILL else 128 + number)
    assert server.leaves_nothing_behind()
    assert time.monotonic() - start < END_S
    assert not any(map(is_running, server.children.values()))
    return True


@slow
@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "under load"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_launcher_of_two_ranks_leaves_nothing_behind(number, is_loaded, tmp_path):
    model = write_byte_model(tmp_path / "model")
    options = {"tp": 2, "drain_timeout": 0.3}
    with server_process(model, scheduler="tests.server.faulty_rank_process", options=options, FAULT="", ENGINE="fake") as server:
        server.wait_until_ready()
        assert set(server.children) == {"api", "tokenizer", "scheduler", "scheduler rank 1"}
        begun = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            last = thread.submit(stream_until_its_end, server.url, begun) if is_loaded else None
            assert last is None or begun.wait(END_S)
            assert ends(server, number)
            assert last is None or set(json.loads(last.result(END_S).removeprefix("data: "))) == {"error"}


@slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_two_ranks_are_loading_leaves_nothing_behind(number, tmp_path):
    with server_process(write_byte_model(tmp_path / "model"), options={"tp": 2}, FAKE_SCHEDULER="hang") as server:
        assert wait_until(lambda: len(server.sockets()) == 2, START_S)  # the API's and the tokenizer's
        server.find_children()
        assert len(server.children) == 4
        assert ends(server, number)


@slow
def test_a_second_ctrl_c_ends_two_ranks_that_hang(tmp_path):
    model = write_byte_model(tmp_path / "model")
    with server_process(model, scheduler="tests.server.fake_engine_process", options={"tp": 2}) as server:
        server.wait_until_ready()
        for name in ("api", "tokenizer", "scheduler rank 1"):
            os.kill(server.children[name], signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        assert not wait_until(lambda: server.process.poll() is not None, 0.3)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_for_exit() == 128 + signal.SIGINT
        assert time.monotonic() - start < 5
        assert server.leaves_nothing_behind()
