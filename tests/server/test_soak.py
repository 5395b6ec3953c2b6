"""A soak: half an hour of mixed load on a whole server with a tiny model, in rounds with a rest after each.

MINISGL_SOAK_MINUTES is its length. The KV pool is small, so that prefixes are evicted and requests retracted all the time. At each rest
nothing may be left of the load; over the second half nothing may grow, by its slope.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server.server_process import ROOT, check_endings, server_process, wait_until

MINUTES = float(os.environ.get("MINISGL_SOAK_MINUTES", "30"))
ROUND_S = 12.0
"""Load lasts so long, and until the requests that are under way have ended."""
WAIT_S = 120.0
"""An answer may take so long: processes are paused, and the cores may be busy with other things."""
REST_S = 30.0
PAGES, PAGE_SIZE, CONTEXT = 24, 16, 256
OPTIONS = {
    "config": {"num_pages": PAGES, "page_size": PAGE_SIZE, "max_seq_len": CONTEXT, "max_running_req": 32, "reserve_tokens": 16},
    "http": {"slow_reader_timeout": 8.0},
}
PROMPTS = [f"Number {number}: " + "the sea is wide and " * (3 * number) for number in range(8)]
ALLOWED = {"descriptors": 0, "threads": 0, "private bytes": 6 * 2**20}
"""What may be gained over the second half; of threads and descriptors also since the first round."""
ALLOWED_PER_REQUEST = 256
"""More private bytes for each request of the second half: the tally keeps about 200 in the tokenizer process."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(int(MINUTES * 60 * 1.5 + 300)),
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc"),
]
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
BAD_BODIES = [
    (CHAT, b'{"messages": ['),
    (CHAT, b"\xff\xfe\x00"),
    (CHAT, b"[" * 10_000),
    (CHAT, b"[]"),
    (CHAT, b""),
    ("/no/such/route", b"{}"),
    ("/v1/completions", {"prompt": "word " * 3000}),
    ("/v1/completions", {"prompt": [-1, 2**40]}),
    ("/v1/completions", {"prompt": "x", "n": 1000}),
    ("/detokenize", {"tokens": "x"}),
    *(
        (CHAT, {"messages": HI, **wrong})
        for wrong in (
            {"messages": "Hi"},
            {"messages": []},
            {"model": "no-such-model"},
            {"max_tokens": "many"},
            {"temperature": 99},
            {"stop": ["x"] * 17},
            {"logprobs": True, "top_logprobs": 21},
            {"stream": "yes"},
        )
    ),
]
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
HALF_SENT = [
    HEAD,
    HEAD + b'Content-Length: 500\r\n\r\n{"messages": [',
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{",
    b"\x16\x03\x01\x02\x00",
]


class Soak:
    """One server under load. Each kind of load is a method that goes on until `over`, and raises what it finds wrong."""

    def __init__(self, server, folder: Path, tally: Path) -> None:
        self.server, self.folder, self.tally = server, folder, tally
        self.over = threading.Event()
        self.first = None
        self.num_rounds = self.num_compared = self.num_left = self.num_refused = 0
        self.paused = itertools.cycle(["scheduler", "tokenizer", "api"])
        self.alone = [self.greedy(prompt) for prompt in PROMPTS]

    @property
    def num_dropped(self):
        """Clients that read nothing."""
        return sum("has read nothing for" in line for line in self.server.errors)

    def post(self, path, **body):
        response = httpx.post(self.server.url + path, json=body, timeout=WAIT_S)
        assert response.status_code == 200, response.text
        return response.json()

    def greedy(self, prompt):
        return self.post("/v1/completions", prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)["choices"][0]["text"]

    def warm_up(self):
        """Steps of every size: a matrix library keeps code for each number of rows."""
        for num_rows in range(1, PAGES):
            self.post("/v1/completions", prompt=[[number] for number in range(num_rows)], max_tokens=2, ignore_eos=True)
        for num_tokens in range(1, CONTEXT - 1):
            self.post("/v1/completions", prompt=[num_tokens] * num_tokens, max_tokens=1)

    def connect(self, receive_bytes):
        client = socket.socket()
        client.settimeout(WAIT_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect((httpx.URL(self.server.url).host, httpx.URL(self.server.url).port))
        return client

    def send(self, client, path, **body):
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)

    # ---- kinds of load ----------------------------------------------------------------------------------------------------------

    def bench(self):
        """The load client: every prompt of a run begins alike."""
        report = self.folder / "bench.json"
        sizes = "--streams 10 --requests-per-stream 3 --ramp-up 1 --prompt-tokens 8:60 --answer-tokens 16:90 --shared-prefix-tokens 40"
        words = [*sizes.split(), *f"--repeats 1 --processes 1 --seed {self.num_rounds} --json {report} --url {self.server.url}".split()]
        done = subprocess.run(
            [sys.executable, "-m", "minisgl", "bench", "serve", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        run = json.loads(report.read_text())["runs"][0]
        assert (run["num_succeeded"], run["num_failed"]) == (30, 0), run["errors"]

    def leavers(self):
        """Before the first token, after some, or while they wait for a whole answer."""
        for number in itertools.count():
            if self.over.wait(0.1):
                return
            with self.connect(65536) as client:
                prompt, is_whole = f"{PROMPTS[number % 3]} and leaver {number}", number % 3 == 2
                self.send(client, "/v1/completions", prompt=prompt, max_tokens=150, ignore_eos=True, stream=not is_whole, n=1 + number % 2)
                if number % 3 == 0:
                    assert client.recv(100).startswith(b"HTTP/1.1 200")
            self.num_left += 1

    def bad_requests(self):
        """Each is refused, and half of a request is nothing."""
        for (path, body), half in zip(itertools.cycle(BAD_BODIES), itertools.cycle(HALF_SENT)):
            if self.over.wait(0.05):
                return
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = httpx.post(self.server.url + path, content=content, timeout=WAIT_S)
            assert 400 <= response.status_code < 500, (path, content[:100], response.status_code, response.text)
            self.num_refused += 1
            with self.connect(65536) as client:
                client.sendall(half)

    def slow_readers(self):
        """One reads slowly and gets everything, one reads nothing and is dropped."""
        with self.connect(4096) as idle:
            self.send(idle, "/detokenize", tokens=[97] * 300_000)
            while not self.over.is_set():
                with self.connect(4096) as slow:
                    self.send(slow, "/v1/completions", prompt="Slow", max_tokens=60, ignore_eos=True, stream=True, logprobs=5, n=2)
                    blocks = []
                    while block := slow.recv(4096):
                        blocks.append(block)
                        self.over.wait(0.05)
                assert b"[DONE]" in b"".join(blocks), b"".join(blocks)[-1000:]

    def pauses(self):
        """A process at a time stands still for 1 to 3 seconds."""
        draw = random.Random(self.num_rounds)
        while not self.over.wait(draw.uniform(0.5, 2)):
            pid = self.server.children[next(self.paused)]
            os.kill(pid, signal.SIGSTOP)
            try:
                self.over.wait(draw.uniform(1, 3))
            finally:
                os.kill(pid, signal.SIGCONT)

    def trickle(self):
        """Greedy texts are what they were alone."""
        for number in itertools.cycle(range(len(PROMPTS))):
            if self.over.wait(0.2):
                return
            assert self.greedy(PROMPTS[number]) == self.alone[number], f"prompt {number} has another text beside load"
            self.num_compared += 1

    def load(self):
        """All kinds at once. Whatever one of them finds wrong is raised when all have ended."""
        self.over.clear()
        self.num_rounds += 1
        kinds = [self.bench, self.leavers, self.leavers, self.bad_requests, self.slow_readers, self.pauses, self.trickle]
        with ThreadPoolExecutor(len(kinds)) as threads:
            running = [threads.submit(kind) for kind in kinds]
            wait_until(lambda: any(each.done() and each.exception() for each in running), ROUND_S)
            self.over.set()
        for each in running:
            each.result()

    # ---- rests ------------------------------------------------------------------------------------------------------------------

    def metric(self, name):
        text = httpx.get(f"{self.server.url}/metrics", timeout=WAIT_S).text
        return sum(map(float, re.findall(rf"^minisgl:{name}{{.*}} (.+)$", text, re.MULTILINE)))

    def at_rest(self):
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        found = {name: self.metric(name) for name in gauges}
        return found | {"num_requests": httpx.get(f"{self.server.url}/health/progress").json().get("num_requests", "not told")}

    def rest(self):
        """Nothing is left of the load; the cache can be emptied, and then holds nothing either. What the processes hold."""
        assert wait_until(lambda: not any(self.at_rest().values()), REST_S), self.at_rest()
        assert self.post("/flush_cache") == {"status": "ok"}
        assert not any(self.at_rest().values()), self.at_rest()
        check_endings(self.server, self.tally)
        assert wait_until(lambda: self.num_held() == 0, REST_S), f"the tokenizer process still holds {self.num_held()} requests"
        log = "\n".join(self.server.errors)
        assert not re.search("Traceback|ledger is wrong|ERROR", log), log[-10_000:]
        self.first = self.first or self.usage()
        wait_until(lambda: all(number <= self.first[key] for key, number in self.usage().items() if key[1] == "descriptors"), REST_S)
        return self.usage()

    def num_held(self):
        return json.loads(self.tally.read_text())["num_held"]

    def usage(self):
        found = {}
        for name, pid in {"launcher": self.server.process.pid, **self.server.children}.items():
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[name, "private bytes"] = 1024 * int(status["RssAnon"].split()[0])
            found[name, "threads"] = int(status["Threads"])
            found[name, "descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        return found

    def tell(self, num_accepted, reading):
        """For who runs this with -s."""
        private = {who: f"{number / 2**20:.1f}" for (who, what), number in reading.items() if what == "private bytes"}
        counts = [number for (_, what), number in reading.items() if what != "private bytes"]
        retracted = self.metric("num_preemptions_total")
        done = f"{num_accepted:.0f} accepted, {retracted:.0f} retracted, {self.num_compared} compared, {self.num_dropped} dropped"
        sys.stdout.write(f"round {self.num_rounds}: {done}; MiB {private}, {counts}\n")
        sys.stdout.flush()

    def num_accepted(self):
        return sum(map(self.metric, ("request_success_total", "num_aborted_requests_total", "num_failed_requests_total")))


def gain(values):
    """By the slope of a straight line through them."""
    return (len(values) - 1) * statistics.linear_regression(range(len(values)), values).slope


def check_growth(readings, num_requests):
    """Readings at rests after the first round, the last half of which has seen so many requests."""
    grown = []
    for who, what in readings[0]:
        values = [reading[who, what] for reading in readings]
        second = values[len(values) // 2 :]
        allowed = ALLOWED[what] + (ALLOWED_PER_REQUEST * num_requests if what == "private bytes" else 0)
        total = gain(second) if what == "private bytes" else max(gain(second), values[-1] - values[0])
        if total > allowed:
            grown.append(f"{who}: {total:,.0f} {what} more ({allowed:,.0f} allowed, {num_requests:,.0f} requests): {values}")
    assert not grown, "\n".join(grown)


@contextlib.contextmanager
def soaking(model, folder):
    tally = folder / "tally"
    with server_process(model, scheduler="minisgl.processes.scheduler_process", options=OPTIONS, TALLY=str(tally)) as server:
        server.wait_until_ready()
        yield Soak(server, folder, tally)
        server.process.terminate()
        assert server.wait_for_exit() == 128 + signal.SIGTERM
        assert server.leaves_nothing_behind()
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url)
        assert not re.search("Traceback|ledger is wrong|ERROR", server.stderr), server.stderr[-10_000:]


def test_mixed_load_leaves_nothing_behind(tiny_models, tmp_path):
    with soaking(tiny_models("llama"), tmp_path) as soak:
        soak.warm_up()
        end, readings, accepted = time.monotonic() + 60 * MINUTES, [], []
        while time.monotonic() < end or len(readings) < 4:
            soak.load()
            readings.append(soak.rest())
            accepted.append(soak.num_accepted())
            soak.tell(accepted[-1], readings[-1])
        for what in ("num_compared", "num_left", "num_refused", "num_dropped"):
            assert getattr(soak, what) > soak.num_rounds / 2, what
        for name in ("num_preemptions_total", "prefix_cache_hits_total", "num_aborted_requests_total"):
            assert soak.metric(name) > soak.num_rounds, name
        assert soak.metric("num_failed_requests_total") == 0
        num_computed = soak.metric("prefix_cache_queries_total") - soak.metric("prefix_cache_hits_total")
        assert num_computed > 2 * PAGES * PAGE_SIZE * soak.num_rounds, "nothing was evicted"
        check_growth(readings, accepted[-1] - accepted[len(accepted) // 2])
