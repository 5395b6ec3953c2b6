"""`minisgl chat` as a user has it: the program in a pseudo-terminal or behind a pipe, with a scripted server, our own, or a tiny model."""

from __future__ import annotations

import io
import json
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from minisgl.chat.backend import AnswerError, LocalBackend
from minisgl.chat.openai_server import ServerBackend, connect
from minisgl.chat.parameters import KINDS, read_params
from minisgl.chat.program import Conversation
from minisgl.chat.terminal import Display, printable
from minisgl.cli import main
from minisgl.core import SamplingParams
from minisgl.errors import ConfigError, InvalidInputError
from minisgl.llm import LLM
from tests.server.server_process import server_process, wait_until, write_byte_model
from tests.tools.openai_server import Exchange, fake_server
from tests.tools.terminal import CTRL_C, CTRL_D, META_ENTER, WAIT_S, terminal

SMALL = {"num_pages": 200, "max_seq_len": 2000}
SMALL_FLAGS = ["--num-pages", "200", "--max-seq-len", "2000"]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("MINISGL_API_KEY", raising=False)
    with fake_server() as fake:
        yield fake


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """The user's state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def screen(server, state):
    """The program at its first prompt, talking to the scripted server."""
    with terminal(["-m", "minisgl", "chat", server.url]) as shown:
        shown.expect(f"fake-model at {server.url}: /help")
        shown.expect_prompt()
        yield shown


def leave(screen) -> None:
    screen.expect_prompt()
    screen.type(CTRL_D)
    assert screen.wait_for_exit() == 0


def contents(body) -> list[str]:
    return [message["content"] for message in body["messages"]]


# On a terminal, with a server.


def test_an_answer_is_shown_while_it_is_written_and_the_conversation_goes_on(screen, server):
    go_on = threading.Event()

    def slowly(exchange: Exchange) -> None:
        exchange.begin()
        exchange.text("The first half")
        assert go_on.wait(WAIT_S)
        exchange.text(", the second.")
        exchange.text(None, "stop")
        exchange.event("[DONE]")

    server.answers.put(slowly)
    screen.send("Tell me")
    screen.expect("The first half")
    go_on.set()
    screen.expect(", the second.")
    screen.expect_prompt()
    screen.send("And now?")
    screen.expect("you said And now?.")
    leave(screen)
    assert server.bodies[0] == {"model": "fake-model", "messages": [{"role": "user", "content": "Tell me"}], "stream": True}
    assert contents(server.bodies[1]) == ["Tell me", "The first half, the second.", "And now?"]
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]


def test_meta_enter_and_a_backslash_continue_on_the_next_line(screen, server):
    screen.type("one" + META_ENTER + "two\\")
    screen.send("")
    screen.expect(". ")
    screen.send("  three")
    screen.expect("you said one")
    leave(screen)
    assert contents(server.bodies[0]) == ["one\ntwo\n  three"]


def test_ctrl_c_stops_the_answer_and_not_the_program(screen, server):
    left = threading.Event()

    def endless(exchange: Exchange) -> None:
        exchange.begin()
        exchange.text("half an ans")
        if exchange.is_left():
            left.set()

    server.answers.put(endless)
    screen.send("Go")
    screen.expect("half an ans")
    screen.type(CTRL_C)
    screen.expect("[stopped]")
    assert left.wait(WAIT_S)
    screen.expect_prompt()
    screen.send("more")
    screen.expect("you said more.")
    leave(screen)
    assert contents(server.bodies[1]) == ["Go", "half an ans", "more"]


def test_ctrl_c_before_the_first_token_takes_the_message_back(screen, server):
    asked = threading.Event()

    def silent(exchange: Exchange) -> None:
        asked.set()
        exchange.is_left()

    server.answers.put(silent)
    screen.send("Go")
    assert asked.wait(WAIT_S)
    screen.type(CTRL_C)
    screen.expect("[stopped; the message is not kept]")
    screen.expect_prompt()
    screen.send("more")
    screen.expect("you said more.")
    leave(screen)
    assert contents(server.bodies[1]) == ["more"]


def test_ctrl_c_at_the_prompt_clears_the_line(screen, server):
    screen.type("nonsense" + CTRL_C)
    screen.send("sense")
    screen.expect("you said sense.")
    screen.expect_prompt()
    screen.type(CTRL_C)
    screen.process.send_signal(signal.SIGINT)
    screen.send("still here")
    screen.expect("you said still here.")
    leave(screen)
    assert contents(server.bodies[0]) == ["sense"]


def test_every_command(screen, server, tmp_path):
    saved = tmp_path / "saved.json"

    def command(line: str, *answers: str) -> None:
        screen.send(line)
        for answer in answers:
            screen.expect(answer)
        screen.expect_prompt()

    command("/help", "/reset", "/system", "/params", "/save", "/help", "/exit", "Ctrl-C stops an answer.")
    command("/system", "no system message")
    command("/system Be terse.", "from the next message on")
    command("/system", "\nBe terse.")
    command('/params temperature=0.5 stop="a b" max_tokens=20', '"max_tokens": 20}')
    command("/params", "temperature", " 0.5", "top_p", "the server's default", "stop", '["a b"]')
    command("hello", "you said hello.")
    command("//not a command", "you said /not a command.")
    command(f"/save {saved}", "[saved 4 messages to")
    command(f"/save {saved}", f"error: /save: {saved} exists; /save -f {saved} overwrites it")
    command("/reset", "[a new conversation; system message")
    command(f"/save -f {saved}", "[saved 0 messages to")
    command("/params temperature=", '"max_tokens": 20}')
    command("again", "you said again.")
    command("/reset all", "[a new conversation]")
    command("last", "you said last.")
    screen.send("/exit")
    assert screen.wait_for_exit() == 0
    system = {"role": "system", "content": "Be terse."}
    assert server.bodies[0] == {
        **{"model": "fake-model", "stream": True, "temperature": 0.5, "stop": ["a b"], "max_tokens": 20},
        "messages": [system, {"role": "user", "content": "hello"}],
    }
    assert contents(server.bodies[1]) == ["Be terse.", "hello", "you said hello.", "/not a command"]
    assert server.bodies[2]["messages"] == [system, {"role": "user", "content": "again"}]
    assert "temperature" not in server.bodies[2]
    assert server.bodies[3] == {"model": "fake-model", "messages": [{"role": "user", "content": "last"}], "stream": True}
    assert json.loads(saved.read_text()) == {
        "model": f"fake-model at {server.url}",
        "params": {"temperature": 0.5, "stop": ["a b"], "max_tokens": 20},
        "messages": [system],
    }


def test_errors_are_told_in_a_line_and_the_conversation_goes_on(screen, server):
    def breaks_off(exchange: Exchange) -> None:
        exchange.begin()
        exchange.text("a part")

    def error_event(exchange: Exchange) -> None:
        exchange.begin()
        exchange.event('{"error": {"message": "the engine died"}}')

    steps = [
        (lambda e: e.status(400, b'{"error": {"message": "too long:\\n 9 tokens"}}'), "error: the server says 400: too long: 9 tokens"),
        (lambda e: e.status(502, b"<html>"), "error: the server says 502: Bad Gateway"),
        (lambda e: e.status(301, b"", Location="http://127.0.0.1:9/"), "error: the server says 301: Moved Permanently"),
        (error_event, "error: the answer broke off: the engine died"),
        (lambda e: (e.begin(), e.event("[1]")), "error: the server sent what no OpenAI-compatible server sends: "),
        (lambda e: None, "error: no answer from 127.0.0.1, port "),
        (breaks_off, "a part\r\n"),
    ]
    for act, told in steps:
        server.answers.put(act)
        screen.send("Go")
        screen.expect(told)
        screen.expect_prompt()
    screen.send("more")
    screen.expect("you said more.")
    leave(screen)
    assert "error: the answer broke off: the server closed the connection" in screen.text
    assert contents(server.bodies[-1]) == ["Go", "a part", "more"]


def test_an_unknown_command_names_the_nearest(screen, server):
    for typed, told in [
        ("/rest", "error: /rest is no command; did you mean /reset? /help tells all"),
        ("/xyzzy", "error: /xyzzy is no command; /help tells all"),
        ("/help me", "error: /help: 'me' found; nothing is wanted behind it"),
        ("/reset it", "error: /reset: 'it' found"),
        ("/save", "error: /save: nothing found"),
        ("/save /no/such/folder/file", "error: /save: /no/such/folder/file: No such file or directory"),
        ("/params temprature=1", "error: 'temprature' is no parameter; did you mean temperature?"),
        ("/params max_tokens=9 temperature=9", "error: temperature: 9.0 found; 0 to 2 is allowed"),
    ]:
        screen.send(typed)
        screen.expect(told)
        screen.expect_prompt()
    screen.send("hello")
    screen.expect("you said hello.")
    leave(screen)
    assert "max_tokens" not in server.bodies[0]


def test_nothing_that_a_model_or_a_server_says_steers_the_terminal(screen, server):
    evil = ["\x1b", "]0;title\x07 \x1b[2J\x1b[31m red \x9b31m", " a\rb \x08\x7f\x00", " [bold]x[/bold] :smile: \x1b]52;c;aGk=\x07 end"]
    server.answers.put(lambda exchange: exchange.answer(*evil))
    server.answers.put(lambda exchange: exchange.status(400, json.dumps({"error": {"message": "\x1b[2J[red]no[/]"}}).encode()))
    screen.send("Go")
    screen.expect("␛]0;title␇ ␛[2J␛[31m red �31m ab ␈␡␀ [bold]x[/bold] :smile: ␛]52;c;aGk=␇ end")
    screen.expect_prompt()
    screen.send("Go")
    screen.expect(" the server says 400: ␛[2J[red]no[/]")
    leave(screen)
    assert not [text for text in ("\x07", "\x9b", "\x1b]", "\x1b[2J", "\x1b[31m") if text in screen.raw]
    assert contents(server.bodies[1])[1] == "".join(evil)


def test_the_history_is_kept_for_the_user_alone(server, state):
    words = ["-m", "minisgl", "chat", server.url]
    kept = state / "minisgl" / "chat_history"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    kept.chmod(0o644)
    with terminal(words) as screen:
        screen.expect_prompt()
        screen.send("remember this")
        screen.expect("you said remember this.")
        leave(screen)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with terminal([*words, "--no-history"]) as screen:
        screen.expect_prompt()
        screen.send("forget this")
        screen.expect("you said forget this.")
        leave(screen)
    assert "remember this" in kept.read_text()
    assert "forget this" not in kept.read_text()
    with terminal(words) as screen:
        screen.expect_prompt()
        screen.type("\x1b[A")
        screen.expect("remember this")
        screen.send("")
        screen.expect("you said remember this.")
        leave(screen)


def test_a_history_that_cannot_be_kept_is_told_and_does_without(server, tmp_path, state):
    state.write_text("a file where a directory should be")
    with terminal(["-m", "minisgl", "chat", server.url]) as screen:
        screen.expect("error: no history: ")
        screen.expect_prompt()
        screen.send("hello")
        screen.expect("you said hello.")
        leave(screen)


# On a terminal, with our own server and with a model in the process.


@pytest.mark.slow  # by default the server is a scripted one
def test_our_own_server_stops_refuses_and_dies_without_ending_the_conversation(tmp_path, state):
    with server_process(write_byte_model(tmp_path / "model"), FAKE_CONTEXT="5000") as server:
        server.wait_until_ready()

        def num_running() -> int:
            return httpx.get(f"{server.url}/health/progress").json()["num_requests"]

        with terminal(["-m", "minisgl", "chat", f"{server.url}/v1/"]) as screen:
            screen.expect_prompt()
            screen.send("/params max_tokens=5")
            screen.expect_prompt()
            screen.send("count")
            screen.expect("\nxxxxx\r\n")
            screen.expect("[cut at max_tokens")
            screen.expect_prompt()
            screen.send("/params max_tokens=100000")
            screen.expect_prompt()
            screen.send("on")
            screen.expect("\nxxxxxxxxxx")
            screen.type(CTRL_C)
            screen.expect("[stopped]")
            assert wait_until(lambda: num_running() == 0)
            screen.expect_prompt()
            screen.paste("w" * 6000)
            screen.send("")
            screen.expect("error: the server says 4")
            screen.expect_prompt()
            server.clean_up()
            screen.send("anyone?")
            screen.expect("error: no answer from 127.0.0.1")
            leave(screen)


@pytest.fixture(scope="module")
def model(tiny_models) -> str:
    return str(tiny_models("llama"))


def test_a_model_in_this_process_is_stopped_and_goes_on_exactly_from_there(model, state, tmp_path):
    saved = tmp_path / "saved.json"
    question = {"role": "user", "content": "Tell me about the sea."}
    with LLM(model, **SMALL) as llm:
        first = printable(llm.chat([question], SamplingParams(max_tokens=8)).text)
        with terminal(["-m", "minisgl", "--model", model, "--shell", *SMALL_FLAGS]) as screen:
            screen.expect_prompt()
            screen.send("/params temperature=0 max_tokens=1900 ignore_eos=true")
            screen.expect_prompt()
            screen.send(question["content"])
            screen.expect(first.replace("\n", "\r\n"))
            screen.type(CTRL_C)
            screen.expect("[stopped]")
            screen.expect_prompt()
            screen.send(f"/save {saved}")
            screen.expect("[saved 2 messages")
            screen.expect_prompt()
            screen.send("/params max_tokens=8")
            screen.expect_prompt()
            messages = json.loads(saved.read_text())["messages"]
            said = [{"role": each["role"], "content": each["content"]} for each in messages]
            wanted = printable(llm.chat([*said, question], SamplingParams(max_tokens=8, ignore_eos=True)).text)
            screen.send(question["content"])
            screen.expect(wanted.replace("\n", "\r\n"))
            screen.expect("[cut at max_tokens")
            screen.expect_prompt()
            screen.paste("word " * 3000)
            screen.send("")
            screen.expect("error: the prompt has ")
            leave(screen)
    assert messages[0] == question
    assert messages[1]["finish_reason"] == "abort"


@pytest.mark.parametrize("step", [0, 3])
def test_ctrl_c_frees_the_pages_of_a_model_in_this_process(model, monkeypatch, step):
    with LLM(model, **SMALL) as llm:
        submit, steps = llm.scheduler.engine.submit, iter(range(step))

        def interrupted(batch):
            if next(steps, None) is None:
                monkeypatch.setattr(llm.scheduler.engine, "submit", submit)
                signal.raise_signal(signal.SIGINT)
            return submit(batch)

        monkeypatch.setattr(llm.scheduler.engine, "submit", interrupted)
        out, err = io.StringIO(), io.StringIO()
        conversation = Conversation(LocalBackend(llm, "tiny", {"temperature": 0}), Display(out, err), is_interactive=True)
        conversation.take("Tell me about the sea.")
        assert "[stopped" in err.getvalue()
        assert llm.scheduler.is_idle
        llm.scheduler.check_integrity()
        llm.scheduler.reset_prefix_cache()
        llm.scheduler.check_integrity()
        assert [message.get("finish_reason") for message in conversation.messages] == ([None, "abort"] if step else [])


class InterruptedScreen(io.StringIO):
    """Ctrl-C comes while the first piece of an answer is being shown, outside of the engine."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            super().write(text)
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_between_two_steps_frees_the_pages_too(model):
    with LLM(model, **SMALL) as llm:
        streams = []

        class Watched:
            def stream(self, *arguments):
                streams.append(llm.stream(*arguments))  # a reference that keeps it from being closed by chance
                return streams[-1]

        conversation = Conversation(LocalBackend(Watched(), "tiny", {}), Display(InterruptedScreen(), io.StringIO()), is_interactive=True)
        conversation.take("Tell me about the sea.")
        assert conversation.messages[1]["finish_reason"] == "abort"
        assert llm.scheduler.is_idle
        llm.scheduler.check_integrity()
        assert list(streams[0]) == []


# Without a terminal.


def chat(text: str | bytes, *words: str) -> subprocess.CompletedProcess[str]:
    given = text.encode() if isinstance(text, str) else text
    done = subprocess.run([sys.executable, "-m", "minisgl", "chat", *words], input=given, capture_output=True, check=False, timeout=WAIT_S)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_lines_from_a_pipe_are_answered_in_plain_text(server, state):
    done = chat("one\n\n/params temperature=0\ntwo\\\nthree", server.url)
    assert (done.returncode, done.stdout) == (0, "you said one.\nyou said two\nthree.\n")
    assert done.stderr == '[set: {"temperature": 0.0}]\n'
    assert contents(server.bodies[1]) == ["one", "you said one.", "two\nthree"]
    assert not state.exists()


def test_a_failure_behind_a_pipe_is_status_1_at_the_end(server, state):
    server.answers.put(lambda exchange: exchange.status(400, b'{"error": "no"}'))
    done = chat(b"\xff\ntwo\n", server.url)
    assert (done.returncode, done.stdout, done.stderr) == (1, "you said two.\n", "error: the server says 400: no\n")
    assert contents(server.bodies[0]) == ["�"]


def test_ctrl_c_behind_a_pipe_ends_the_program_and_the_request(server):
    reached, left = threading.Event(), threading.Event()

    def endless(exchange: Exchange) -> None:
        exchange.begin()
        reached.set()
        if exchange.is_left():
            left.set()

    server.answers.put(endless)
    command = [sys.executable, "-m", "minisgl", "chat", server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        assert reached.wait(WAIT_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
        assert left.wait(WAIT_S)
        assert process.stderr.read() == b""
    assert len(server.requests) == 1


def test_a_server_that_is_not_there_is_one_line_and_status_1(state):
    done = chat("hello\n", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no answer from 127.0.0.1, port 9: Connection refused\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chat", "http://"], "'http://' found"),
        (["chat", "http://h:99999"], "http://h:99999"),
        (["chat", "http://user:word@h"], "a host and at most a port"),
        (["chat", "https://h/v1?a=b"], "a host and at most a port"),
        (["chat", "http://127.0.0.1:9", "--api-key", "k\n"], "--api-key"),
        (["chat", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype has no effect with a URL"),
        (["chat", "http://127.0.0.1:9", "--dummy-weight"], "--dummy-weight has no effect with a URL"),
        (["chat", "/no/such/model", "--api-key", "k"], "--api-key has no effect without a URL"),
        (["chat", "/no/such/model"], "/no/such/model"),
        (["chat", "a", "--model", "b"], "name one model"),
        (["chat", "--page-size", "-1"], "--page-size"),
        (["serve", "--shell", "--port", "5"], "--port has no effect with --shell"),
    ],
)
def test_a_wrong_request_is_one_line_and_status_2(words, told, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(words) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("\n") == 1


def test_a_server_needs_neither_torch_nor_other_commands_the_terminal(server, state):
    code = (
        "import sys; from minisgl.cli import main; status = main(sys.argv[1:]); print({'torch', 'rich', 'prompt_toolkit'} & {*sys.modules})"
    )
    for words, wanted in [(["chat", server.url], {"rich", "prompt_toolkit"}), (["generate", " "], set())]:
        done = subprocess.run([sys.executable, "-c", code, *words], input="", capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert eval(done.stdout) == wanted, done.stderr


# The parts.


def test_the_key_and_the_name_of_the_model_are_sent(server):
    backend = connect(f"{server.url}/v1/chat/completions", "another", "secret")
    assert [piece.text for piece in backend.answer([{"role": "user", "content": "hi"}], {})] == ["you said ", "hi", ".", ""]
    assert server.requests[0].headers["Authorization"] == "Bearer secret"
    assert server.bodies[0]["model"] == "another"


def test_a_server_without_a_list_of_models_gets_no_name(server):
    server.models = lambda exchange: exchange.status(404, b"")
    list(connect(server.url).answer([{"role": "user", "content": "hi"}], {}))
    assert "model" not in server.bodies[0]
    server.models = lambda exchange: exchange.status(401, b'{"error": {"message": "no key"}}')
    with pytest.raises(AnswerError, match="401: no key"):
        connect(server.url)
    server.models = lambda exchange: exchange.status(200, b"<html>")
    with pytest.raises(AnswerError, match="no OpenAI-compatible"):
        connect(server.url)


@pytest.mark.parametrize(
    ("lines", "pieces"),
    [
        (b'data:{"choices":[{"delta":{"content":"a"}}]}\r\n\r\ndata: [DONE]\r\n\r\n', [("a", None), ("", "stop")]),
        (b': ping\n\nevent: x\ndata: {"choices":[],"usage":{}}\n\ndata: {"choices":null}\n\ndata: [DONE]\n\n', [("", "stop")]),
        (b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\ndata: [DONE]\n\n', [("", "stop")]),
        (b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"length"}]}\n\n', [("a", None), ("", "length")]),
        (b'data: {"choices":[{"delta":{"content":"\xe4\xb8\x96"}}]}\n\ndata: [DONE]', [("世", None), ("", "stop")]),
    ],
)
def test_streams_of_other_servers_are_understood(server, lines, pieces):
    server.answers.put(lambda exchange: exchange.status(200, lines))
    answer = ServerBackend(server.url, None, None).answer([], {})
    assert [(piece.text, piece.finish_reason) for piece in answer] == pieces


@pytest.mark.parametrize(
    "lines", [b"", b"data: {}\n\n", b"data: {\n\n", b"data: " + b"[" * 10000, b"data: " + b"x" * 2**21, b"data: \xff\n"]
)
def test_streams_that_make_no_sense_are_answer_errors(server, lines):
    server.answers.put(lambda exchange: exchange.status(200, lines))
    with pytest.raises(AnswerError):
        list(ServerBackend(server.url, None, None).answer([], {}))


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("temperature=0.7 max_tokens=200", {"temperature": 0.7, "max_tokens": 200, "seed": 1}),
        ("seed=", {}),
        ("ignore_eos=TRUE seed=2", {"ignore_eos": True, "seed": 2}),
        ("stop=END", {"stop": ["END"], "seed": 1}),
        ("stop=1", {"stop": ["1"], "seed": 1}),
        (r"""stop='"\n"'""", {"stop": ["\n"], "seed": 1}),
        ("""stop='["a", "b"]'""", {"stop": ["a", "b"], "seed": 1}),
    ],
)
def test_parameters_are_read(text, params):
    assert read_params(text, {"seed": 1}) == params


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("temperature", "NAME=VALUE is wanted"),
        ("temperature=warm", "temperature: 'warm' found; a number is wanted"),
        ("temperature=nan", "temperature: nan found"),
        ("max_tokens=1.5", "max_tokens: '1.5' found; an integer is wanted"),
        ("max_tokens=0", "max_tokens: 0 found"),
        ("ignore_eos=1", "true or false is wanted"),
        ("stop='[1]'", "stop: 1 found"),
        ("stop='a", "No closing quotation"),
        ("n=2", "'n' is no parameter; known are temperature"),
    ],
)
def test_wrong_parameters_are_told(text, told):
    with pytest.raises(InvalidInputError, match=told.replace("[", r"\[")):
        read_params(text, {})


def test_every_parameter_is_one_of_a_request():
    assert set(KINDS) <= set(SamplingParams.__dataclass_fields__)


def test_text_is_written_once_and_as_it_is():
    out = io.StringIO()
    display = Display(out, io.StringIO())
    pieces = ["a\tb", " " * 200, "\n\n", "[b]c[/b]", "d" * 300, "世界👍🏽 \n"]
    for piece in pieces:
        display.write(piece)
    display.end_line()
    assert out.getvalue() == "".join(pieces)


def test_no_control_character_is_printable():
    text = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0xD83D]))
    assert {character for character in printable(text) if not character.isprintable()} == {"\t", "\n"}


def test_a_key_that_no_header_can_hold_is_refused():
    with pytest.raises(ConfigError, match="--api-key"):
        ServerBackend("http://h", None, "schlüssel")
