"""No request waits for a compiler: what an engine launches has been compiled when it says that it is ready."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
import triton
from minisgl.core import SamplingParams
from minisgl.llm import LLM

compiled = []

def note(*, src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        compiled.append(src.name)

triton.knobs.compilation.listener = note
wishes = [{}, {"temperature": 1.0}, {"top_p": 0.8, "top_k": 20, "temperature": 0.9}, {"repetition_penalty": 1.2}, {"logit_bias": {5: 3.0}}]
found = {}
with LLM(sys.argv[1], dtype=sys.argv[2], device="cuda", num_pages=512, max_running_req=24) as llm:
    found["at start"], compiled = compiled, []
    for count in (1, 2, 3, 5, 8, 17, 24):
        for wish in wishes:
            params = SamplingParams(max_tokens=4, ignore_eos=True, **wish)
            prompts = [[7 + row] * (1 + 37 * row % 300) for row in range(count)]
            results = llm.generate(prompts, params, progress=False)
            assert not [result.error for result in results if result.error]
    found["later"] = compiled
print(json.dumps(found))
"""


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "bfloat16"), ("qwen3-moe", "bfloat16"), ("llama", "float32")])
def test_nothing_is_compiled_after_the_start_and_little_by_the_process_itself(tiny_models, tmp_path, name, dtype):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(tiny_models(name)), dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["later"] == []
    assert set(found["at start"]) <= {"_decode_inputs_kernel", "_update_page_table_kernel"}
