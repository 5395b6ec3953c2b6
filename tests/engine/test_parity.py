"""The five families against transformers: equal greedy ids, and logits as near as fp32 rounding allows, however the work is cut up."""

from __future__ import annotations

import pytest
import torch

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.tokenizer.loader import load_tokenizer
from tests.engine.parity import Expected, differences, run, tiny_engine, top5_errors
from tests.tools.plan import Planner
from tests.tools.tiny_models import NAMES

slow = pytest.mark.slow
NUM_STEPS = 64
"""Steps of the reference runs."""
SHORT_CASES = range(5)
"""All but the long prompt, which takes a hundred steps of its own where a step computes a token or seven."""


@pytest.fixture(scope="module", params=NAMES)
def model_dir(request, tiny_models):
    return tiny_models(request.param)


@pytest.fixture(scope="module")
def expected(model_dir):
    return Expected.of(model_dir)


@pytest.fixture(scope="module")
def engine(model_dir):
    return tiny_engine(model_dir)


def test_the_reference_run_is_whole(expected):
    assert len(expected.prompts) == 6
    assert {len(output) for output in expected.outputs} == {NUM_STEPS}
    assert 0 < expected.noise < 1e-4


@pytest.mark.parametrize(("budget", "num_steps"), [(64, 20), (8192, 16), pytest.param(64, NUM_STEPS, marks=slow)])
def test_all_prompts_together(engine, expected, budget, num_steps):
    assert list(differences(expected, run(engine, expected.prompts, num_steps, budget))) == []


@pytest.mark.parametrize("budget", [pytest.param(1, marks=slow), 7])
def test_prompts_in_small_pieces_beside_running_ones(engine, expected, budget):
    prompts = [expected.prompts[case] for case in SHORT_CASES]
    assert list(differences(expected, run(engine, prompts, 16, budget))) == []


@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=slow) for case in range(1, 5)), 5])
def test_a_prompt_alone(engine, expected, case):
    assert list(differences(expected, run(engine, [expected.prompts[case]], 12), [case])) == []


@slow
@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("budget", [1, 7, 64, 8192])
def test_a_prompt_alone_to_its_end(engine, expected, case, budget):
    assert list(differences(expected, run(engine, [expected.prompts[case]], NUM_STEPS, budget), [case])) == []


@slow
@pytest.mark.parametrize("budget", [1, 7])
@pytest.mark.parametrize("page_size", [1, 64])
def test_all_prompts_in_small_pieces_and_other_pages(model_dir, expected, budget, page_size):
    engine = tiny_engine(model_dir, page_size=page_size, num_pages=1024)
    assert list(differences(expected, run(engine, expected.prompts, NUM_STEPS, budget))) == []


def test_two_chunks_and_three_decodes_in_one_step_give_the_solo_ids(engine, expected):
    """The scheduler does not mix both kinds in a step; the plan's type allows it."""
    planner = Planner(engine.limits.num_pages, engine.limits.page_size, engine.limits.max_running_req, seed=3)
    decoding, chunked = (0, 1, 2), (3, 5)
    outputs: dict[int, list[int]] = {uid: [] for uid in (*decoding, *chunked)}

    def step(extend: dict[int, int], *, is_token_hidden: bool = True) -> None:
        batch = planner.plan(extend, is_token_hidden=is_token_hidden)
        for row, token in zip(batch.sample_rows.tolist(), engine.submit(batch).read().tolist(), strict=True):
            outputs[batch.uids[row]].append(token)
            planner.rows[batch.uids[row]].tokens.append(token)

    for uid in outputs:
        planner.add(uid, expected.prompts[uid])
    step({uid: len(expected.prompts[uid]) for uid in decoding}, is_token_hidden=False)
    for _ in range(3):
        step(dict.fromkeys(decoding, 1) | dict.fromkeys(chunked, 5))
    step(dict.fromkeys(decoding, 1) | {uid: planner.rows[uid].num_left for uid in chunked})
    for _ in range(5):
        step(dict.fromkeys(outputs, 1))
    assert {uid: len(tokens) for uid, tokens in outputs.items()} == dict.fromkeys(decoding, 10) | dict.fromkeys(chunked, 6)
    assert outputs == {uid: expected.outputs[uid][: len(tokens)] for uid, tokens in outputs.items()}


def test_a_reused_slot_and_its_pages_leave_no_trace(engine, expected):
    """Two prompts run one after the other through the same few pages."""
    first = run(engine, [expected.prompts[5]], 2)
    second = run(engine, [expected.prompts[1]], 8)
    assert list(differences(expected, first, [5])) == []
    assert list(differences(expected, second, [1])) == []


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 0.2), pytest.param("float16", 0.025, marks=slow)])
def test_half_precision_stays_near_the_reference(model_dir, expected, dtype, largest):
    """Ids may differ after a near tie, so each step is fed the reference's token and its logits are compared."""
    engine = tiny_engine(model_dir, dtype=dtype)
    runs = run(engine, expected.prompts, 16, 64, forced=expected.outputs)
    errors = top5_errors(expected, runs)
    assert max(float(error.median()) for error in errors) <= largest
    assert min(float(error.median()) for error in errors) > 100 * expected.noise, "this was float32"


@pytest.mark.parametrize("budget", [pytest.param(7, marks=slow), 64])
def test_through_the_scheduler(model_dir, expected, budget):
    prompts = expected.prompts if budget > 7 else expected.prompts[:3]
    with LLM(model_path=str(model_dir), device="cpu", num_pages=128, max_extend_tokens=budget, max_running_req=8) as llm:
        results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [result.token_ids for result in results] == [output[:8] for output in expected.outputs[: len(prompts)]]


EMBEDDED_PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland ist",
    "In 1969, Neil Armstrong",
)
EMBEDDED_START = (
    [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33],
    [753, 3987, 46477, 24, 94, 727, 466, 585, 304, 1758, 216, 32],
)
"""What transformers continues the first two with; the slow test below runs it anew."""


def embedded_runs(model_dir, texts, num_new):
    tokenizer = load_tokenizer(model_dir)
    prompts = [list(tokenizer.encode(text)) for text in texts]
    return prompts, [own.token_ids for own in run(tiny_engine(model_dir), prompts, num_new)]


def embedded_reference(model_dir, prompts, num_new):
    """transformers' greedy ids."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    options = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None}
    outputs = []
    for prompt in prompts:
        result = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options)
        outputs.append(result[0, len(prompt) :].tolist())
    return outputs


def test_the_embedded_model_gives_transformers_ids(embedded_model):
    _, outputs = embedded_runs(embedded_model, EMBEDDED_PROMPTS[:2], len(EMBEDDED_START[0]))
    assert outputs == list(EMBEDDED_START)


@slow
@pytest.mark.timeout(600)
def test_the_embedded_model_gives_transformers_ids_for_long(embedded_model):
    prompts, outputs = embedded_runs(embedded_model, EMBEDDED_PROMPTS, 96)
    reference = embedded_reference(embedded_model, prompts, 96)
    assert outputs == reference
    assert [ids[: len(EMBEDDED_START[0])] for ids in reference[:2]] == list(EMBEDDED_START)
