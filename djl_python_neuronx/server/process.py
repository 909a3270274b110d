"""The process of the embedded server: its ports, the models' load, signals, and the end.

It listens before it loads: `/ping` answers 503 until every graph has run once, and again after the engine has failed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from djl_python_neuronx.config.options import ServingOptions
from djl_python_neuronx.protocol.base import Threads
from djl_python_neuronx.server import management
from djl_python_neuronx.server.app import Application, create_app
from djl_python_neuronx.server.http import (
    BACKLOG,
    KERNEL_BACKLOG,
    PROBES,
    SPARE_CONNECTIONS,
    LimitedProtocol,
    drop_oldest,
)
from djl_python_neuronx.server.keys import KeyCheck
from djl_python_neuronx.server.models import Load, Loader, Model, Prepare
from djl_python_neuronx.server.page import Page

logger = logging.getLogger(__name__)

ADMIN_PATHS = frozenset({"/info", "/metrics"})
"""Paths that `option.admin_port` moves to the second port."""
RESERVED_CONNECTIONS = 2 * SPARE_CONNECTIONS
"""Connections of the second port, for which there is room when the first one has all that are allowed."""
SERVER_THREADS = 4
"""Threads for what would hold the event loop for a millisecond or more."""
LOG_METRICS_S = 60
"""Pause between two lines of the metrics: CloudWatch's usual resolution."""

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

JOIN_S = 0.5
"""Time after the drain for the engine to end by itself, and then for its threads."""
ANSWER_S = 0.3
"""Time after that, and after the export of the last spans, to write the last answers."""
END_S = 1.7
"""Time after the drain until the process ends, whatever still runs."""


def wrapped(app: ASGIApp, options: ServingOptions, api_keys: Sequence[bytes]) -> ASGIApp:
    """The app behind the check of API keys (see `Server`), CORS and the page."""
    if api_keys:
        app = KeyCheck(app, api_keys)
    if options.cors_allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors_allow_origins,
            allow_headers=["*"],
            allow_methods=["GET", "POST"],
            expose_headers=["retry-after", "x-request-id"],
        )
    return Page(app) if options.page else app


class Server(uvicorn.Server):
    """Closes the engine loop while connections are open, so that every request gets a response."""

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        drain_s: float,
        *,
        tls: ssl.SSLContext | None = None,
        api_keys: Sequence[bytes] = (),
    ) -> None:
        """Configure the ports. `api_keys`: digests, see `keys.read_keys`; none: all requests are served."""
        options = application.options
        moved = ADMIN_PATHS if options.admin_port else ()
        app = create_app(application, lambda path: path not in moved)
        application.needs_key = bool(api_keys)
        # The same one whatever is installed.
        self._silent: OrderedDict[LimitedProtocol, None] = OrderedDict()
        self._protocol: Any = partial(
            LimitedProtocol, lambda: application.options, tls, self._silent
        )
        config = uvicorn.Config(
            wrapped(app, options, api_keys),
            host=host,
            port=port,
            http=self._protocol,  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            callback_notify=application.log_metrics,
            timeout_notify=LOG_METRICS_S,
        )
        super().__init__(config)
        self._application = application
        self._drain_s = drain_s
        self.on_listening: Callable[[], None] = lambda: None
        """Called when all ports listen."""
        self._signalled = False
        self._no_descriptor_s = -math.inf
        """The time at which the log last said that no connection could be accepted."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stop; at a second signal end the process at once, with the status of a shell for it."""
        if self._signalled:
            os.write(2, b"djl-neuronx: ended by a second signal; running requests are lost\n")
            os._exit(128 + sig)
        self._signalled = True
        self.stop()

    def stop(self) -> None:
        """Begin the end: drain, and end the process after that whatever still runs. Any thread; idempotent."""
        if not self.should_exit:
            self.should_exit = True
            last = threading.Timer(self._drain_s + END_S, self._end_late)
            last.daemon = True
            last.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, also on `option.admin_port`. Ends the process if it cannot."""
        host, port = self.config.host, self.config.port
        event_loop = asyncio.get_running_loop()
        event_loop.set_exception_handler(self._on_loop_error)
        event_loop.set_default_executor(Threads(SERVER_THREADS, "djl-neuronx-server"))
        uvicorns = logging.getLogger("uvicorn.error")
        uvicorns.disabled = True  # its line of the error has neither time nor flag
        try:
            await super().startup(sockets)
        except SystemExit as ended:
            reason = _refused(ended.__context__, f"--host {host}", f"--port {port}")
            logger.error("not_listening %s", reason)  # noqa: TRY400
            raise
        finally:
            uvicorns.disabled = False
        if self._application.options.admin_port is not None:
            await self._listen_for_admin()
        # asyncio's `backlog` is also the number of connections that it accepts at once.
        for bound in [one for server in self.servers for one in server.sockets]:
            with bound.dup() as sock:
                sock.listen(KERNEL_BACKLOG)
        self.on_listening()

    async def _listen_for_admin(self) -> None:
        options, config = self._application.options, copy(self.config)
        app = create_app(self._application, lambda path: path in ADMIN_PATHS | PROBES)
        app.router.routes += management.routes(self._application)
        config.loaded_app = app
        protocol = partial(
            self._protocol,
            RESERVED_CONNECTIONS,
            config=config,
            server_state=self.server_state,
            app_state={},
        )
        host, port = options.admin_host or config.host, options.admin_port
        event_loop = asyncio.get_running_loop()
        try:
            server = await event_loop.create_server(protocol, host, port, backlog=BACKLOG)
        except OSError as error:
            of_host = f"option.admin_host={host}" if options.admin_host else f"--host {host}"
            reason = _refused(error, of_host, f"option.admin_port={port}")
            logger.error("not_listening %s", reason)  # noqa: TRY400
            raise SystemExit(1) from error
        self.servers.append(server)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening. Requests that do not end within the drain time get an error, not a closed connection."""
        ending = asyncio.create_task(super().shutdown(sockets))
        services = [one for model in self._application.models for one in model.services]
        for model in self._application.models:
            model.stop()
        if services:
            count = sum(len(service.loop.streams) for service in services)
            logger.info("stopping drain_s=%g requests=%d", self._drain_s, count)
            pool, event_loop = ThreadPoolExecutor(len(services)), asyncio.get_running_loop()
            closes = [partial(one.stop, self._drain_s, JOIN_S) for one in services]
            await asyncio.gather(*(event_loop.run_in_executor(pool, close) for close in closes))
        await asyncio.wait([ending], timeout=ANSWER_S)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)  # noqa: S101  (of `Config`)
            connection.stop()
        await ending

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Make room if no connection can be accepted, which asyncio reports up to `BACKLOG` times a second."""
        error = context.get("exception")
        if self.should_exit and "_start_serving" in context["message"]:
            return  # asyncio would listen again a second after such a failure, on a port that is closed
        if "socket" not in context or getattr(error, "errno", None) not in _NO_ROOM:
            loop.default_exception_handler(context)
            return
        drop_oldest(self._silent)
        if loop.time() - self._no_descriptor_s > LOG_METRICS_S:
            self._no_descriptor_s = loop.time()
            logger.warning(
                "connection_not_accepted reason=%r connections=%d fix='raise the limit of open files (ulimit -n), or "
                "lower option.max_connections'",
                str(error), len(self.server_state.connections),
            )  # fmt: skip

    def _end_late(self) -> None:
        """End the process because something is stuck: a device call, a text that is being tokenised, a load."""
        os.write(2, b"djl-neuronx: ended after the drain although a thread still runs\n")
        os._exit(1 if self._application.failure is not None else 0)


def serve(
    loads: Mapping[Model, Load],
    *,
    host: str,
    port: int,
    drain_s: float,
    prepare: Prepare,
    exit_on_error: bool,
    tls: ssl.SSLContext | None = None,
    api_keys: Sequence[bytes] = (),
) -> int:
    """Listen, load, serve until SIGTERM or SIGINT, drain. Returns the exit status: 1 if it cannot listen or load.

    At SIGHUP the models are loaded again. `prepare`: see `Loader`.
    """
    application = Application(*loads)
    server = Server(application, host, port, drain_s, tls=tls, api_keys=api_keys)
    application.stop = server.stop
    scheme = "http" if tls is None else "https"

    def log_ready(model: Model) -> None:
        url = f"{scheme}://{host}:{port}/invocations"
        logger.info("ready url=%s model=%s api_keys=%d", url, model.names[0], len(api_keys))

    loader = Loader(loads, prepare, log_ready, application.fail, exit_on_error=exit_on_error)
    for number in (signal.SIGTERM, signal.SIGINT):  # also before and after uvicorn handles them
        signal.signal(number, server.handle_exit)
    signal.signal(signal.SIGHUP, lambda *_: loader.reload())
    server.on_listening = loader.thread.start
    try:
        server.run()
    except SystemExit:  # it cannot listen, has logged why, and loads nothing
        return 1
    if not loader.end(JOIN_S):
        # The interpreter sometimes aborts when it ends while a thread runs torch's code.
        logging.shutdown()
        os._exit(0)
    for model in application.models:
        for service in model.services:
            service.close()
    return 0 if application.failure is None else 1


def _refused(error: BaseException | None, host: str, port: str) -> str:
    """The reason that a port cannot be opened, after the setting to change, `host` or `port`."""
    why = getattr(error, "strerror", None) or error
    if getattr(error, "errno", None) in {errno.EADDRINUSE, errno.EACCES}:
        return f"{port} ({host}): {why}; end what uses the port, or set another one"
    return f"{host}: {why}; set a name or an address of this machine, or 0.0.0.0 for all of them"
