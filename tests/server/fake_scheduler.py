"""A scheduler process without a model: says "x" for each request every few milliseconds, until its limit or an abort.

Run as a child by the launcher. FAKE_SCHEDULER chooses another behaviour: `refuse` (a user's error while loading), `bug` (any other),
`vanish` (dies while loading), `hang` (never gets ready). FAKE_CONTEXT is the most tokens of a prompt, FAKE_STEP_S the time of a
step. A request for STUCK tokens begins a step that ends when the next message comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from minisgl.errors import ModelFormatError
from minisgl.message import BackendReadyMsg, BaseTokenizerMsg, BatchTokenizerMsg, DetokenizeMsg
from minisgl.processes.child import Child, run_child
from minisgl.utils import ZmqPullQueue, ZmqPushQueue

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.005"))
STUCK = 77


def main(child: Child) -> None:
    misbehave(os.environ.get("FAKE_SCHEDULER", ""))
    config = child.config
    inbox = ZmqPullQueue(config.zmq_backend_addr, create=True, decoder=msgspec.msgpack.decode)
    outbox = ZmqPushQueue(config.zmq_detokenizer_addr, create=False, encoder=BaseTokenizerMsg.encoder)
    child.heart.set_step_timeout(child.setup.step_timeout or 60)
    context = int(os.environ.get("FAKE_CONTEXT", "100000"))
    outbox.put(BackendReadyMsg(max_seq_len=context, num_pool_tokens=context))
    child.report("ready")
    left: dict[int, int] = {}
    is_stuck = False
    while True:
        try:
            message = inbox.get(STEP_S if left and not is_stuck else None)
        except TimeoutError:
            step(left, outbox)
            continue
        child.heart.end_step()
        is_stuck = False
        for each in message.get("data", [message]):
            if each["type"] == "UserMsg":
                left[each["uid"]] = each["sampling_params"]["max_tokens"] or 100_000
                is_stuck |= left[each["uid"]] == STUCK
            else:
                left.pop(each["uid"], None)
        if is_stuck:
            child.heart.begin_step()


def step(left: dict[int, int], outbox: ZmqPushQueue[BaseTokenizerMsg]) -> None:
    said: list[BaseTokenizerMsg] = []
    for uid in list(left):
        left[uid] -= 1
        is_last = left[uid] == 0
        said.append(DetokenizeMsg(uid, ord("x"), is_last, "length" if is_last else None))
        if is_last:
            del left[uid]
    outbox.put(BatchTokenizerMsg(said))


def misbehave(how: str) -> None:
    if how == "refuse":
        raise ModelFormatError("the weights are of cheese")
    if how == "bug":
        raise ZeroDivisionError("a bug while loading")
    if how == "vanish":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        threading.Event().wait()


if __name__ == "__main__":
    sys.exit(run_child(main))
