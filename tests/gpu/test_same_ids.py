"""On a GPU the engine gives the ids of transformers, in fp32: through graphs, overlap, chunks, shared prefixes and retraction."""

import json
import logging

import numpy as np
import pytest
import torch

from minisgl.core import SamplingParams, SlotSetup
from minisgl.llm import LLM
from tests.engine.parity import NOISE_BOUND, Expected, run, tiny_engine

pytestmark = pytest.mark.gpu

NAMES = ("llama", "qwen2", "qwen3", "qwen3-moe", "mistral")
NUM_NEW = 32
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS = {
    "graphs and overlap": {},
    "no graphs": {"cuda_graph_max_bs": 0},
    "plain order": {"overlap": False},
    "torch attention": {"attention_backend": "torch"},
    "torch for prefill": {"attention_backend": "torch,triton"},
    "torch for decode": {"attention_backend": "triton,torch"},
    "7 tokens a step": {"max_extend_tokens": 7},
    "64 tokens a step, pages of 16": {"max_extend_tokens": 64, "page_size": 16},
    "pages of 1": {"page_size": 1},
    "no shared prefixes": {"cache_type": "naive"},
}
VARIED = {
    "seeded": SamplingParams(temperature=1.0, seed=11, max_tokens=NUM_NEW, ignore_eos=True),
    "top-p and top-k": SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=3, max_tokens=NUM_NEW, ignore_eos=True),
    "min-p": SamplingParams(temperature=1.3, min_p=0.05, seed=4, max_tokens=NUM_NEW, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, seed=5, max_tokens=NUM_NEW, ignore_eos=True
    ),
    "bias and end ids": SamplingParams(logit_bias={5: 100.0, 7: -100.0}, min_tokens=4, max_tokens=NUM_NEW),
    "greedy": GREEDY,
}


def cases(path):
    found = json.loads((path / "expected.json").read_text(encoding="utf-8"))["cases"]
    return [case["ids"] for case in found], [case["out"][:NUM_NEW] for case in found]


def cuda(path, **settings):
    return LLM(path, dtype="float32", device="cuda", num_pages=4096 // settings.get("page_size", 64) + 16, **settings)


def ids_of(results):
    assert [result.error for result in results] == [None] * len(results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_are_those_of_transformers(tiny_models, name, settings):
    path = tiny_models(name)
    prompts, expected = cases(path)
    with cuda(path, **SETTINGS[settings]) as llm:
        cold = ids_of(llm.generate(prompts, GREEDY, progress=False))
        warm = ids_of(llm.generate(prompts, GREEDY, progress=False))
        llm.scheduler.check_integrity()
    assert cold == expected
    assert warm == expected


@pytest.mark.parametrize("num_rows", [1, 3, 5, 7, 9])
def test_graphs_change_no_id_at_any_number_of_rows(tiny_models, num_rows):
    path = tiny_models("qwen3")
    prompts = (cases(path)[0] * 9)[:num_rows]
    params = [SamplingParams(temperature=float(row % 2), seed=row, max_tokens=NUM_NEW, ignore_eos=True) for row in range(num_rows)]
    with cuda(path) as llm:
        with_graphs = ids_of(llm.generate(prompts, params, progress=False))
    with cuda(path, cuda_graph_max_bs=0) as llm:
        without = ids_of(llm.generate(prompts, params, progress=False))
    assert with_graphs == without


@pytest.mark.parametrize("budget", [0, 150])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_any_length_and_number_continue_through_graphs_as_the_cpu_finds_likeliest(tiny_models, caplog, name, budget):
    """Alone and beside others, in chunks, and again with a shared prefix; more rows than a graph has are there too. No logit of a chosen
    token is further below the largest, as the CPU finds them, than fp32 rounds."""
    path = tiny_models(name)
    long = [token for prompt in cases(path)[0] for token in prompt] * 3
    lengths = [1, 2, 63, 64, 65, 127, 130, 200, *range(3, 40)]
    prompts = [[*long[length : 2 * length]] for length in lengths]
    assert [len(prompt) for prompt in prompts] == lengths
    caplog.set_level(logging.DEBUG, logger="minisgl.engine.graphs")
    groups = [prompts[:4], *([prompt] for prompt in prompts[3:9]), prompts, prompts[:20]]
    with cuda(path, max_extend_tokens=budget) as llm:
        rounds = [ids_of(llm.generate(group, GREEDY, progress=False)) for group in groups]
        llm.scheduler.check_integrity()
        num_known_ids = llm.scheduler.engine.limits.num_known_ids
    assert "prefill step of 64 tokens" in caplog.text
    asked, chosen = ([one for group in some for one in group] for some in (groups, rounds))
    exact = run(tiny_engine(path, num_pages=2048, max_running_req=len(asked)), asked, NUM_NEW, forced=chosen)
    logits = torch.cat([own.logits for own in exact])[:, :num_known_ids]
    regret = logits.max(1).values - logits.gather(1, torch.tensor(chosen).reshape(-1, 1))[:, 0]
    assert float(regret.max()) <= 2 * NOISE_BOUND * Expected.of(path).noise


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_kind_of_sampling_gives_the_ids_of_the_cpu(tiny_models, name):
    path = tiny_models(name)
    prompt = cases(path)[0][1]
    params = list(VARIED.values())
    with LLM(path, device="cpu", num_pages=256) as llm:
        expected = ids_of(llm.generate([prompt] * len(params), params, progress=False))
    with cuda(path) as llm:
        found = ids_of(llm.generate([prompt] * len(params), params, progress=False))
        alone = [ids_of(llm.generate([prompt], [own], progress=False))[0] for own in params]
    assert dict(zip(VARIED, found, strict=True)) == dict(zip(VARIED, expected, strict=True))
    assert alone == expected


def test_logprobs_are_those_of_the_cpu(tiny_models):
    path = tiny_models("llama")
    prompt = cases(path)[0][1]
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    results = []
    for device in ("cpu", "cuda"):
        with LLM(path, dtype="float32", device=device, num_pages=256) as llm:
            results.append(llm.generate([prompt], params, progress=False)[0])
    on_cpu, on_gpu = results
    assert on_gpu.token_ids == on_cpu.token_ids
    for mine, theirs in zip(on_gpu.logprobs, on_cpu.logprobs, strict=True):
        assert mine.top_ids == theirs.top_ids
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_requests_give_their_solo_ids(tiny_models, page_size):
    path = tiny_models("llama")
    prompts = [[5 + row] * (20 + 3 * row) for row in range(8)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    settings = {"device": "cuda", "dtype": "float32", "page_size": page_size, "reserve_tokens": 1}
    with LLM(path, num_pages=2048 // page_size, **settings) as llm:
        solo = [ids_of(llm.generate([prompt], params, progress=False))[0] for prompt in prompts]
    with LLM(path, num_pages=130 // page_size, **settings) as llm:
        together = ids_of(llm.generate(prompts, params, progress=False))
        assert llm.scheduler.num_retractions > 0
        llm.scheduler.check_integrity()
    assert together == solo


@pytest.mark.parametrize("num_rows", [1, 5, 9])
def test_a_mixture_of_experts_takes_part_in_graphs(tiny_models, caplog, num_rows):
    path = tiny_models("qwen3-moe")
    prompts = (cases(path)[0] * 9)[:num_rows]
    params = [SamplingParams(temperature=float(row % 2), seed=row, max_tokens=NUM_NEW, ignore_eos=True) for row in range(num_rows)]
    caplog.set_level(logging.DEBUG, logger="minisgl.engine.graphs")
    with cuda(path) as llm:
        with_graphs = ids_of(llm.generate(prompts, params, progress=False))
    assert "captured" in caplog.text
    with cuda(path, cuda_graph_max_bs=0) as llm:
        without = ids_of(llm.generate(prompts, params, progress=False))
    assert with_graphs == without


WISHES = {
    "the defaults of Qwen3": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "the defaults of Llama 3": {"temperature": 0.6, "top_p": 0.9},
    "one token of three filters": {"temperature": 1.5, "top_k": 1, "top_p": 0.5, "min_p": 0.5},
    "a wide top-k and a narrow top-p": {"temperature": 2.0, "top_k": 200, "top_p": 0.3},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "a simple neighbour": {"temperature": 1.0},
    "a greedy neighbour with filters": {"top_k": 5, "top_p": 0.9},
    "all penalties and a filter": {
        "temperature": 1.2,
        "top_k": 40,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
    },
    "greedy penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "biases": {"temperature": 0.8, "top_p": 0.9, "logit_bias": {token: 4.0 - token % 7 for token in range(3, 60)}},
    "banned ends": {"temperature": 1.0, "min_tokens": 20, "ignore_eos": False, "logit_bias": {4087: 50.0}},
}


def wish(seed, settings):
    return SamplingParams(**{"max_tokens": NUM_NEW, "ignore_eos": True, "seed": seed, **settings})


@pytest.mark.parametrize("settings", ["graphs and overlap", "no graphs", "plain order", "7 tokens a step", "no shared prefixes"])
def test_filters_penalties_and_biases_give_the_ids_of_the_cpu(tiny_models, settings):
    """All together, some together and, with the slots of others, once more: what a step's rows want decides which kernels run."""
    path = tiny_models("qwen3")
    params = [wish(seed, wanted) for seed, wanted in enumerate(WISHES.values())]
    prompts = [(cases(path)[0][row % 2] + [7 + row])[-40:] for row in range(len(params))]
    with LLM(path, device="cpu", dtype="float32", num_pages=512) as llm:
        expected = ids_of(llm.generate(prompts, params, progress=False))
    with cuda(path, **SETTINGS[settings]) as llm:
        together = ids_of(llm.generate(prompts, params, progress=False))
        turned = ids_of(llm.generate(prompts[::-1], params[::-1], progress=False))[::-1]
        filtered = ids_of(llm.generate(prompts[:6], params[:6], progress=False))
        alone = [ids_of(llm.generate([prompt], [own], progress=False))[0] for prompt, own in zip(prompts, params, strict=True)]
        llm.scheduler.check_integrity()
    named = dict(zip(WISHES, expected, strict=True))
    assert dict(zip(WISHES, together, strict=True)) == named
    assert dict(zip(WISHES, turned, strict=True)) == named
    assert dict(zip(WISHES, alone, strict=True)) == named
    assert filtered == expected[:6]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_sampling_never_waits_for_the_device():
    """Neither when requests begin, nor in a step, whatever they want. The first round allocates and compiles."""
    from minisgl.engine.device_sampler import DeviceSampler

    device = torch.device("cuda")
    num_rows, num_ids = len(WISHES), 1000
    sampler, logits = DeviceSampler(num_rows, num_ids, device), torch.randn(num_rows, 1024, device=device)
    array = np.array([5, 6, 7], dtype=np.int32)
    setups = [SlotSetup(row, wish(row, wanted), row, frozenset([2]), array, array) for row, wanted in enumerate(WISHES.values())]
    slots = np.arange(num_rows, dtype=np.int32)
    there, positions = (
        torch.arange(num_rows, device=device, dtype=torch.int32),
        torch.full((num_rows,), 6, device=device, dtype=torch.int32),
    )
    rounds = []
    try:
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            sampler.set_up(setups)
            for kind in (1, sampler.kind(slots)):
                tokens = sampler.sample(logits, there, positions)
                sampler.resample(tokens, logits, there, positions, kind)
            torch.cuda.set_sync_debug_mode("default")
            rounds.append(tokens.tolist())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rounds[0] == rounds[1]
    assert min(rounds[0]) >= 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_log_probabilities_never_wait_for_the_device_before_they_are_read():
    from minisgl.engine.logprobs import compute_logprobs, read_back
    from minisgl.kernel.staging import Readback

    device = torch.device("cuda")
    logits, tokens = torch.randn(6, 1000, device=device), torch.arange(6, device=device)
    readback, entries = Readback(device), []
    try:
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            pieces = [compute_logprobs(logits[:4], tokens[:4], [0, 5, 20, 1]), compute_logprobs(logits[4:], tokens[4:], [2, 0])]
            pending = read_back(pieces, readback)
            torch.cuda.set_sync_debug_mode("default")
            entries.append(pending.read())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert entries[0] == entries[1]
    exact = logits.double().log_softmax(-1).cpu()
    assert [entry.logprob for entry in entries[0]] == pytest.approx([float(exact[row, row]) for row in range(6)], abs=1e-5)
    assert [list(entry.top_ids) for entry in entries[0]] == [
        exact[row].topk(count).indices.tolist() for row, count in enumerate([0, 5, 20, 1, 2, 0])
    ]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_waits_for_the_device_but_to_read_what_it_sampled(tiny_models):
    """Neither prefill nor decode, with log probabilities of tokens and prompts, filters and penalties. The first round compiles."""
    prompts, _ = cases(tiny_models("llama"))
    wanted = [SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=2), *VARIED.values()]
    params = [wanted[place % len(wanted)] for place in range(len(prompts))]
    with cuda(tiny_models("llama"), cache_type="naive") as llm:
        rounds = [ids_of(llm.generate(prompts, params, progress=False))]
        try:
            torch.cuda.set_sync_debug_mode("error")
            rounds.append(ids_of(llm.generate(prompts, params, progress=False)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert rounds[0] == rounds[1]
