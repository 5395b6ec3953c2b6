"""The command itself with a real model: what it answers over HTTP is what the offline class answers."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from tests.server.server_process import started

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
SETTINGS = {"num_pages": 64, "max_seq_len": 256}


@pytest.mark.slow  # tests/server/test_real_model.py and tests/server/test_ranks_http.py compare by default
def test_http_answers_are_the_offline_ones_and_ctrl_c_leaves_nothing_behind(tiny_models):
    model = str(tiny_models("llama"))
    with LLM(model, **SETTINGS) as llm:
        wanted = llm.chat(MESSAGES, SamplingParams(max_tokens=24))
    assert wanted.error is None
    with started(["minisgl", "--model", model, "--port", "0", "--num-pages", "64", "--max-seq-len", "256"]) as server:
        server.wait_until_ready()
        url, body = f"{server.url}/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
        plain = httpx.post(url, json=body, timeout=30).json()
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=30) as response:
            chunks = [json.loads(line[6:]) for line in response.iter_lines() if line and not line.endswith("[DONE]")]
        assert plain["choices"][0]["message"]["content"] == wanted.text
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == wanted.text
        assert plain["choices"][0]["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == wanted.finish_reason
        usage = (plain["usage"]["prompt_tokens"], plain["usage"]["completion_tokens"])
        assert usage == (wanted.num_prompt_tokens, len(wanted.token_ids))
        server.process.send_signal(signal.SIGINT)
        assert server.wait_for_exit() == 130
        assert server.leaves_nothing_behind()
        assert "Traceback" not in server.stderr


@pytest.mark.slow
def test_two_ranks_answer_like_one(tiny_models):
    texts = []
    for ranks in ("1", "2"):
        words = ["minisgl", "--model", str(tiny_models("llama")), "--port", "0", "--num-pages", "64", "--max-seq-len", "256", "--tp", ranks]
        with started(words) as server:
            server.wait_until_ready()
            body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
            texts.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]["content"])
            server.process.send_signal(signal.SIGINT)
            assert server.wait_for_exit() == 130
            assert server.leaves_nothing_behind()
            assert "Traceback" not in server.stderr
    assert texts[0] == texts[1] != ""
