"""The seam below the offline class: requests go in, their outputs grow. One rank in this process, or several in processes of their own.

Knows messages and outputs; no prompt, no text. `LLM` uses it; `local` and `ranks` supply it.
"""

from __future__ import annotations

from typing import Protocol

from minisgl.engine.base import EngineLimits
from minisgl.llm.output import Output
from minisgl.message import BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg, PromptLogprobsMsg, UserMsg

__all__ = ["Backend", "deliver"]


class Backend(Protocol):
    """What computes. Not for several threads at once."""

    @property
    def outputs(self) -> dict[int, Output]:
        """Those that have not ended, by uid."""

    @property
    def limits(self) -> EngineLimits:
        """What the engine offers."""

    @property
    def is_overlapped(self) -> bool:
        """A step is planned while the one before it runs."""

    @property
    def num_retractions(self) -> int:
        """How often, so far, a request gave its pages back to others. Asked while no request runs."""

    def submit(self, message: UserMsg, output: Output) -> None:
        """Queue a request; it begins with the next step."""

    def abort(self, uid: int) -> None:
        """Forget a request that has not ended."""

    def run_step(self) -> None:
        """Let outputs grow. Raises WorkerError if a process that computes is gone; its requests have ended with that error then."""

    def settle(self) -> None:
        """After aborts: nothing that has been forgotten goes on."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Asked while no request runs."""

    def close(self) -> None:
        """Give everything back. A second call does nothing."""


def deliver(reply: BaseTokenizerMsg, outputs: dict[int, Output]) -> list[int]:
    """Hand a step's results to the outputs of their uids and remove those that have ended.

    Returns the uids that a stop string has ended, of which the scheduler does not know yet.
    """
    stopped = []
    for message in reply.data if isinstance(reply, BatchTokenizerMsg) else [reply]:
        assert isinstance(message, (DetokenizeMsg, PromptLogprobsMsg))
        output = outputs.get(message.uid)
        if output is None:
            continue
        if output.take(message):
            stopped.append(message.uid)
        if output.result is not None:
            del outputs[message.uid]
    return stopped
