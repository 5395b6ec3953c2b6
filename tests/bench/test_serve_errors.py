"""The load client against servers that behave badly: each failure is counted by its name, none hangs, Ctrl-C leaves a report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl.bench import serve_processes
from minisgl.bench.serve import Setup, run
from minisgl.bench.serve_http import parse_url
from minisgl.bench.serve_plan import Options
from minisgl.cli import main
from minisgl.errors import WorkerError
from tests.bench.hand_made import CHAT, Call, HandMade, behave, hand_made, instead, measure
from tests.server.server_process import is_running, wait_until


def test_a_server_that_behaves_is_measured_without_a_tokenizer():
    with hand_made(behave) as server:
        report = measure(server, processes=2, key="secret", repeats=2)
    scale = report["prompt_scale"]
    assert (scale["tokens_per_word"], scale["tokens_around"], scale["source"]) == (1.0, 5.0, "the usage of two requests")
    assert (report["model"], report["notes"], report["num_processes"]) == ("first", [], 2)
    for one in report["runs"]:
        assert (one["num_succeeded"], one["num_failed"], one["errors"], one["cached_tokens"]) == (4, 0, {}, None)
        assert one["num_events"] == one["output_tokens"] == sum(call.body["max_tokens"] for call in server.load[:4])
    assert {call.headers["authorization"] for call in server.calls} == {"Bearer secret"}
    assert all(call.body["model"] == "first" and call.body["ignore_eos"] is True for call in server.load)
    prompts = [call.body["messages"][0]["content"] for call in server.load]
    assert len(set(prompts)) == len(prompts) == 8
    assert all(8 <= len(prompt.split()) + 5 <= 16 for prompt in prompts)
    assert server.num_connections == 1 + 2 + 2  # one to ask, one for each stream of each run


def test_turns_resend_the_answers_that_came():
    with hand_made(behave) as server:
        report = measure(server, streams=1, requests_per_stream=1, turns=3)
    assert report["runs"][0]["num_succeeded"] == 3
    first, second, third = (call.body for call in server.load)
    assert len(third["messages"]) == 5
    assert third["messages"][:3] == second["messages"]
    assert second["messages"][:2] == [*first["messages"], {"role": "assistant", "content": "x" * first["max_tokens"]}]


def refuse(*names: str) -> Callable[[Call], None]:
    def answer(call: Call) -> None:
        for name in names:
            if name in call.body:
                call.reply("400 Bad Request", {"error": {"message": f"Unsupported parameter: {name}."}})
                return
        behave(call)

    return answer


def test_fields_that_are_refused_by_name_are_left_out_and_that_is_told():
    with hand_made(refuse("ignore_eos", "stream_options")) as server:
        report = measure(server)
    one = report["runs"][0]
    assert (one["num_succeeded"], one["num_failed"], one["num_without_usage"]) == (4, 0, 4)
    assert one["output_tokens"] == one["num_events"] == sum(call.body["max_tokens"] for call in server.load)
    assert [note.partition(":")[0] for note in report["notes"]] == ["the server refuses ignore_eos", "the server refuses stream_options"]
    assert report["request"] == {"path": CHAT, "limit": "max_tokens"}
    assert report["prompt_scale"]["source"].startswith("an approximation")


def test_a_server_that_wants_another_name_for_the_limit_gets_it():
    def answer(call: Call) -> None:
        if "max_tokens" in call.body:
            call.reply("400 Bad Request", {"error": {"message": "max_tokens is not supported, use max_completion_tokens"}})
        else:
            behave(call)

    with hand_made(answer) as server:
        report = measure(server)
    assert (report["runs"][0]["num_succeeded"], report["request"]["limit"]) == (4, "max_completion_tokens")


def status(code: str) -> Callable[[Call], None]:
    return lambda call: call.reply(code, {"error": {"message": "no, thank you"}}, "Retry-After: 1")


def break_off(call: Call) -> None:
    call.begin(3)
    call.close()


def reset(call: Call) -> None:
    call.begin(3)
    call.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    call.close()


def end_without_ending(call: Call) -> None:
    call.begin(3)
    call.send(b"0\r\n\r\n")


def fail_in_the_stream(call: Call) -> None:
    call.begin(3)
    call.event({"error": {"message": "the engine is tired"}})
    call.close()


FAULTS = {
    "401": (status("401 Unauthorized"), "HTTP 401", "no, thank you"),
    "404": (status("404 Not Found"), "HTTP 404", "no, thank you"),
    "429": (status("429 Too Many Requests"), "HTTP 429", "no, thank you"),
    "500": (status("500 Internal Server Error"), "HTTP 500", "no, thank you"),
    "breaks off": (break_off, "closed in mid-answer", "closed"),
    "resets": (reset, "closed in mid-answer", ""),
    "hangs up": (Call.close, "closed before an answer", "closed"),
    "no ending": (end_without_ending, "stream without an ending", "finish_reason"),
    "error event": (fail_in_the_stream, "error event", "the engine is tired"),
    "no HTTP": (lambda call: call.send(b"220 mail.example.org ESMTP\r\n"), "malformed answer", "220 mail"),
    "whole answer": (lambda call: call.reply("200 OK", {"choices": []}), "not a stream", "choices"),
}


SIMILAR = ("401", "404", "500", "resets")
"""To 429 and to an answer that breaks off"""


@pytest.mark.parametrize(
    ("misbehave", "kind", "words"),
    [pytest.param(*fault, id=name, marks=pytest.mark.slow if name in SIMILAR else ()) for name, fault in FAULTS.items()],
)
def test_a_failure_is_counted_by_its_name(misbehave, kind, words):
    with hand_made(instead(misbehave)) as server:
        report = measure(server)
    one = report["runs"][0]
    assert (one["num_succeeded"], one["num_failed"], one["output_tokens"], one["ttft_ms"]) == (0, 4, 0, None)
    assert [(name, found["count"]) for name, found in one["errors"].items()] == [(kind, 4)]
    assert words in one["errors"][kind]["first"]
    assert len(server.load) == 4


def test_failures_do_not_hide_what_succeeds():
    def answer(call: Call) -> None:
        (status("429 Too Many Requests") if call.is_load and call.body["max_tokens"] % 2 else behave)(call)

    with hand_made(answer) as server:
        report = measure(server, streams=3, requests_per_stream=4)
    one = report["runs"][0]
    num_odd = sum(call.body["max_tokens"] % 2 for call in server.load)
    assert 0 < num_odd < 12
    assert (one["num_succeeded"], one["num_failed"]) == (12 - num_odd, num_odd)
    assert one["output_tokens"] == sum(call.body["max_tokens"] for call in server.load if call.body["max_tokens"] % 2 == 0)


def test_after_a_failed_turn_the_rest_of_the_conversation_is_not_sent():
    with hand_made(instead(status("500 Internal Server Error"))) as server:
        report = measure(server, turns=3)
    one = report["runs"][0]
    assert (one["num_failed"], one["num_not_sent"], len(server.load)) == (4, 8, 4)


def test_a_server_that_hangs_is_a_counted_failure():
    def hang(call: Call) -> None:
        call.begin(2)
        server.stop.wait()

    with hand_made(instead(hang)) as server:
        report = measure(server, timeout=0.5, streams=3, requests_per_stream=1)
    one = report["runs"][0]
    assert (one["num_succeeded"], list(one["errors"])) == (0, ["timed out"])
    assert "--timeout" in one["errors"]["timed out"]["first"]


def test_a_server_that_never_answers_at_all_is_a_counted_failure():
    with hand_made(lambda call: server.stop.wait()) as server:
        report = measure(server, timeout=0.3)
    assert list(report["runs"][0]["errors"]) == ["timed out"]


def test_a_stream_without_an_end_is_a_counted_failure():
    def go_on(call: Call) -> None:
        call.begin(1)
        while not server.stop.wait(0.01):
            call.event({"choices": [{"delta": {"content": "x"}}]})

    with hand_made(instead(go_on)) as server:
        report = measure(server, timeout=0.5, streams=1, requests_per_stream=1)
    assert list(report["runs"][0]["errors"]) == ["timed out"]


def test_after_a_request_that_timed_out_the_next_one_goes_on_another_connection():
    def hang_once(call: Call) -> None:
        if len(server.load) > 1:
            behave(call)
        else:
            call.begin(2)
            server.stop.wait()

    with hand_made(instead(hang_once)) as server:
        one = measure(server, timeout=2.0, streams=1)["runs"][0]
    assert (one["num_succeeded"], list(one["errors"])) == (1, ["timed out"])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_connection_that_was_closed_while_idle_is_no_failure(is_late):
    used = set()

    def answer(call: Call) -> None:
        if call.connection in used:  # the close crosses the request
            call.close()
            return
        behave(call)
        if is_late:
            used.add(call.connection)
        else:
            call.close()  # without having said so

    with hand_made(answer) as server:
        report = measure(server, streams=2, requests_per_stream=5)
    assert (report["runs"][0]["num_succeeded"], report["runs"][0]["num_failed"]) == (10, 0)
    assert len(server.load) == (18 if is_late else 10)


def test_a_server_that_is_too_busy_when_it_is_asked_is_measured_all_the_same():
    def answer(call: Call) -> None:
        (behave if call.is_load or call.path != CHAT else status("503 Service Unavailable"))(call)

    with hand_made(answer) as server:
        report = measure(server)
    assert report["runs"][0]["num_succeeded"] == 4
    assert "HTTP 503, no, thank you" in report["notes"][0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("words", [[], ["--model", "m"]])
def test_a_server_that_is_not_there_is_one_named_failure_and_status_1(capsys, words):
    assert main(["bench", "serve", "--url", f"http://127.0.0.1:{free_port()}", *words]) == 1
    shown = capsys.readouterr().out
    assert "connection refused: 1" in shown
    assert shown.endswith("no request has succeeded\n")


@pytest.mark.parametrize("code", ["401 Unauthorized", "404 Not Found", "500 Internal Server Error"])
def test_a_server_that_tells_no_model_is_one_named_failure(capsys, code):
    with hand_made(status(code)) as server:
        assert main(["bench", "serve", "--url", server.url]) == 1
    shown = capsys.readouterr().out
    assert f"HTTP {code[:3]}: 1, the first: no, thank you (asked for /v1/models; --model NAME goes without it)" in shown


def test_a_server_without_models_is_told():
    with hand_made(lambda call: call.reply("200 OK", {"data": []})) as server:
        assert list(measure(server)["runs"][0]["errors"]) == ["no model"]


def test_a_host_that_does_not_exist_is_told():
    setup = Setup(parse_url("http://no-such-host.invalid"), timeout=30.0, repeats=1)
    found = run(setup, Options(), say=lambda line: None)["runs"][0]["errors"]
    assert len(found) == 1
    assert set(found) <= {"host not found", "timed out"}


def test_a_server_that_talks_no_tls_is_told():
    def hello() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            while connection.recv(1000):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hello)
        thread.start()
        setup = Setup(parse_url(f"https://127.0.0.1:{listener.getsockname()[1]}"), timeout=10.0, repeats=1)
        found = run(setup, Options(), say=lambda line: None)["runs"][0]["errors"]
        thread.join()
    assert list(found) == ["TLS failed"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_a_server_with_tls_is_measured_if_its_certificate_is_trusted(tmp_path, monkeypatch):
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with hand_made(behave, context) as server:
        assert list(measure(server)["runs"][0]["errors"]) == ["TLS failed"]
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        assert measure(server)["runs"][0]["num_succeeded"] == 4


def test_a_client_process_that_dies_ends_the_program(monkeypatch):
    monkeypatch.setattr(serve_processes.sys, "executable", "/bin/false")
    with hand_made(behave) as server, pytest.raises(WorkerError, match="client process has ended with status 1"):
        measure(server)


@contextlib.contextmanager
def started_bench(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "minisgl", "bench", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stop_after(number: int, server: Callable[[], HandMade]) -> Callable[[Call], None]:
    """So many requests of the load are answered; the others get two events."""

    def answer(call: Call) -> None:
        if call.is_load and len(server().load) > number:
            call.begin(2)
            server().stop.wait()
        else:
            behave(call)

    return answer


LOAD = ["--streams", "2", "--requests-per-stream", "50", "--ramp-up", "0", "--prompt-tokens", "8:16", "--answer-tokens", "12:20"]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_ctrl_c_ends_with_a_report_of_what_there_is(tmp_path):
    path = tmp_path / "report.json"
    with (
        hand_made(stop_after(10, lambda: server)) as server,
        started_bench("--url", server.url, *LOAD, "--json", str(path)) as process,
    ):
        assert wait_until(lambda: len(server.load) == 12, 60)
        children = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 130
    assert err == ""
    assert "run 1 of 3, interrupted" in out
    assert "10 succeeded, 0 failed" in out
    assert "2 interrupted, 88 not sent" in out
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["is_interrupted"] is True
    assert (len(report["runs"]), report["runs"][0]["num_succeeded"]) == (1, 10)
    assert children
    assert not any(map(is_running, children))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_client_processes_do_not_outlive_the_program():
    with hand_made(stop_after(4, lambda: server)) as server, started_bench("--url", server.url, *LOAD) as process:
        assert wait_until(lambda: len(server.load) == 6, 60)
        children = children_of(process.pid)
        process.kill()
        assert children
        assert wait_until(lambda: not any(map(is_running, children)))
