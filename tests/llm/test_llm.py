"""The offline class as its users meet it: prompts of all kinds, streams, errors, closing."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.errors import ClosedError, ConfigError, ModelFormatError, RequestError
from minisgl.llm import LLM, local
from minisgl.llm.llm import MOST_PROMPTS_AT_ONCE
from minisgl.llm.ranks import RankProcesses
from minisgl.scheduler.config import SchedulerConfig

CHAT = [{"role": "user", "content": "Hello there"}]
GREEDY = SamplingParams(max_tokens=6)


def check_idle(llm: LLM) -> None:
    """Nothing runs, and every page is free or in the prefix cache, which lets go of all of them."""
    assert llm.scheduler.is_idle
    llm.scheduler.check_integrity()
    llm.scheduler.reset_prefix_cache()
    llm.scheduler.check_integrity()


@pytest.fixture(scope="module")
def text(llm):
    """A prompt's whole greedy output."""
    return llm.generate("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True))[0].text


# ---- prompts ------------------------------------------------------------------------------------------------------------------------


def test_a_text_its_ids_and_a_list_of_either_give_the_same(llm):
    ids = llm.tokenizer.encode("Hello world")
    results = [
        llm.generate("Hello world", GREEDY),
        llm.generate(ids, GREEDY),
        llm.generate(["Hello world"], GREEDY),
        llm.generate([ids], GREEDY),
    ]
    assert all(len(result) == 1 for result in results)
    assert len({tuple(result[0].token_ids) for result in results}) == 1
    assert results[0][0].num_prompt_tokens == len(ids)
    assert results[0][0].text == llm.tokenizer.decode(results[0][0].token_ids)


def test_a_chat_is_a_prompt_too(llm):
    ids = llm.tokenizer.apply_chat_template(CHAT)
    results = [*llm.generate([CHAT, ids], GREEDY), llm.generate(CHAT, GREEDY)[0], llm.chat(CHAT, GREEDY)]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert {result.num_prompt_tokens for result in results} == {len(ids)}


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [[token] * (1 + token % 7) for token in range(40)]
    params = [SamplingParams(max_tokens=1 + number % 5, ignore_eos=True) for number in range(40)]
    results = llm.generate(prompts, params)
    assert [result.num_prompt_tokens for result in results] == [len(prompt) for prompt in prompts]
    assert [len(result.token_ids) for result in results] == [own.max_tokens for own in params]
    assert {result.finish_reason for result in results} == {"length"}


def test_more_prompts_than_are_tokenized_at_once_answer_as_each_alone(llm, monkeypatch):
    count = 2 * MOST_PROMPTS_AT_ONCE + 3
    kinds = [lambda n: f"Text {n}", lambda n: [1 + n, 2], lambda n: [{"role": "user", "content": f"Chat {n}"}], lambda n: [n, -1]]
    prompts = [kinds[n % 4](n) for n in range(count)]
    sizes, real, running = [], llm.tokenizer.encode_batch, []

    def encode_batch(texts, add_special_tokens):
        sizes.append(len(texts))
        running.append(not llm.scheduler.is_idle)
        return real(texts, add_special_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(llm.tokenizer, "encode_batch", encode_batch)
        results = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert sizes == [64] * 4 + [1, 1]
    assert running == [False, False, True, True, True, True]
    assert len(results) == count
    for n in [*range(8), *range(MOST_PROMPTS_AT_ONCE - 4, MOST_PROMPTS_AT_ONCE + 4), *range(count - 4, count)]:
        (alone,) = llm.generate([prompts[n]], SamplingParams(max_tokens=1))
        assert [results[n].token_ids, results[n].text, results[n].error] == [alone.token_ids, alone.text, alone.error]
        assert results[n].num_prompt_tokens == alone.num_prompt_tokens
    assert [n % 4 == 3 for n in range(count)] == [result.error is not None for result in results]
    check_idle(llm)


def test_prompts_that_all_fail_before_the_rest_are_tokenized_do_not_wait_for_a_step(llm):
    bad = [[-1]] * MOST_PROMPTS_AT_ONCE
    results = llm.generate([*bad, [1, 2, 3], *bad, [1, 2, 3]], GREEDY)
    assert [place for place, result in enumerate(results) if result.error is None] == [len(bad), 2 * len(bad) + 1]
    check_idle(llm)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == []


BAD = [
    None,
    5.5,
    [1.5],
    [True],
    [],
    [[1]],
    [4096],
    [-1],
    [10**30],
    {"a": 1},
    b"bytes",
    ["a", "b"],
    [1, "a"],
    [{}],
    [{"role": 5}],
    "a\ud83d",
]


def test_bad_prompts_among_good_ones_are_errors_of_their_own(llm):
    good = llm.generate([[1, 2, 3], "Hello"], GREEDY)
    results = llm.generate([[1, 2, 3], *BAD, [7] * 3000, "Hello"], GREEDY)
    assert [results[0].token_ids, results[-1].token_ids] == [result.token_ids for result in good]
    for result in results[1:-1]:
        assert (result.finish_reason, result.text, result.token_ids) == ("error", "", [])
        assert len(result.error) > 20
    assert "3000 tokens" in results[-2].error
    check_idle(llm)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"bytes", {"a": 1}, iter(["a"])])
def test_what_is_no_list_of_prompts_is_refused(prompts, llm):
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts)
    assert caught.value.param == "prompts"


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, [], {"temperature": 1}, [GREEDY, None], 5])
def test_parameters_that_do_not_fit_the_prompts_are_refused(params, llm):
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.param == "sampling_params"
    check_idle(llm)


# ---- chats --------------------------------------------------------------------------------------------------------------------------


def test_template_variables_reach_the_template(tiny_models, tmp_path):
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), model_dir)
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}{% if shout %}!!!{% endif %}")
    with LLM(model_dir, num_pages=16, max_running_req=2) as llm:
        plain, shouted = llm.chat(CHAT, GREEDY), llm.chat(CHAT, GREEDY, shout=True)
        assert plain.token_ids == llm.generate(llm.tokenizer.encode("Hello there", add_special_tokens=False), GREEDY)[0].token_ids
        assert shouted.num_prompt_tokens > plain.num_prompt_tokens


@pytest.mark.parametrize("messages", ["Hello", [], [5], [1, 2], None, [{"content": "no role"}]])
@pytest.mark.parametrize("variables", [{}, {"shout": True}])
def test_a_malformed_chat_is_an_error_in_the_result(messages, variables, llm):
    result = llm.chat(messages, GREEDY, **variables)
    assert result.finish_reason == "error"
    assert result.error


# ---- endings ------------------------------------------------------------------------------------------------------------------------


def test_without_max_tokens_the_context_is_filled(make_llm):
    llm = make_llm(max_seq_len=48)
    result = llm.generate([1, 2, 3], SamplingParams(ignore_eos=True))[0]
    assert (len(result.token_ids), result.finish_reason) == (45, "length")
    assert llm.generate([1] * 47, SamplingParams(ignore_eos=True))[0].finish_reason == "length"
    assert "48" in llm.generate([1] * 48)[0].error


def test_without_max_tokens_the_pool_is_filled(make_llm):
    result = make_llm(num_pages=3).generate([1, 2, 3], SamplingParams(ignore_eos=True))[0]
    assert (len(result.token_ids), result.finish_reason) == (45, "length")


@pytest.mark.parametrize(("start", "length"), [(0, 1), (7, 3), (10, 12), (20, 1)])
def test_a_stop_string_cuts_the_text_alike_in_stream_and_plain(start, length, llm, text):
    """The stop is cut out of the output, so it lies across tokens wherever their borders are."""
    stop = text[start : start + length]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop, "never seen"])
    plain = llm.generate("Once upon a time", params)[0]
    chunks = list(llm.stream("Once upon a time", params))
    assert plain.text == text[: text.index(stop)]
    assert plain.finish_reason == "stop"
    assert "".join(chunk.text for chunk in chunks) == plain.text
    assert chunks[-1].result.text == plain.text
    assert chunks[-1].result.token_ids == plain.token_ids == [token for chunk in chunks for token in chunk.token_ids]
    assert all(chunk.result is None for chunk in chunks[:-1])
    assert stop in llm.tokenizer.decode(plain.token_ids)  # the token that completed it counts
    assert stop not in llm.tokenizer.decode(plain.token_ids[:-1])
    check_idle(llm)


def test_a_request_that_a_stop_string_ends_tells_its_cached_tokens(llm, text):
    prompt = [5] * 40
    first = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    again = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True, stop=first.text[3:5]))[0]
    assert again.finish_reason == "stop"
    assert again.num_cached_tokens == 32


def test_stop_ids_and_end_ids(llm):
    ids = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    where = next(number for number in range(2, 8) if ids[number] not in ids[:number])
    stopped = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[ids[where], 4000]))[0]
    assert (stopped.token_ids, stopped.finish_reason) == (ids[: where + 1], "stop")
    assert stopped.text == llm.tokenizer.decode(ids[:where])
    later = llm.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[ids[where]], min_tokens=8))[0]
    assert len(later.token_ids) == 8
    assert ids[where] not in later.token_ids


def test_the_models_end_id_ends_unless_it_is_ignored(llm):
    (end_id,) = llm.scheduler.engine.limits.end_ids
    forced = {"logit_bias": {end_id: 100.0}, "max_tokens": 5}
    ended, ignored, late = llm.generate(
        [[1, 2, 3]] * 3,
        [SamplingParams(**forced), SamplingParams(**forced, ignore_eos=True), SamplingParams(**forced, min_tokens=3)],
    )
    assert (ended.token_ids, ended.finish_reason, ended.text) == ([end_id], "stop", "")
    assert (ignored.token_ids, ignored.finish_reason) == ([end_id] * 5, "length")
    assert end_id not in late.token_ids[:3]
    assert (late.token_ids[3:], late.finish_reason) == ([end_id], "stop")
    shown = SamplingParams(**forced, ignore_eos=True, skip_special_tokens=False)
    assert ignored.text == ""
    assert len(llm.generate([1, 2, 3], shown)[0].text) > 0


def test_end_ids_are_those_of_all_the_models_files(tiny_models, tmp_path):
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), model_dir)
    for name, value in (("config.json", 88), ("generation_config.json", [77, 66])):
        settings = json.loads((model_dir / name).read_text(encoding="utf-8"))
        (model_dir / name).write_text(json.dumps(settings | {"eos_token_id": value}), encoding="utf-8")
    with LLM(model_dir, num_pages=16, max_running_req=4) as llm:
        (of_the_tokenizer,) = llm.scheduler.engine.limits.end_ids - {88, 77, 66}
        assert {of_the_tokenizer} | {88, 77, 66} == llm.tokenizer.eos_token_ids
        for end_id in (88, 77, 66, of_the_tokenizer):
            result = llm.generate([1, 2, 3], SamplingParams(max_tokens=3, logit_bias={end_id: 100.0}))[0]
            assert (result.token_ids, result.finish_reason, result.text) == ([end_id], "stop", "")


# ---- streams ------------------------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_plain_output_in_pieces(llm, text):
    chunks = list(llm.stream("Once upon a time", SamplingParams(max_tokens=40, ignore_eos=True)))
    assert "".join(chunk.text for chunk in chunks) == text == chunks[-1].result.text
    assert len(chunks) >= 40
    assert sum(len(chunk.token_ids) for chunk in chunks) == 40


def test_a_stream_that_is_closed_early_gives_its_pages_back(llm):
    stream = llm.stream([9] * 30, SamplingParams(ignore_eos=True))
    assert next(stream).token_ids
    assert not llm.scheduler.is_idle
    stream.close()
    check_idle(llm)


def test_a_stream_that_is_forgotten_gives_its_pages_back(llm):
    for chunk in llm.stream([9] * 30, SamplingParams(ignore_eos=True)):
        if chunk.token_ids:
            break
    del chunk
    check_idle(llm)


def test_streams_and_calls_run_beside_each_other(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = [llm.generate([seed] * 5, params)[0].token_ids for seed in (1, 2, 3)]
    first, second = llm.stream([1] * 5, params), llm.stream([2] * 5, params)
    seen: list[list[int]] = [[], []]
    for _ in range(4):
        for tokens, stream in zip(seen, (first, second), strict=True):
            tokens.extend(next(stream).token_ids)
    assert llm.generate([3] * 5, params)[0].token_ids == alone[2]
    for tokens, stream in zip(seen, (first, second), strict=True):
        for chunk in stream:
            tokens.extend(chunk.token_ids)
    assert seen == alone[:2]
    check_idle(llm)


def test_a_stream_of_a_bad_prompt_is_one_chunk_with_the_error(llm):
    (chunk,) = llm.stream([1, -5])
    assert chunk.result.finish_reason == "error"
    assert "-5" in chunk.result.error


def test_a_stream_of_several_choices_is_refused_at_once(llm):
    with pytest.raises(RequestError) as caught:
        llm.stream("a", SamplingParams(n=2))
    assert caught.value.param == "n"


# ---- settings and life ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"),
    [("page_sizes", "page_size"), ("max_running_requests", "max_running_req"), ("cachetype", "cache_type"), ("max_len", "max_seq_len")],
)
def test_an_unknown_setting_is_refused_with_the_nearest(name, near, tiny_models):
    with pytest.raises(ConfigError, match=f"{name}.*did you mean {near}"):
        LLM(tiny_models("llama"), **{name: 1})


@pytest.mark.parametrize("name", ["zzz", "_unique_suffix", "offline_mode", "backend_create_detokenizer_link"])
def test_a_setting_that_means_nothing_here_is_refused(name, tiny_models):
    with pytest.raises(ConfigError, match=name):
        LLM(tiny_models("llama"), **{name: 1})


def test_wrong_values_are_told_before_a_model_is_looked_for():
    with pytest.raises(ConfigError, match="page_size"):
        LLM("/no/such/model", page_size=-1)
    with pytest.raises(ConfigError, match="tp_size"):
        LLM("/no/such/model", tp_size=0)
    with pytest.raises(ConfigError, match="tp_size"):
        LLM("/no/such/model", tp_size=True)
    with pytest.raises(ConfigError, match="/no/such/model"):
        LLM("/no/such/model", tp_size=2)


def test_a_graph_size_that_has_no_effect_is_told(make_llm, caplog):
    with caplog.at_level(logging.INFO):
        make_llm(cuda_graph_max_bs=8)
    assert any("--cuda-graph-max-bs 8 has no effect" in record.getMessage() for record in caplog.records)


def test_a_memory_ratio_that_has_no_effect_is_told(make_llm, caplog):
    with caplog.at_level(logging.INFO, logger="minisgl"):
        make_llm(memory_ratio=0.5, num_pages=20)
    assert "--memory-ratio 0.5 has no effect beside --num-pages 20" in caplog.text


def test_two_objects_live_side_by_side(make_llm):
    one, other = make_llm(), make_llm("qwen3")
    alone = [one.generate([1, 2, 3], GREEDY)[0].token_ids, other.generate([1, 2, 3], GREEDY)[0].token_ids]
    stream = one.stream([1, 2, 3], GREEDY)
    tokens = next(stream).token_ids
    assert other.generate([1, 2, 3], GREEDY)[0].token_ids == alone[1]
    other.close()
    assert tokens + [token for chunk in stream for token in chunk.token_ids] == alone[0]
    assert alone[0] != alone[1]


def test_use_after_close_is_a_clear_error(make_llm):
    llm = make_llm()
    stream, not_begun = llm.stream([1, 2], GREEDY), llm.stream([1, 2], GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate("a"),
        lambda: llm.generate([]),
        lambda: llm.chat(CHAT),
        lambda: llm.stream("a"),
        lambda: next(stream),
        lambda: next(not_begun),
        lambda: llm.scheduler,
        llm.__enter__,
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_a_with_block_closes(tiny_models):
    with LLM(tiny_models("llama"), num_pages=8, max_running_req=2) as llm:
        assert llm.generate([1], GREEDY)[0].error is None
    with pytest.raises(ClosedError):
        llm.generate([1])


def test_a_model_without_a_tokenizer_takes_ids_only(tiny_models, tmp_path):
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), model_dir, ignore=shutil.ignore_patterns("tokenizer*"))
    with LLM(str(model_dir), num_pages=16, max_running_req=2) as llm, LLM(tiny_models("llama"), num_pages=16, max_running_req=2) as whole:
        result = llm.generate([1, 2, 3], GREEDY)[0]
        assert (result.token_ids, result.text) == (whole.generate([1, 2, 3], GREEDY)[0].token_ids, "")
        assert llm.tokenizer is None
        refused = [
            *llm.generate(["a text", CHAT]),
            llm.chat(CHAT),
            llm.generate([1], SamplingParams(stop=["a"]))[0],
        ]
        assert all("tokenizer.json" in result.error for result in refused)
        assert next(llm.stream([1, 2, 3], GREEDY)).token_ids == result.token_ids[:1]


def test_ids_of_a_padded_vocabulary_are_never_sampled(tiny_models, tmp_path):
    """The tokenizer knows the first ids only; the head prefers others."""
    model_dir = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), model_dir)
    path = model_dir / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    num_known = 2000
    tokenizer["model"]["vocab"] = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < num_known}
    known = tokenizer["model"]["vocab"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in tokenizer["model"]["merges"]]
    tokenizer["model"]["merges"] = [merge for merge in merges if all(part in known for part in (*merge, "".join(merge)))]
    tokenizer["added_tokens"], tokenizer["post_processor"] = [], None
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    (model_dir / "tokenizer_config.json").write_text("{}")
    with LLM(model_dir, num_pages=64, max_running_req=8) as llm:
        assert llm.tokenizer.vocab_size == num_known
        params = [SamplingParams(max_tokens=20, temperature=temperature, seed=1, ignore_eos=True) for temperature in (0.0, 1.0, 2.0)]
        results = llm.generate([[1, 2, 3]] * 3, params)
        assert max(max(result.token_ids) for result in results) < num_known
        assert llm.generate([3000, 4095], GREEDY)[0].error is None  # legal as input


def test_a_directory_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        LLM(tmp_path)


@pytest.mark.parametrize(("progress", "is_shown"), [(True, True), (False, False), (None, False)])
def test_a_progress_bar_is_shown_where_asked_for(progress, is_shown, llm, capfd):
    llm.generate([[token] for token in range(10)], SamplingParams(max_tokens=2), progress=progress)
    out, err = capfd.readouterr()
    assert out == ""
    assert ("10/10" in err) == is_shown


# ---- sizes of steps -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "num_bytes", "asked", "expected"),
    [("cuda", 2**37, 0, 16_384), ("cuda", 2**37 - 1, 0, 0), ("cuda", 2**40, 300, 300), ("cpu", 2**40, 0, 0)],
    ids=["large GPU", "small GPU", "set by the user", "CPU"],
)
def test_prefill_steps_are_twice_as_large_where_a_gpu_has_memory_for_them(monkeypatch, device, num_bytes, asked, expected):
    monkeypatch.setattr(local, "choose_device", lambda config: torch.device(device))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=num_bytes))
    assert local.with_large_steps(SchedulerConfig(max_extend_tokens=asked)).max_extend_tokens == expected


def test_one_rank_takes_the_larger_steps_and_several_do_not(monkeypatch, tiny_models):
    monkeypatch.setattr(local, "with_large_steps", lambda config: replace(config, max_extend_tokens=77))
    with LLM(tiny_models("llama"), num_pages=64, max_seq_len=128) as here:
        assert here.config.max_extend_tokens == 77
    monkeypatch.setattr(RankProcesses, "start", lambda config: RankProcesses)
    assert LLM(tiny_models("llama"), tp_size=2).config.max_extend_tokens == 0
