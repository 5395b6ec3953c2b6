"""A question to a running server with the `openai` package, the answer shown as it is being written.

python examples/openai_client.py URL QUESTION        URL as the server prints it: http://127.0.0.1:1919/v1
"""

from __future__ import annotations

import sys
import time

from openai import OpenAI


def main(url: str, question: str) -> None:
    """Ask the first model that is served there; the speed goes to stderr."""
    client = OpenAI(base_url=url, api_key="none is asked for")
    model = client.models.list().data[0].id
    start, num_tokens = time.monotonic(), 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=256,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    seconds = time.monotonic() - start
    print()
    print(f"[{model}: {num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} URL QUESTION")
    main(*sys.argv[1:])
