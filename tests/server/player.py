"""A server whose scheduler answers by itself, always the same: for tests that need any answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from minisgl.core import SamplingParams
from minisgl.message import CacheFlushedMsg, DetokenizeMsg, FlushBackendMsg, PromptLogprobsMsg, UserMsg
from tests.server.local_server import LocalServer, local_server, scored

ECHO = "<hi>"


class Player:
    """A scheduler that answers each request with ECHO and scores what it is asked to score."""

    def __init__(self, scheduler) -> None:
        self._scheduler = scheduler
        self.seen: list[SamplingParams] = []

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                self._scheduler.let_arrive(0.05)
                message = self._scheduler.hear()
                while message is not None:
                    if isinstance(message, UserMsg):
                        self._play(message)
                    elif isinstance(message, FlushBackendMsg):
                        self._scheduler.send(CacheFlushedMsg(message.uid, 0))
                    message = self._scheduler.heard_already()

    def _play(self, request: UserMsg) -> None:
        params = request.sampling_params
        self.seen.append(params)
        if params.prompt_logprobs is not None:
            prompt = request.input_ids.tolist()[1:]
            self._scheduler.send(PromptLogprobsMsg(request.uid, [scored(token, params.prompt_logprobs) for token in prompt]))
        for token in ECHO.encode():
            score = None if params.logprobs is None else scored(token, params.logprobs)
            self._scheduler.send(DetokenizeMsg(request.uid, token, logprobs=score))
        self._scheduler.end(request.uid, "stop", token=256)


@contextlib.contextmanager
def playing_server() -> Iterator[LocalServer]:
    """A local server with a Player, which is its `player`."""
    with local_server() as server:
        player, stop = Player(server.scheduler), threading.Event()
        thread = threading.Thread(target=player.run, args=(stop,))
        thread.start()
        server.player = player
        try:
            yield server
        finally:
            stop.set()
            thread.join()
