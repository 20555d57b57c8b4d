"""Running a server: `serve` until it is stopped, `running` for the length of a `with`."""

from __future__ import annotations

import contextlib
import errno
import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import uvicorn
from fastapi import FastAPI

from ampwatch.errors import AmpwatchError, SettingsError
from ampwatch.settings import token_path

from .app import create_app, served
from .auth import LINK_S, SCOPES, first_token
from .destinations import AlertSettings
from .diagnoser import Engine, windowed
from .service import Service
from .settings import Keep, Settings, default_database
from .wire import Protocol

DEFAULT_PORT: Final = 8765
STOP_S: Final = 5.0  # requests under way at a stop get so long to end
START_S: Final = 30.0
# Whoever reads gives the interpreter away at each call of the database, and has it back after so long at most while the
# compactor works; Python's own 5 ms, times some ten calls, would be what a read takes.
SWITCH_S: Final = 0.0005


@dataclass
class Running:
    """A server that runs: its address, a token for programs, and a link that signs a browser in.

    A link works once: when it has been opened, `link` is the next one, and `renewed` is set.
    """

    url: str
    token: str
    link: str
    renewed: threading.Event = field(default_factory=threading.Event, repr=False)


def serve(
    directory: Path | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    database: str | None = None,
    ready: Callable[[str], None] | None = None,
    *,
    allowed_hosts: Sequence[str] = (),
    root_path: str = "",
    alerts: AlertSettings | None = None,
    keep: Keep | None = None,
    compactor: Literal["thread", "process"] = "process",
) -> None:
    """Serve until SIGINT or SIGTERM. Blocks.

    Arguments:
        directory: a spool directory to show as it grows; never changed.
        host, port: to listen on.
        database: URL or path of the store; by default a SQLite file of the user's.
        ready: called with the one-time link once the server answers, and with the next one when it has been opened.
        allowed_hosts: more names that requests may be addressed to, as that of a proxy.
        root_path: path prefix under which a proxy shows the server.
        alerts: where findings are told.
        keep: how long what is stored is kept; as `Settings` has it by default.
        compactor: folds and diagnoses in a thread, or in a process of its own.
    Errors: AmpwatchError where the port is in use, or the database cannot be opened.
    """
    if root_path and not root_path.startswith("/"):
        raise SettingsError(f"root path: got {root_path!r}, it must begin with /, as /ampwatch")
    settings = Settings(
        database=database or default_database(directory),
        directory=directory,
        host=host,
        port=port,
        root_path=root_path.rstrip("/"),
        allowed_hosts=tuple(allowed_hosts),
        token_file=token_path(),
        alerts=alerts or AlertSettings(),
        keep=keep or Keep(),
        compactor=compactor,
    )
    with _listening(settings) as listener:
        sys.setswitchinterval(SWITCH_S)
        server = _Server(create_app(settings), settings, listener, ready or (lambda _link: None))
        gc.collect()
        gc.freeze()  # modules and routes live as long as the process: to look through them again takes a fifth of ingest
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


@contextmanager
def running(
    database: str,
    *,
    directory: Path | None = None,
    engine: Callable[[], Engine] = windowed,
    **settings: Any,
) -> Iterator[Running]:
    """A server on a free loopback port, in a thread, for the length of the block.

        with running(database="sqlite:///demo.db") as server:
            httpx.get(f"{server.url}/v1/runs", headers={"Authorization": f"Bearer {server.token}"})

    Arguments:
        database: URL or path of the store.
        directory: a spool directory to follow.
        engine: makes the diagnosis of a run.
        **settings: more fields of `Settings`. The token is for this block only, unless `token_file` names a file.
    Errors: AmpwatchError where it does not start.
    """
    chosen = replace(Settings(database=database, directory=directory, port=0), **settings)
    with _listening(chosen) as listener:
        server = _Server(create_app(chosen, engine), chosen, listener, lambda _link: None)
        thread = threading.Thread(target=server.run, args=([listener],), name="ampwatch-server", daemon=True)
        thread.start()
        try:
            yield server.wait_until_up(thread)
        finally:
            server.should_exit = True
            thread.join()


class _Server(uvicorn.Server):
    """uvicorn, with what happens when it is up and when it is told to stop."""

    def __init__(
        self, app: FastAPI, settings: Settings, listener: socket.socket, ready: Callable[[str], None]
    ) -> None:
        config = uvicorn.Config(
            served(app),
            log_config=None,
            access_log=False,  # it would write the codes of one-time links
            server_header=False,
            http=Protocol,
            ws="none",
            timeout_graceful_shutdown=int(STOP_S),
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._url = _url(settings, listener)
        self._token = first_token(self._service.auth, settings.token_file)
        self._ready = ready
        self._up = threading.Event()
        self.running: Running | None = None
        self._service.link_opened = self._tell

    def wait_until_up(self, thread: threading.Thread) -> Running:
        """The running server. AmpwatchError where it ends before it is up, or takes too long."""
        self._up.wait(START_S)
        if self.running is None:
            raise AmpwatchError(
                "the server did not start; its log says why" if thread.is_alive() else "the server ended"
            )
        return self.running

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop. A second Ctrl-C changes nothing: stopping is bounded in time, and uvicorn would end in a traceback."""
        if not self.should_exit:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then tell."""
        try:
            await super().startup(sockets)
            self._tell()
        finally:
            self._up.set()

    def _tell(self) -> None:
        if self.started:
            link = f"{self._url}/link/{self._service.auth.issue('link', 'printed', SCOPES, LINK_S)}"
            if self.running is None:
                self.running = Running(self._url, self._token, link)
            else:
                self.running.link = link
                self.running.renewed.set()
            self._ready(link)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the event streams first: uvicorn waits for every answer under way, and they have no end."""
        self._service.hub.close()
        await super().shutdown(sockets)


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """A listening socket, bound before anything else is done. AmpwatchError says what to do about a taken port."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise SettingsError(f"host: {host!r} is not an address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            raise _cannot_listen(error, host, port) from error
        yield listener


def _cannot_listen(error: OSError, host: str, port: int) -> AmpwatchError:
    if error.errno == errno.EADDRINUSE:
        return AmpwatchError(
            f"port {port} of {host} is in use, perhaps by another ampwatch: "
            f"choose another with --port {port + 1}, or any free one with --port 0"
        )
    return AmpwatchError(f"cannot listen on {host}:{port}: {error.strerror}; choose with --host and --port")


def _url(settings: Settings, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"
