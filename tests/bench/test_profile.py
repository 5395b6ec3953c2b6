"""`minisgl bench offline --profile`: names find their classes, floors are what the formulas say, the report is of the steps it names."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minisgl.bench.profile import (
    CLASSES,
    OTHER,
    Rates,
    WatchedStep,
    choose_windows,
    classify,
    floors,
    profile,
    run_watched,
    summarise,
    wall_seconds,
)
from minisgl.cli import main
from minisgl.core import Batch, SamplingParams, make_batch
from minisgl.distributed import DistributedInfo
from minisgl.errors import WorkerError
from minisgl.layers.base import Spec
from minisgl.llm import LLM
from minisgl.models.config import parse_model_config
from minisgl.models.decoder import CausalLM
from tests.models.small import LLAMA, MOE, QWEN3

KERNELS = Path(__file__).resolve().parents[2] / "minisgl" / "kernel" / "gpu"
OURS = {
    "_adjust_kernel": "sampling",
    "_bias_kernel": "sampling",
    "_decode_inputs_kernel": "copies",
    "_decode_kernel": "attention",
    "_limits_kernel": "sampling",
    "_linear_kernel": "matrix products",
    "_note_kernel": "sampling",
    "_prefill_kernel": "attention",
    "_product_kernel": "SiLU/MoE",
    "_remember_kernel": "copies",
    "_rms_norm_kernel": "norm",
    "_rope_and_store_kernel": "rotation and K/V",
    "_route_kernel": "SiLU/MoE",
    "_sample_kernel": "sampling",
    "_silu_mul_kernel": "SiLU/MoE",
    "_sort_kernel": "SiLU/MoE",
    "_sum_kernel": "SiLU/MoE",
    "_update_page_table_kernel": "copies",
    "_vocab_embedding_kernel": "copies",
}
LIBRARIES = {
    "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4>(Params)": "matrix products",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(...)": "matrix products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)": "matrix products",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...> > >(Params)": "attention",
    "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4> >(flash::Flash_fwd_params)": "attention",
    "void flash::FlashAttnFwdCombine<cute::tuple<...> >(Params)": "attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(PosEncodingMode)0, 2u, 8u>(Params)": "attention",
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<KernelTraits>(Params)": "attention",
    "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u>(...)": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)": "attention",
    "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(...)": "norm",
    "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<...>(...)": "rotation and K/V",
    "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(...)": "SiLU/MoE",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(...)": "sampling",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(...)": "sampling",
    "fused_moe_kernel": "SiLU/MoE",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::(anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 8>(...)": "communication",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>": "copies",
    "void at::native::vectorized_gather_kernel<16, long>(...)": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>": OTHER,
    "void at::native::distribution_elementwise_grid_stride_kernel<float, 4, at::native::templates::cuda::normal_kernel>": OTHER,
    "mkldnn::_linear_pointwise": "matrix products",
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "aten::scaled_dot_product_attention": "attention",
    "aten::_fused_rms_norm": "norm",
    "aten::silu": "SiLU/MoE",
    "aten::index_copy_": "rotation and K/V",
    "aten::argmax": "sampling",
    "aten::embedding": "copies",
    "aten::copy_": "copies",
    "aten::mul": OTHER,
}
BYTES_ONLY, OPERATIONS_ONLY = Rates(1e6, math.inf), Rates(math.inf, 1e6)
"""A byte, or an operation, is a microsecond; the other kind is free."""


# ---- names ------------------------------------------------------------------------------------------------------------------------


def test_every_kernel_of_ours_has_a_class():
    names = re.findall(r"^def (_\w+_kernel)\(", "\n".join(path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py")), re.MULTILINE)
    assert len(names) > 15
    assert [name for name in names if classify([name]) == OTHER] == [], "add them to CLASSES in minisgl/bench/profile.py"


@pytest.mark.parametrize(("name", "label"), [*OURS.items(), *LIBRARIES.items()])
def test_a_name_finds_its_class(name, label):
    assert classify([name]) == label


def test_an_operation_belongs_to_what_it_is_part_of():
    assert classify(["aten::rms_norm", "aten::mul"]) == "norm"
    assert classify(["aten::scaled_dot_product_attention", "aten::_softmax"]) == "attention"
    assert classify(["aten::reshape", "aten::clone"]) == "copies"
    assert classify(["aten::div", "aten::view"]) == OTHER


# ---- floors -----------------------------------------------------------------------------------------------------------------------


def step(cached: list[int], new: list[int], sampled: list[int]) -> Batch:
    arrays = {"cached_lens": cached, "extend_lens": new, "sample_rows": sampled, "input_ids": [0] * sum(new)}
    return make_batch(0, tuple(range(len(cached))), {name: np.array(values, dtype=np.int32) for name, values in arrays.items()})


def decode(num_rows: int, cached: int = 1) -> Batch:
    return step([cached] * num_rows, [1] * num_rows, list(range(num_rows)))


def test_floors_of_a_dense_model_are_those_of_a_hand_computation():
    # 4 layers, hidden 48, 4 heads over 2 of 12, MLP 80, vocabulary 96; 4 new tokens, one row samples, 11 + 3 attended
    model, batch = parse_model_config(LLAMA), step([10, 0], [1, 3], [0])
    weights = 4 * (48 * 48 + 2 * 24 * 48 + 48 * 48 + 3 * 48 * 80)
    assert floors(model, 2, batch, BYTES_ONLY) == pytest.approx(
        {
            "attention": 2 * 2 * 4 * 24 * 14,
            "SiLU/MoE": 3 * 2 * 4 * 4 * 80,
            "norm": 4 * 2 * 48 * (2 * 4 * 4 + 1),
            "rotation and K/V": 2 * 2 * 4 * 4 * (48 + 24 + 24),
            "sampling": 2 * 96,
            "matrix products": 2 * (weights + 48 * 96),
        }
    )
    operations = floors(model, 2, batch, OPERATIONS_ONLY)
    assert operations.pop("matrix products") == pytest.approx(2 * (4 * weights + 48 * 96))
    assert operations.pop("attention") == pytest.approx(4 * 4 * 48 * (11 + 1 + 2 + 3))
    assert set(operations.values()) == {0}


def test_floors_of_a_mixture_of_experts_count_the_experts_that_are_touched():
    # 4 sparse layers, hidden 48, 4 heads over 2 of 24, 5 experts of 20, 3 for each token
    model = parse_model_config(MOE)
    one, two = (floors(model, 4, decode(rows), BYTES_ONLY) for rows in (1, 2))
    expert = 4 * 3 * 48 * 20
    assert one["SiLU/MoE"] == pytest.approx(4 * (3 * expert + 3 * 4 * 3 * 20))
    assert two["SiLU/MoE"] == pytest.approx(4 * (5 * (1 - 0.4**2) * expert + 2 * 3 * 4 * 3 * 20))
    assert one["matrix products"] == pytest.approx(4 * (4 * (2 * 48 * 96 + 2 * 48 * 48 + 48 * 5) + 48 * 96))
    assert floors(model, 4, decode(2), OPERATIONS_ONLY)["SiLU/MoE"] == pytest.approx(2 * 4 * 3 * 6 * 48 * 20)
    on_cpu = floors(model, 4, decode(1), BYTES_ONLY, has_expert_kernel=False)
    assert on_cpu["SiLU/MoE"] == pytest.approx(4 * 3 * 4 * 3 * 20)
    assert on_cpu["matrix products"] == pytest.approx(one["matrix products"] + 4 * 3 * expert)


def test_a_request_that_fails_in_a_watched_run_is_an_error_not_a_profile_of_other_steps(tiny_models):
    with LLM(tiny_models("llama"), device="cpu", num_pages=32) as llm:
        engine = llm.scheduler.engine
        with pytest.raises(WorkerError, match="1 requests failed, the first with: "):
            run_watched(llm, ([[1, 2], [10**6]], [SamplingParams(max_tokens=2, ignore_eos=True)] * 2))
        assert llm.scheduler.engine is engine


def test_a_step_that_samples_nothing_needs_no_head():
    model = parse_model_config(LLAMA)
    with_head, without = (floors(model, 2, step([0], [8], sampled), BYTES_ONLY) for sampled in ([0], []))
    assert with_head["matrix products"] - without["matrix products"] == pytest.approx(2 * 48 * 96)
    assert without["sampling"] == 0


def test_the_slower_of_bytes_and_operations_is_the_floor():
    model, batch = parse_model_config(LLAMA), decode(3)
    both = floors(model, 2, batch, Rates(1e6, 1e6))
    apart = [floors(model, 2, batch, rates)["matrix products"] for rates in (BYTES_ONLY, OPERATIONS_ONLY)]
    assert both["matrix products"] == max(apart) > min(apart)


@pytest.mark.parametrize("config", [LLAMA, QWEN3, LLAMA | {"tie_word_embeddings": True}, MOE | {"decoder_sparse_step": 2}])
def test_the_weights_that_are_multiplied_are_the_matrices_of_the_model(config):
    model = parse_model_config(config)
    weights = CausalLM(model, Spec(torch.float32, torch.device("meta"), DistributedInfo(0, 1))).state_dict()
    head = "model.embed_tokens.weight" if model.is_tied else "lm_head.weight"
    matrices = {name: weight.numel() for name, weight in weights.items() if weight.dim() == 2 and name != "model.embed_tokens.weight"}
    matrices[head] = weights[head].numel()
    experts = sum(count for name, count in matrices.items() if ".experts." in name)
    many = decode(2000)  # enough for every expert
    found = floors(model, 1, many, BYTES_ONLY)
    assert found["matrix products"] == pytest.approx(sum(matrices.values()) - experts)
    widths = [20 * 3 if model.moe is not None and model.moe.is_sparse(layer) else 80 for layer in range(4)]
    assert found["SiLU/MoE"] == pytest.approx(experts + 3 * 2000 * sum(widths))


# ---- which steps ------------------------------------------------------------------------------------------------------------------


def prefill(num_tokens: int) -> Batch:
    return step([0], [num_tokens], [0])


def test_the_widest_decode_steps_in_a_row_and_the_largest_prefill_step_are_taken():
    widths = [decode(2), decode(5), decode(5), decode(5), decode(5), decode(5), decode(3)]
    steps = [prefill(30), decode(1), prefill(40), *widths, prefill(40), decode(9), prefill(2)]
    assert choose_windows(steps, 3) == {"decode": range(5, 8), "prefill": range(10, 11)}
    assert choose_windows(steps, 1) == {"decode": range(11, 12), "prefill": range(10, 11)}
    assert choose_windows(steps, 7)["decode"] == choose_windows(steps, 99)["decode"] == range(3, 10)
    assert choose_windows([decode(1), decode(1)], 2) == {"decode": range(2)}


def test_wall_time_is_between_arrivals_since_the_next_step_is_submitted_before():
    # submitted at 0, 1, 2, 3; there at 4, 10, 12, 15
    arrived = [4.0, 10.0, 12.0, 15.0]
    steps = [WatchedStep(decode(1), None, float(number), number + 0.5, asked=3.0, arrived=there) for number, there in enumerate(arrived)]
    assert wall_seconds(steps, range(1, 2)) == 6
    assert wall_seconds(steps, range(2, 4)) == 5
    assert wall_seconds(steps, range(2)) == 10


# ---- sums -------------------------------------------------------------------------------------------------------------------------


def kernel(name: str, start: float, end: float, device: str = "CUDA", *, is_user_annotation: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), is_user_annotation=is_user_annotation, time_range=span, cpu_parent=None
    )


def test_kernels_that_overlap_are_counted_in_full_but_the_device_is_busy_once():
    launch, note = kernel("cudaGraphLaunch", 0, 90, "CPU"), kernel("step", 0, 100, is_user_annotation=True)
    kernels = [kernel("_linear_kernel", 0, 10), kernel("_decode_kernel", 8, 20), kernel("odd", 30, 34), kernel("_linear_kernel", 40, 50)]
    found = summarise([note, launch, *reversed(kernels)], 2, is_cuda=True)
    expected = dict.fromkeys((*CLASSES, OTHER), 0) | {"matrix products": 10, "attention": 6, OTHER: 2}
    assert found["us"] == pytest.approx(expected)
    assert (found["sum_us"], found["busy_us"]) == pytest.approx((18, 17))
    assert found["largest_other"] == [{"class": OTHER, "name": "odd", "us": 2.0, "calls": 0.5}]
    assert [(row["name"], row["calls"]) for row in found["largest"]] == [("_linear_kernel", 1.0), ("_decode_kernel", 0.5)]


# ---- the whole --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch):
    monkeypatch.setattr("minisgl.bench.profile.COPY_BYTES", 2**20)
    monkeypatch.setattr("minisgl.bench.profile.MIN_SECONDS", 0.01)


WORDS = ("--dummy-weight", "--num-requests", "3", "--max-input", "20", "--max-output", "6", "--repeats", "1", "--num-pages", "32")


@pytest.mark.parametrize("overlap", ["--overlap", pytest.param("--no-overlap", marks=pytest.mark.slow)])
def test_the_report_is_of_the_steps_that_it_names(tiny_models, tmp_path, capfd, overlap):
    trace, path = tmp_path / "steps.json", tmp_path / "report.json"
    words = ["bench", "offline", "--model", str(tiny_models("llama")), *WORDS, overlap, "--json", str(path)]
    assert main([*words, "--profile", "3", "--trace", str(trace)]) == 0
    report = json.loads(path.read_text(encoding="utf-8"))["profile"]
    assert report["device"] == "cpu"
    assert min(report["copy_bytes_per_s"], report["matmul_ops_per_s"]) > 0
    decode_steps, prefill_step = report["steps"]
    names = ("kind", "num_steps", "num_rows", "num_tokens", "num_attended_tokens")
    # 5 decode steps after 20 tokens of prompt: the middle ones have 22, 23 and 24 tokens in each row
    assert [decode_steps[name] for name in names] == ["decode", 3, 3, 3, 3 * 23]
    assert [prefill_step[name] for name in names] == ["prefill", 1, 3, 60, 60]
    for part in report["steps"]:
        assert part["sum_us"] == pytest.approx(sum(part["us"].values()))
        assert part["busy_us"] == pytest.approx(part["sum_us"], rel=0.02)  # one thread: self times fill what the outermost take
        assert 0 < part["busy_us"] < part["traced_wall_us"]
        assert part["gap_us"] == pytest.approx(part["traced_wall_us"] - part["busy_us"])
        assert min(part["us"][label] for label in ("attention", "matrix products", "norm", "SiLU/MoE", "sampling", OTHER)) > 0
        assert all(floor > 0 for floor in part["floor_us"].values())
        assert part["largest_other"]
    # 17 matrix products: 4 layers of 4, and the head
    calls = {row["name"]: row["calls"] for row in decode_steps["largest"]}
    assert calls["mkldnn::_linear_pointwise" if "mkldnn::_linear_pointwise" in calls else "aten::mm"] == 17
    for file, part in ((trace, decode_steps), (tmp_path / "prefill-steps.json", prefill_step)):
        assert part["trace"] == str(file)
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        assert sum(event.get("name") in calls for event in events) >= 17 * part["num_steps"]
    shown = capfd.readouterr().out
    assert re.search(r"^profile: copies at [\d,]+\.\d GB/s, matrix products at [\d,]+\.\d{3} TFLOP/s", shown, re.MULTILINE)
    for label in (*CLASSES, OTHER, "sum", "busy", "wall time", "wall time, traced", "gap"):
        assert len(re.findall(rf"^  {re.escape(label)} +-?[\d,]+\.\d", shown, re.MULTILINE)) == 2, label
    assert "only" not in shown


def requests(num: int, num_output_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    params = SamplingParams(ignore_eos=True, max_tokens=num_output_tokens)
    return [[request + 7 * place for place in range(12)] for request in range(num)], [params] * num


@pytest.mark.parametrize("settings", [{}, {"num_pages": 3, "reserve_tokens": 1}, {"max_extend_tokens": 8, "overlap": True}])
def test_a_workload_makes_the_same_steps_each_time(tiny_models, settings):
    with LLM(tiny_models("llama"), **{"num_pages": 16, "max_running_req": 4} | settings) as llm:
        runs = [run_watched(llm, requests(3, 10)) for _ in range(2)]
        first, second = ([(step.batch.cached_lens.tolist(), step.batch.extend_lens.tolist()) for step in steps] for steps in runs)
        assert first == second
        assert len(first) > 9
        assert (llm.num_retractions > 0) == ("num_pages" in settings)
    for steps in runs:
        times = [(step.submitted, step.launched, step.asked, step.arrived) for step in steps]
        assert all(list(own) == sorted(own) for own in times)
        assert times == sorted(times)
        # with overlap the next step is submitted before this one is read
        is_ahead = [later.submitted < earlier.asked for earlier, later in pairwise(steps)]
        assert any(is_ahead) == ("overlap" in settings)


def test_fewer_steps_than_asked_for_are_told_and_the_engine_is_given_back(tiny_models):
    with LLM(tiny_models("qwen3"), num_pages=16, max_running_req=4) as llm:
        engine, asked = llm.scheduler.engine, requests(2, 8)
        before = [result.token_ids for result in llm.generate(*asked)]
        lines: list[str] = []
        report = profile(llm, asked, 30, None, lines.append)
        assert llm.scheduler.engine is engine
        assert [result.token_ids for result in llm.generate(*asked)] == before
    assert "profile: 30 steps wanted; the workload has only 7 decode steps in a row, which are traced" in lines
    assert [part["num_steps"] for part in report["steps"]] == [7, 1]
    assert "trace" not in report["steps"][0]


class Breaks(LLM):
    """Its second run ends in an error."""

    num_runs = 0

    def generate(self, prompts, sampling_params=None, *, progress=None):
        self.num_runs += 1
        results = super().generate(prompts, sampling_params, progress=progress)
        if self.num_runs == 2:
            raise KeyboardInterrupt
        return results


def test_a_run_that_breaks_off_leaves_engine_and_profiler_as_they_were(tiny_models):
    with Breaks(tiny_models("llama"), num_pages=16, max_running_req=4) as llm:
        engine, asked = llm.scheduler.engine, requests(2, 8)
        with pytest.raises(KeyboardInterrupt):
            profile(llm, asked, 7, None, lambda line: None)
        assert llm.scheduler.engine is engine
        assert len(profile(llm, asked, 2, None, lambda line: None)["steps"]) == 2  # torch refuses a second profiler beside one that runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "4", "--tp", "2"], "--profile 4: the ranks of --tp 2 are other processes, not traced; leave out --tp"),
        (["--profile", "6"], "--profile: 6 found; 0 to 5 is allowed"),
        (["--profile", "-1"], "--profile: -1 found"),
        (["--trace", "trace.json"], "--trace has no effect without --profile"),
        (["--profile", "4", "--trace", "/no/such/folder/trace.json"], "--trace /no/such/folder/trace.json: its folder does not exist"),
        (["--profile", "4", "--trace", "/usr"], "--trace /usr: it is a folder, or cannot be written"),
        (["--json", "/usr"], "--json /usr: it is a folder, or cannot be written"),
        (["--profile", "4", "--json", "profile.json"], "--json profile.json: --profile writes a trace there"),
        (["--profile", "4", "--trace", "t.json", "--json", "prefill-t.json"], "--json prefill-t.json: --profile writes a trace there"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_a_model_is_loaded(words, message, capsys):
    assert main(["bench", "offline", "--model", "/no/such/model", *WORDS, *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_file_named_the_trace_stands_in_the_working_directory(tiny_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "offline", "--model", str(tiny_models("llama")), *WORDS, "--profile", "1"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prefill-profile.json", "profile.json"]


def test_a_trace_that_fails_costs_no_figure_of_the_runs_before(tiny_models, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("minisgl.bench.profile.measure_rates", fail)
    file = tmp_path / "report.json"
    with pytest.raises(RuntimeError, match="out of memory"):
        main(
            [
                "bench",
                "offline",
                "--model",
                str(tiny_models("llama")),
                *WORDS,
                "--profile",
                "2",
                "--trace",
                str(tmp_path / "t.json"),
                "--json",
                str(file),
            ]
        )
    report = json.loads(file.read_text())
    assert report["output_tokens_per_s"] > 0
    assert "profile" not in report


def test_a_trace_that_torch_could_not_write_is_an_error(tiny_models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)
    words = ["bench", "offline", "--model", str(tiny_models("llama")), *WORDS, "--profile", "2", "--trace", str(tmp_path / "t.json")]
    assert main(words) == 2
    assert "the trace could not be written there" in capsys.readouterr().err
