"""The API process (hops 1, 2 and 12): one event loop with the HTTP server. Started by the launcher, which also opened the port."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from functools import partial

import uvicorn

from minisgl.errors import RequestError
from minisgl.processes.child import Child, Order, run_child
from minisgl.server.app import create_app
from minisgl.server.defaults import read_defaults
from minisgl.server.frontend import Frontend
from minisgl.server.health import Health
from minisgl.server.http_options import HttpOptions
from minisgl.server.http_protocol import HttpProtocol
from minisgl.utils.heartbeat import PulseReader

LAST_WORDS_S = 3
"""How long answers that break off may take to reach slow clients."""

DRAIN_POLL_S = 0.05


class ApiProcess:
    """The server and the orders it gets, which arrive in another thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: Child | None = None
        self._frontend: Frontend | None = None
        self._server: uvicorn.Server | None = None
        self._drained: asyncio.Task[None] | None = None

    def run(self, child: Child) -> None:
        """Serve until told to close."""
        self._child, config, own = child, child.config, child.setup.own
        options = HttpOptions(**own["http"])
        assert config.model_path is not None  # the launcher resolved it
        defaults = read_defaults(config.model_path)
        self._frontend = Frontend(config.zmq_frontend_addr, config.zmq_detokenizer_addr, options)

        def on_started() -> None:
            self._loop = asyncio.get_running_loop()
            child.report("ready", f"sampling defaults: {defaults}")

        health = Health(self._frontend, PulseReader(child.setup.heartbeat_fd), child.setup.workers)
        app = create_app(self._frontend, own["model_name"], on_started, defaults, health, options)
        self._server = make_server(app, options)
        with socket.socket(fileno=child.setup.listen_fd) as listener:
            self._server.run(sockets=[listener])

    def obey(self, order: Order) -> None:
        """Called in the thread that hears the launcher. An order before the start finds nothing to close."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._carry_out, order)

    def close(self) -> None:
        """The launcher is gone: the same as an order to close, then a moment for the last words."""
        if self._loop is not None:
            self.obey(Order("close", "the server has been stopped"))
            time.sleep(LAST_WORDS_S)

    def _carry_out(self, order: Order) -> None:
        assert self._child is not None
        assert self._frontend is not None
        assert self._server is not None
        if order.kind == "open":
            self._frontend.open_doors()
            self._child.report("open")
        elif order.kind == "drain":
            self._frontend.drain(RequestError(order.text, status=503, code="draining"))
            self._drained = asyncio.create_task(self._report_when_drained(self._child, self._frontend))
        else:
            self._frontend.close_doors(RequestError(order.text, status=503, code="server_stopped"))
            self._server.should_exit = True

    @staticmethod
    async def _report_when_drained(child: Child, frontend: Frontend) -> None:
        while frontend.num_open:
            await asyncio.sleep(DRAIN_POLL_S)
        child.report("drained")


def make_server(app: object, options: HttpOptions) -> uvicorn.Server:
    """The HTTP server with our settings: it configures no logging, opens no port and handles no signal that we care for."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI application
        http=partial(HttpProtocol, options=options),  # type: ignore[arg-type]  # as good as a class
        h11_max_incomplete_event_size=options.max_header_bytes,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    return uvicorn.Server(config)


def main() -> int:
    """The process. Returns its exit status."""
    process = ApiProcess()
    return run_child(process.run, on_order=process.obey, on_parent_gone=process.close)


if __name__ == "__main__":
    sys.exit(main())
