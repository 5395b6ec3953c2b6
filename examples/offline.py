"""Text from a model in this process: several prompts at once, a chat as it is being written, several choices, log probabilities.

    python examples/offline.py [MODEL]

MODEL is a model directory, a .gguf file or a name on the hub; without it, a small embedded model is used.
"""

from __future__ import annotations

import sys

from minisgl.core import SamplingParams
from minisgl.llm import LLM


def main(model: str | None) -> None:
    """Load, and try each way once."""
    with LLM(model, max_seq_len=512) as llm:
        # Many prompts, each with parameters of its own; results in the order of the prompts.
        prompts = ["The capital of France is", "Water boils at"]
        params = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=42)]
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
            print(f"{prompt!r} -> {result.text!r} ({len(result.token_ids)} tokens, ended by {result.finish_reason})")

        # A chat, shown as it grows.
        print("chat: ", end="")
        for chunk in llm.stream([{"role": "user", "content": "Name a colour."}], SamplingParams(max_tokens=16)):
            print(chunk.text, end="", flush=True)
        print()

        # Three choices of one prompt, each with noise of its own; the seed brings them back.
        several = llm.generate("Once upon a time", SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=3))[0]
        print("choices:", [choice.text for choice in several.choices])

        # How sure the model was.
        scored = llm.generate("Two and two is", SamplingParams(max_tokens=2, logprobs=2))[0]
        for entry in scored.logprobs or []:
            print(f"token {entry.token_id}: log probability {entry.logprob:.3f}, likeliest {entry.top_ids}")

        # What cannot be served is told, and spoils nothing else.
        good, bad = llm.generate(["fine", []], SamplingParams(max_tokens=1))
        print(f"good: {good.error}, bad: {bad.error}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
