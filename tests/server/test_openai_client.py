"""The `openai` client, sync and async, over every feature: it is what most people will use."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from tests.server.local_server import MODEL, local_server
from tests.server.player import ECHO, playing_server

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def playing():
    with playing_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(playing):
    with openai.OpenAI(base_url=f"{playing.client.base_url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "minisgl"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_chat(client, playing):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, *HELLO],
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=5,
        stop=["x"],
        max_completion_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -1},
        user="me",
        metadata={"a": "b"},
        store=False,
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "cache_salt": "s", "min_tokens": 1},
    )
    assert [choice.message.content for choice in answer.choices] == [ECHO] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert [len(entry.top_logprobs) for entry in answer.choices[0].logprobs.content] == [2] * len(ECHO)
    assert b"".join(bytes(entry.bytes) for entry in answer.choices[1].logprobs.content) == ECHO.encode()
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens == 2 * (len(ECHO) + 1)
    params = playing.player.seen[-1]
    assert (params.top_k, params.min_p, params.repetition_penalty, params.max_tokens) == (4, 0.1, 1.1, 9)


def test_a_streamed_chat(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}, logprobs=True, max_tokens=9
    )
    chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ECHO
    scores = [entry for chunk in chunks[:-1] if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert "".join(entry.token for entry in scores) == ECHO
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 10)


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["ab", "c"], n=2, echo=True, logprobs=1, max_tokens=9)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "ab<hi>"), (1, "ab<hi>"), (2, "c<hi>"), (3, "c<hi>")]
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == list("ab<hi>")
    assert logprobs.token_logprobs[:2] == [None, -0.98]
    assert logprobs.text_offset == list(range(6))
    assert logprobs.top_logprobs[1] == {"b": -0.98}
    assert answer.usage.prompt_tokens == 3
    assert client.completions.create(model=MODEL, prompt=[[97], [98, 99]]).choices[1].text == ECHO


def test_streamed_completions(client):
    chunks = list(client.completions.create(model=MODEL, prompt="ab", stream=True, n=2, stream_options={"include_usage": True}))
    texts = {0: "", 1: ""}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.text
    assert texts == {0: ECHO, 1: ECHO}
    assert chunks[-1].usage.completion_tokens == 10


def test_errors_carry_their_fields(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=5)
    assert (caught.value.param, caught.value.type, caught.value.status_code) == ("temperature", "invalid_request_error", 400)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"


def test_the_asynchronous_client(playing):
    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{playing.client.base_url}/v1", api_key="none", max_retries=0, timeout=10) as client:
            chats = [client.chat.completions.create(model=MODEL, messages=HELLO) for _ in range(8)]
            texts = [answer.choices[0].message.content for answer in await asyncio.gather(*chats)]
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            completion = await client.completions.create(model=MODEL, prompt="a", echo=True)
            return texts, "".join(pieces), completion.choices[0].text

    assert asyncio.run(talk()) == ([ECHO] * 8, ECHO, f"a{ECHO}")


def test_a_stream_that_breaks_off_raises():
    with (
        local_server() as server,
        openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0, timeout=10) as client,
    ):
        ender = threading.Thread(target=lambda: server.scheduler.end(server.scheduler.hear_request().uid, "error", error="the cause"))
        ender.start()
        with pytest.raises(openai.APIError, match="the cause"):
            list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
        ender.join()
