"""`LLM(tp_size=N)`: what one rank says, N ranks say; however it ends, no process and no file is left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minisgl.bench.offline import Options, run
from minisgl.cli import main
from minisgl.core import SamplingParams
from minisgl.errors import ClosedError, ConfigError, RequestError, WorkerError
from minisgl.llm import LLM, ranks
from minisgl.llm.llm import MOST_PROMPTS_AT_ONCE
from minisgl.llm.output import Output
from minisgl.utils import run_directory
from tests.llm.conftest import SMALL
from tests.llm.test_same_ids import REQUESTS, ids
from tests.server.server_process import END_S, is_running, wait_until
from tests.tools.markdown import code_blocks

pytestmark = [pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc"), pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
CHAT = [{"role": "user", "content": "Hello there"}]
SHORT = SamplingParams(ignore_eos=True, max_tokens=8)
LONG = SamplingParams(ignore_eos=True, max_tokens=1500)


def rank_pids(parent: int) -> set[int]:
    """Processes of ranks that `parent` has started and that run."""
    pids = {int(pid) for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()}
    return {pid for pid in pids if is_running(pid) and b"minisgl.processes.scheduler_process" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def files(suffix: str) -> list[str]:
    return [path.name for path in run_directory().glob(f"*{suffix}*")]


class Ranks:
    """An object with its processes, in the order of their ranks, and its files."""

    def __init__(self, model: Path, tp_size: int = 2, **settings) -> None:
        before = rank_pids(os.getpid())
        self.llm = LLM(model, tp_size=tp_size, **(SMALL | settings))
        self.suffix = self.llm.config._unique_suffix
        self.pids = sorted(rank_pids(os.getpid()) - before)
        assert len(self.pids) == tp_size

    def has_gone(self) -> bool:
        return wait_until(lambda: not any(map(is_running, self.pids)) and not files(self.suffix))


@pytest.fixture(scope="module")
def pair(tiny_models):
    """Two ranks of the model that `llm` computes on one."""
    made = Ranks(tiny_models("llama"))
    yield made.llm
    made.llm.close()
    assert made.has_gone()


@pytest.fixture
def make_ranks(tiny_models):
    made = []

    def make(model="llama", tp_size=2, **settings):
        made.append(Ranks(tiny_models(model), tp_size, **settings))
        return made[-1]

    yield make
    for each in made:
        each.llm.close()
        assert each.has_gone()


def token_ids(results):
    return [result.token_ids for result in results]


# ---- what is said -----------------------------------------------------------------------------------------------------------------


def test_greedy_and_seeded_ids_are_those_of_one_rank(pair, llm):
    prompts, own = zip(*REQUESTS, strict=True)
    assert token_ids(pair.generate(prompts, own)) == token_ids(llm.generate(prompts, own))


def test_texts_chats_and_choices_are_those_of_one_rank(pair, llm):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3)
    for prompts in ("Once upon a time", ["Hello", CHAT, [1, 2, 3]]):
        ours, theirs = pair.generate(prompts, params), llm.generate(prompts, params)
        assert [[choice.text for choice in result.choices] for result in ours] == [
            [choice.text for choice in result.choices] for result in theirs
        ]
    assert pair.chat(CHAT, SHORT).text == llm.chat(CHAT, SHORT).text
    assert pair.tokenizer.decode([5]) == llm.tokenizer.decode([5])


def test_prompts_beyond_those_tokenized_at_once_are_answered_though_all_before_them_failed(pair, llm):
    bad = [[-1]] * MOST_PROMPTS_AT_ONCE
    prompts = [*bad * 5, [1, 2, 3], *bad, [4, 5]]
    assert token_ids(pair.generate(prompts, SHORT)) == token_ids(llm.generate(prompts, SHORT))


def test_log_probabilities_are_those_of_one_rank(pair, llm):
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    ours, theirs = pair.generate(ids(40, 8), params)[0], llm.generate(ids(40, 8), params)[0]
    for name, count in (("logprobs", 5), ("prompt_logprobs", 39)):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        assert len(found) == count
        assert [entry.token_id for entry in found] == [entry.token_id for entry in wanted]
        assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in wanted], abs=1e-3)


def test_a_stop_string_cuts_the_text_alike_in_stream_and_plain(pair, llm):
    text = llm.generate("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True))[0].text
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=[text[7:10]])
    expected = llm.generate("Once upon a time", params)[0]
    plain, chunks = pair.generate("Once upon a time", params)[0], list(pair.stream("Once upon a time", params))
    assert (plain.text, plain.token_ids, plain.finish_reason) == (expected.text, expected.token_ids, "stop")
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].result.text == plain.text
    assert [token for chunk in chunks for token in chunk.token_ids] == plain.token_ids
    assert len(chunks) >= len(plain.token_ids)


def test_streams_and_calls_run_beside_each_other(pair, llm):
    alone = token_ids(llm.generate([[seed] * 5 for seed in (1, 2, 3)], SHORT))
    first, second = pair.stream([1] * 5, SHORT), pair.stream([2] * 5, SHORT)
    seen = [next(first).token_ids, next(second).token_ids]
    assert token_ids(pair.generate([3] * 5, SHORT)) == alone[2:]
    rest = [[token for chunk in stream for token in chunk.token_ids] for stream in (first, second)]
    assert [begun + more for begun, more in zip(seen, rest, strict=True)] == alone[:2]


def test_cached_tokens_are_told_also_where_a_stop_string_ends(pair):
    pair.reset_prefix_cache()
    first = pair.generate([5] * 40, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    again = pair.generate([5] * 40, SamplingParams(max_tokens=12, ignore_eos=True, stop=first.text[3:5]))[0]
    assert (first.num_cached_tokens, again.num_cached_tokens, again.finish_reason) == (0, 32, "stop")
    pair.reset_prefix_cache()
    assert pair.generate([5] * 40, SHORT)[0].num_cached_tokens == 0


def test_bad_prompts_among_good_ones_are_errors_of_their_own(pair, llm):
    results = pair.generate([[1, 2, 3], [], [4096], None, [7] * 3000, "Hello"], SHORT)
    assert token_ids([results[0], results[-1]]) == token_ids(llm.generate([[1, 2, 3], "Hello"], SHORT))
    assert [result.finish_reason for result in results[1:-1]] == ["error"] * 4
    assert "3000 tokens" in results[-2].error
    assert pair.generate([]) == []


def test_what_the_engine_offers_is_what_one_rank_offers(pair, llm):
    assert (pair.limits, pair.is_overlapped) == (llm.limits, llm.is_overlapped)
    assert pair.config.tp_info.size == 2
    assert pair.num_retractions == 0
    with pytest.raises(ConfigError, match=r"scheduler: with tp_size=2"):
        _ = pair.scheduler


def test_a_progress_bar_is_shown_where_asked_for(pair, capfd):
    pair.generate([[token] for token in range(10)], SHORT, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "10/10" in err


# ---- breaking off -----------------------------------------------------------------------------------------------------------------


def check_usable(llm: LLM, expected: list[int]) -> None:
    """Nothing runs on the ranks, and they compute what they did."""
    llm.reset_prefix_cache()
    assert llm.generate([1, 2, 3], SHORT)[0].token_ids == expected


def after(count, act, function):
    """`function`, which acts once: when it has been called `count` times."""
    left = iter(range(count + 1))

    def call(*arguments):
        if next(left, None) == count:
            act()
        return function(*arguments)

    return call


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_waiting_leaves_the_object_usable(pair, monkeypatch):
    expected = pair.generate([1, 2, 3], SHORT)[0].token_ids
    monkeypatch.setattr(ranks, "wait_any", after(5, interrupt, ranks.wait_any))
    with pytest.raises(KeyboardInterrupt):
        pair.generate([[5] * 40, [6] * 3], LONG)
    check_usable(pair, expected)


def test_ctrl_c_while_a_token_is_taken_keeps_a_stream_that_runs_beside(pair, monkeypatch):
    expected = pair.generate([1, 2, 3], SHORT)[0].token_ids
    stream = pair.stream([1, 2, 3], SHORT)
    tokens = next(stream).token_ids
    monkeypatch.setattr(Output, "take", after(3, interrupt, Output.take))
    with pytest.raises(KeyboardInterrupt):
        pair.generate([[5] * 40], LONG)
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == expected
    check_usable(pair, expected)


def test_what_goes_wrong_with_a_token_ends_all_and_leaves_the_object_usable(pair, monkeypatch):
    def fail():
        raise MemoryError("no memory for a text")

    expected = pair.generate([1, 2, 3], SHORT)[0].token_ids
    stream = pair.stream([1, 2, 3], LONG)
    next(stream)
    monkeypatch.setattr(Output, "take", after(3, fail, Output.take))
    with pytest.raises(MemoryError):
        pair.generate([[5] * 40], LONG)
    assert "no memory for a text" in list(stream)[-1].result.error
    check_usable(pair, expected)


def test_a_stream_that_is_closed_early_ends_on_the_ranks(pair):
    expected = pair.generate([1, 2, 3], SHORT)[0].token_ids
    stream = pair.stream([9] * 30, LONG)
    assert next(stream).token_ids
    with pytest.raises(RequestError, match="1 requests run"):
        pair.reset_prefix_cache()
    stream.close()
    check_usable(pair, expected)


# ---- the end ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/llm/test_stopped_ranks.py loses a rank by default, and tests/server/test_rank_faults.py kills one
def test_a_rank_that_is_killed_ends_every_request_with_the_cause(make_ranks):
    made = make_ranks()
    llm = made.llm
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    os.kill(made.pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=rf"the scheduler rank 1 process \(pid {made.pids[1]}\) died: it was ended by SIGKILL"):
        llm.generate([[5] * 40, [6] * 3], LONG)
    assert made.has_gone()
    assert time.monotonic() - begin < END_S
    (chunk,) = stream
    assert "scheduler rank 1" in chunk.result.error
    for use in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.limits, llm.reset_prefix_cache, llm.__enter__):
        with pytest.raises(ClosedError, match=r"closed, because the scheduler rank 1 process .* died"):
            use()
    llm.close()


PROGRAM = """
import os, sys
from minisgl.core import SamplingParams
from minisgl.llm import LLM
llm = LLM(sys.argv[1], tp_size=2, num_pages=64, max_running_req=4)
print(llm.config._unique_suffix, flush=True)
print(llm.generate([[1, 2, 3]], SamplingParams(ignore_eos=True, max_tokens=8))[0].token_ids, flush=True)
"""
"""Neither a guard for `__main__` nor a `close`."""


@contextlib.contextmanager
def from_stdin(program: str, model: Path):
    """`python - MODEL` with the program on its standard input, in a session of its own."""
    command = [sys.executable, "-W", "error", "-", str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as process:
        process.stdin.write(program)
        process.stdin.close()
        process.stdin = None
        try:
            yield process
        finally:
            process.kill()


def test_a_program_from_stdin_that_does_not_close_leaves_nothing(tiny_models, llm):
    with from_stdin(PROGRAM, tiny_models("llama")) as process:
        suffix = process.stdout.readline().strip()
        pids = rank_pids(process.pid)
        assert len(pids) == 2
        out, err = process.communicate(timeout=START_S)
        assert (process.returncode, err) == (0, "")
    assert json.loads(out) == llm.generate([1, 2, 3], SHORT)[0].token_ids
    assert not any(map(is_running, pids))
    assert files(suffix) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_program_that_is_killed_leaves_nothing(number, tiny_models):
    endless = PROGRAM + "llm.generate([[5] * 40] * 3, SamplingParams(ignore_eos=True, max_tokens=900))\n" * 100
    with from_stdin(endless, tiny_models("llama")) as process:
        suffix = process.stdout.readline().strip()
        process.stdout.readline()
        pids = rank_pids(process.pid)
        assert len(pids) == 2
        process.send_signal(number)
        assert wait_until(lambda: not any(map(is_running, pids)) and not files(suffix))
        assert process.wait(END_S) == -number


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_killed_while_it_starts_leaves_nothing(number, tiny_models):
    with from_stdin(PROGRAM, tiny_models("llama")) as process:
        assert wait_until(lambda: len(rank_pids(process.pid)) == 2, START_S)
        pids = rank_pids(process.pid)
        process.send_signal(number)
        assert process.wait(END_S) == -number
        assert wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_a_fork_that_ends_leaves_the_ranks_to_its_parent(tiny_models):
    fork = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    del llm\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(llm.generate([[1, 2, 3]], SamplingParams(ignore_eos=True, max_tokens=8))[0].token_ids)\n"
    )
    with from_stdin("import warnings\nwarnings.simplefilter('ignore')\n" + PROGRAM + fork, tiny_models("llama")) as process:
        out, err = process.communicate(timeout=START_S)
        assert process.returncode == 0, err
    suffix, first, second = out.splitlines()
    assert first == second
    assert files(suffix) == []


@pytest.mark.slow
def test_one_after_the_other_and_two_at_once(make_ranks, llm):
    expected = token_ids(llm.generate([[1, 2, 3], [4, 5]], SHORT))
    first = make_ranks()
    assert token_ids(first.llm.generate([[1, 2, 3], [4, 5]], SHORT)) == expected
    first.llm.close()
    first.llm.close()
    assert first.has_gone()
    one, other = make_ranks(), make_ranks("qwen2")
    stream = one.llm.stream([1, 2, 3], SHORT)
    tokens = next(stream).token_ids
    assert token_ids(other.llm.generate([1, 2, 3], SHORT)) != expected[:1]
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == expected[0]
    other.llm.close()
    assert other.has_gone()
    assert token_ids(one.llm.generate([[1, 2, 3], [4, 5]], SHORT)) == expected
    with pytest.raises(ClosedError):
        other.llm.generate([1])


@pytest.mark.slow
def test_an_object_that_is_forgotten_takes_its_processes_along(tiny_models):
    made = Ranks(tiny_models("llama"))
    stream = made.llm.stream([1, 2, 3], LONG)
    next(stream)
    del made.llm, stream
    gc.collect()
    assert made.has_gone()


@pytest.mark.slow
def test_another_thread_may_make_and_use_one(tiny_models, llm):
    results = []

    def work():
        with LLM(tiny_models("llama"), tp_size=2, **SMALL) as own:
            results.extend(own.generate([1, 2, 3], SHORT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(START_S)
    assert token_ids(results) == token_ids(llm.generate([1, 2, 3], SHORT))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_idle_is_told_at_the_next_use(rank, make_ranks):
    made = make_ranks()
    made.llm.generate([1, 2, 3], SHORT)
    os.kill(made.pids[rank], signal.SIGKILL)
    assert wait_until(lambda: not is_running(made.pids[rank]))
    with pytest.raises(WorkerError, match=r"died: it was ended by SIGKILL") as caught:
        made.llm.generate([[1, 2, 3]], SHORT)
    assert ("rank 1" in str(caught.value)) == (rank == 1)
    assert made.has_gone()


@pytest.mark.slow
def test_ranks_that_cannot_share_the_model_say_why(tiny_models):
    before = set(files(""))
    with pytest.raises(WorkerError, match=r"scheduler.* process failed: .*3"):
        LLM(tiny_models("llama"), tp_size=3, **SMALL)
    assert rank_pids(os.getpid()) == set()
    assert set(files("")) <= before


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen3-moe"])
def test_four_ranks_say_what_one_says(model, make_ranks, make_llm):
    prompts, own = zip(*REQUESTS, strict=True)
    four, one = make_ranks(model, 4).llm, make_llm(model)
    assert token_ids(four.generate(prompts, own)) == token_ids(one.generate(prompts, own))


@pytest.mark.slow
def test_retractions_are_counted_and_change_no_token(make_ranks, llm):
    prompts, own = zip(*REQUESTS, strict=True)
    small = make_ranks(num_pages=20, page_size=4, reserve_tokens=1).llm
    assert token_ids(small.generate(prompts, own)) == token_ids(llm.generate(prompts, own))
    assert small.num_retractions >= 1
    assert small.num_retractions == small.num_retractions


@pytest.mark.slow
def test_the_programs_of_the_command_line_take_several_ranks(tiny_models, capfd):
    options = Options(num_requests=3, max_input=20, max_output=6, repeats=2)
    report = run(options, lambda: LLM(tiny_models("llama"), tp_size=2, num_pages=16, max_running_req=4), say=lambda line: None)
    assert [one["num_cached_tokens"] for one in report["runs"]] == [0, 0]
    assert (report["config"]["tp_size"], report["config"]["dtype"], report["config"]["overlap"]) == (2, "float32", False)
    words = ["generate", "--model", str(tiny_models("llama")), "--tp", "2", "--max-tokens", "5", "--num-pages", "64"]
    assert main([*words, "Hello"]) == 0
    out, err = capfd.readouterr()
    assert len(out) > 1
    assert "[5 tokens in" in err


@pytest.mark.slow
def test_the_program_of_the_documentation_runs(tiny_models):
    (program,) = code_blocks((ROOT / "docs" / "ranks.md").read_text(encoding="utf-8"), "python")
    assert "path/to/model" in program
    with from_stdin(program.replace("path/to/model", str(tiny_models("llama"))), tiny_models("llama")) as process:
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, err, len(out) > 1) == (0, "", True)
