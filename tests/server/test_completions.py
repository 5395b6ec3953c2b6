"""POST /v1/completions against a scheduler that the test plays: prompt shapes, choices, echo, log probabilities, the streams' bytes."""

from __future__ import annotations

import re

import pytest

from minisgl.core import SEED_STEP
from minisgl.message import PromptLogprobsMsg
from tests.server.local_server import CONTEXT, MODEL, POOL, WAIT, local_server, scored

URL = "/v1/completions"


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def play(server, texts, reason="length", play_one=None, **body):
    """Ask and answer each output with its text; the requests that the scheduler heard, and the response."""
    answer = server.ask(URL, body)
    requests = [server.scheduler.hear_request() for _ in texts]
    for request, text in zip(requests, texts, strict=True):
        (play_one or server.scheduler.say)(request.uid, text)
        server.scheduler.end(request.uid, reason)
    response = answer.result(WAIT)
    assert response.status_code == 200, response.text
    return requests, response.json()


def play_stream(server, texts, **body):
    with server.client.stream("POST", URL, json={"stream": True, **body}) as response:
        assert response.status_code == 200
        requests = [server.scheduler.hear_request() for _ in texts]
        for request, text in zip(requests, texts, strict=True):
            server.scheduler.say(request.uid, text)
            server.scheduler.end(request.uid)
        return list(server.events(response))


def test_a_plain_answer_has_openais_shape(server):
    (request,), body = play(server, ["Hé"], prompt="1+1=", model=MODEL)
    assert bytes(request.input_ids.tolist()) == b"1+1="
    assert (request.sampling_params.max_tokens, request.sampling_params.temperature) == (16, 1.0)
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"text": "Hé", "index": 0, "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}},
    }


@pytest.mark.parametrize(
    ("prompt", "heard"),
    [
        ("ab", [b"ab"]),
        (["x"], [b"x"]),
        (["1+1=", "The sky is"], [b"1+1=", b"The sky is"]),
        ([1, 2, 3], [b"\1\2\3"]),
        ([[1, 2], [3]], [b"\1\2", b"\3"]),
        ("a<|end|>", [b"a<|end|>"]),
    ],
)
def test_all_four_shapes_of_prompts(server, prompt, heard):
    texts = [f"text {place}" for place in range(len(heard))]
    requests, body = play(server, texts, prompt=prompt)
    ids = [[256 if token == 0 else token for token in each.replace(b"<|end|>", b"\0")] for each in heard]
    assert [request.input_ids.tolist() for request in requests] == ids
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate(texts))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("echo", [False, True])
def test_choices_are_prompt_major_and_usage_counts_each_prompt_once(server, echo):
    body = {"prompt": ["1+1=", "The sky is"], "n": 2, "echo": echo, "seed": 7, "max_tokens": 9}
    texts = ["2", "two", " blue", " up"]
    requests, answer = play(server, texts, **body)
    prompts = ["1+1=", "1+1=", "The sky is", "The sky is"] if echo else [""] * 4
    wanted = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(wanted))
    assert answer["usage"] == {
        "prompt_tokens": 14,
        "completion_tokens": 12,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [request.sampling_params.seed for request in requests] == [7, (7 + SEED_STEP) % 2**64] * 2
    assert {(request.sampling_params.n, request.sampling_params.max_tokens) for request in requests} == {(1, 9)}
    events = play_stream(server, texts, **body, stream_options={"include_usage": True})
    streamed, endings = [""] * 4, []
    for choice in (choice for event in events for choice in event["choices"]):
        streamed[choice["index"]] += choice["text"]
        endings += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == wanted
    assert sorted(endings) == [0, 1, 2, 3]
    assert [event["usage"] for event in events] == [None] * (len(events) - 1) + [answer["usage"]]
    assert {(event["id"], event["created"], event["model"]) for event in events} == {(events[0]["id"], events[0]["created"], MODEL)}


def test_an_echo_keeps_what_was_sent_to_the_letter_and_decodes_ids(server):
    assert play(server, ["!"], prompt="a<|end|>", echo=True)[1]["choices"][0]["text"] == "a<|end|>!"
    assert play(server, ["!"], prompt=[97, 256], echo=True)[1]["choices"][0]["text"] == "a!"
    assert play(server, ["!"], prompt=[97, 256], echo=True, skip_special_tokens=False)[1]["choices"][0]["text"] == "a<|end|>!"


def test_a_stop_in_the_prompt_ends_no_echoed_output(server):
    assert play(server, ["y"], prompt="xSTOP", stop=["STOP"], echo=True)[1]["choices"][0]["text"] == "xSTOPy"


def test_the_bytes_of_a_stream(server):
    with server.client.stream("POST", URL, json={"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}) as response:
        uid = server.scheduler.hear_request().uid
        server.scheduler.end(uid, "stop", token=256)
        golden = response.read().decode()
    assert response.headers["connection"] == "close"
    golden = re.sub(r"cmpl-[0-9a-f]{32}", "ID", re.sub(r'"created":\d+', '"created":0', golden))
    head = '{"id":"ID","created":0,"model":"byte-model",'
    usage = '{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,"prompt_tokens_details":{"cached_tokens":0}}'
    assert golden == (
        f'data: {head}"choices":[{{"text":"","index":0,"finish_reason":"stop","logprobs":null}}],"usage":null,'
        '"object":"text_completion"}\n\n'
        f'data: {head}"choices":[],"usage":{usage},"object":"text_completion"}}\n\n'
        "data: [DONE]\n\n"
    )


# ---- log probabilities --------------------------------------------------------------------------------------------------------


def test_log_probabilities(server):
    (request,), body = play(server, ["ab"], prompt="p", logprobs=2, play_one=lambda uid, text: server.scheduler.say_scored(uid, text, 2))
    assert request.sampling_params.logprobs == 2
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.97, -0.98],
        "top_logprobs": [{"a": -0.97, "b": -1.07}, {"b": -0.98, "c": -1.08}],
        "text_offset": [0, 1],
    }


def test_without_alternatives_and_of_parts_of_characters(server):
    def spoken(uid, text):
        server.scheduler.say_scored(uid, text)

    _, body = play(server, ["aé!"], prompt="p", logprobs=0, play_one=spoken)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"] is None


def test_an_echoed_prompt_is_scored_too_and_its_first_token_has_none(server):
    def spoken(uid, text):
        server.scheduler.send(PromptLogprobsMsg(uid, [scored(ord("q"), 1)]))
        server.scheduler.send(PromptLogprobsMsg(uid, [scored(ord("r"), 1)]))
        server.scheduler.say_scored(uid, text, 1)

    (request,), body = play(server, ["a"], prompt="pqr", logprobs=1, echo=True, play_one=spoken)
    assert request.sampling_params.prompt_logprobs == 1
    assert body["choices"][0]["text"] == "pqra"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["p", "q", "r", "a"],
        "token_logprobs": [None, -1.13, -1.14, -0.97],
        "top_logprobs": [None, {"q": -1.13}, {"r": -1.14}, {"a": -0.97}],
        "text_offset": [0, 1, 2, 3],
    }


def test_prompt_logprobs_without_an_echo_stand_by_themselves(server):
    def spoken(uid, text):
        server.scheduler.send(PromptLogprobsMsg(uid, [scored(ord("q"), 1)]))
        server.scheduler.say(uid, text)

    _, body = play(server, ["a"], prompt="pq", prompt_logprobs=1, play_one=spoken)
    choice = body["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("a", None)
    top = {"token": "q", "logprob": -1.13, "bytes": [113]}
    assert choice["prompt_logprobs"] == [{**top, "top_logprobs": [top]}]


def test_streamed_log_probabilities_are_the_plain_ones(server):
    with server.client.stream("POST", URL, json={"prompt": "p", "stream": True, "logprobs": 1, "stop": ["cd"]}) as response:
        uid = server.scheduler.hear_request().uid
        server.scheduler.say_scored(uid, "abcx", 1)
        server.scheduler.end(uid, "stop", token=256)
        choices = [event["choices"][0] for event in server.events(response)]
    assert "".join(choice["text"] for choice in choices) == "abcx"
    scored_choices = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [token for each in scored_choices for token in each["tokens"]] == list("abcx")
    assert [offset for each in scored_choices for offset in each["text_offset"]] == [0, 1, 2, 3]


# ---- refusals -----------------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[2000000000]]}, "prompt"),
    ({"prompt": [5279552648203111001]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[[1]]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 16}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True, "logprobs": 1}, "max_tokens"),
    ({"max_tokens": -160}, "max_tokens"),
    ({"max_tokens": 9999999999999999999999}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 10**10}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"messages": []}, "messages"),
    ({"response_format": {"type": "wizard"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_field_that_cannot_be_served_is_a_400_that_names_it(server, fields, param, stream):
    response = server.client.post(URL, json={"prompt": "a", "stream": stream, **fields})
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")


def test_prompt_logprobs_of_a_stream_are_a_400(server):
    response = server.client.post(URL, json={"prompt": "a", "stream": True, "prompt_logprobs": 1})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt_logprobs")


def test_one_bad_prompt_of_several_ends_all_and_the_accepted_ones_are_aborted(server):
    for bad, code in (("x" * POOL, "kv_pool_exceeded"), ("", "empty_prompt")):
        response = server.client.post(URL, json={"prompt": ["good", bad]})
        assert (response.status_code, error_of(response)["code"]) == (400, code)
        assert server.scheduler.hear_request().uid == server.scheduler.hear_abort()
        assert server.hears_no_abort()


def test_a_prompt_longer_than_any_tokens_could_be_is_a_413_before_it_is_read(server):
    for content in ("a" * 5_000_000, " " * 5_000_000, "\u0300" * 1_000_000):
        for path, body in ((URL, {"prompt": content}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})):
            response = server.client.post(path, json=body)
            assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert server.client.post(URL, json={"prompt": "x" * CONTEXT * len("<|end|>")}).status_code == 400


def test_max_tokens_far_above_the_context_is_left_to_the_scheduler_which_cuts_it(server):
    (request,), _ = play(server, ["a"], prompt="a", max_tokens=999999)
    assert request.sampling_params.max_tokens == 999999


def test_tiny_temperatures_are_greedy(server):
    (request,), _ = play(server, ["a"], prompt="a", temperature=1e-12)
    assert request.sampling_params.is_greedy


def test_a_failure_of_one_output_in_mid_stream_is_the_last_event():
    with local_server() as server, server.client.stream("POST", URL, json={"prompt": ["a", "b"], "stream": True}) as response:
        uids = [server.scheduler.hear_request().uid for _ in range(2)]
        server.scheduler.say(uids[0], "x")
        server.scheduler.end(uids[1], "error", error="the cause")
        lines = [line for line in response.iter_lines() if line]
        assert server.scheduler.hear_abort() == uids[0]
        assert "error" in lines[-1]
        assert '"finish_reason":"' not in "".join(lines)
        assert response.headers["connection"] == "close"


# ---- shapes that clients send ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop", "wanted"), [("1", ("1",)), (["1"], ("1",)), (list("abcde"), tuple("abcde")), ([], ()), (None, ())])
def test_a_stop_is_a_text_or_a_list_of_texts_however_much_it_looks_like_an_id(server, stop, wanted):
    answer = server.ask("/v1/completions", {"prompt": "x", "stop": stop})
    request = server.scheduler.hear_request()
    assert (request.sampling_params.stop, request.sampling_params.stop_token_ids) == (wanted, ())
    server.scheduler.end(request.uid)
    assert answer.result(WAIT).status_code == 200


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}])
def test_no_limit_or_null_is_sixteen_tokens(server, limit):
    answer = server.ask("/v1/completions", {"prompt": "x", **limit})
    request = server.scheduler.hear_request()
    assert request.sampling_params.max_tokens == 16
    server.scheduler.end(request.uid)
    assert answer.result(WAIT).status_code == 200


def test_a_chat_of_one_token_has_its_role_its_text_and_one_ending(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        uid = server.scheduler.hear_request().uid
        server.scheduler.end(uid, "length", token=ord("y"))
        choices = [event["choices"][0] for event in server.events(response)]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "y"
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
