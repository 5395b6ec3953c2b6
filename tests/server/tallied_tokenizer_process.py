"""The tokenizer process, with a tally of its requests in the file that TALLY names: a line for what is wrong, who has not ended, and
how many requests the process still holds.

An accepted request ends once: by its final reply, or, where its client has left, by the one order to the scheduler to forget it. Run as a
child by the launcher, for every test that starts a server as processes.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import ClassVar, TypeVar

from minisgl.message import AbortBackendMsg, BatchBackendMsg, BatchFrontendMsg, UserReply
from minisgl.processes.child import run_child
from minisgl.server.tokenizer_process import main
from minisgl.tokenizer import worker
from minisgl.utils import ZmqPushQueue

T = TypeVar("T")


class Tally:
    """What has been sent of each uid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: set[int] = set()
        self._finals: Counter[int] = Counter()
        self._aborts: Counter[int] = Counter()
        self._wrong: list[str] = []

    def note(self, message) -> None:
        batch = message.data if isinstance(message, (BatchFrontendMsg, BatchBackendMsg)) else [message]
        for each in batch:
            if isinstance(each, UserReply) and each.kind == "accepted":
                self._open.add(each.uid)
            elif isinstance(each, UserReply) and each.kind == "final" and each.num_prompt_tokens > 0:
                self._end(each.uid, self._finals, "final replies")
            elif isinstance(each, AbortBackendMsg):
                self._end(each.uid, self._aborts, "aborts")
        aside = self._path.with_suffix(".new")
        aside.write_text(json.dumps({"wrong": self._wrong, "open": sorted(self._open), "num_held": len(CountedOutput.held)}))
        aside.replace(self._path)  # so that no reader finds half of it

    def _end(self, uid: int, counts: Counter[int], what: str) -> None:
        counts[uid] += 1
        self._open.discard(uid)
        if counts[uid] > 1:
            self._wrong.append(f"uid {uid} has {counts[uid]} {what}")


class CountedOutput(worker.Output):
    """Tells how many there are; one that something still refers to is among them."""

    held: ClassVar[weakref.WeakSet[CountedOutput]] = weakref.WeakSet()

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.held.add(self)


class TallyingQueue(ZmqPushQueue[T]):
    """Notes what is put."""

    tally = Tally(Path(os.environ["TALLY"]))

    def put(self, message) -> None:
        self.tally.note(message)
        super().put(message)


if __name__ == "__main__":
    worker.ZmqPushQueue = TallyingQueue
    worker.Output = CountedOutput
    sys.exit(run_child(main))
