"""vLLM on the workload of `offline.py`, to be run beside it on the same card: `python benchmark/gpu/peer_vllm.py --model DIR [--out FILE]`.

Needs vLLM where it runs, and nothing of minisgl. Random weights; its defaults but for the limits that the workload needs and for
FlashInfer's sampler, which would be compiled first. One request alone has 128 tokens of prompt and 256 of output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0")
NUM_REQUESTS, SHORTEST, LONGEST = 256, 100, 1024


def run(llm: Any, prompts: list[list[int]], params: list[Any], num_runs: int) -> list[float]:
    """Output tokens per second of each run."""
    rates = []
    for _ in range(num_runs):
        deadline = time.monotonic() + 10
        while not llm.reset_prefix_cache():  # the last step, asynchronous, still holds blocks for a moment
            assert time.monotonic() < deadline, "the prefix cache is still in use"
            time.sleep(0.02)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_tokens == sum(own.max_tokens for own in params)
        rates.append(num_tokens / seconds)
        print(f"  {seconds:.3f} s, {rates[-1]:,.1f} tok/s", flush=True)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind")
    args = parser.parse_args()
    start = time.perf_counter()
    import torch
    import vllm

    limits = {"max_model_len": 4096, "max_num_seqs": NUM_REQUESTS, "gpu_memory_utilization": 0.9}
    llm = vllm.LLM(args.model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=0, **limits)
    start_s = time.perf_counter() - start
    print(f"ready after {start_s:.1f} s", flush=True)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(SHORTEST, LONGEST))] for _ in range(NUM_REQUESTS)]
    lengths = [random.randint(SHORTEST, LONGEST) for _ in range(NUM_REQUESTS)]
    assert (sum(map(len, prompts)), sum(lengths)) == (142_827, 133_966), "not the workload of the others"

    def params(length: int) -> Any:
        return vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False)

    for _ in range(2):
        run(llm, [prompts[0]] * 2, [params(8)] * 2, 1)
    draw = random.Random(2).randint
    rates = {
        f"{NUM_REQUESTS} requests": run(llm, prompts, [params(length) for length in lengths], args.runs),
        "one request": run(llm, [[draw(0, 9999) for _ in range(128)]], [params(256)], args.runs + 1)[1:],
    }
    report = {
        "engine": f"vllm {vllm.__version__}",
        "torch": torch.__version__,
        "model": Path(args.model).name,
        "start_s": start_s,
        "output_tokens_per_s": {name: {"median": statistics.median(values), "runs": values} for name, values in rates.items()},
    }
    print(json.dumps(report["output_tokens_per_s"], indent=1), flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
