"""The server: it listens, answers until a signal comes, and then ends what it began."""

import asyncio
import socket

import uvicorn

from .front import Front
from .service import Service, make_app

GRACE_SECONDS = 30  # for texts that are being written when the signal comes


class Server(uvicorn.Server):
    """Serves the endpoints of a [`Service`]; listens from the start, answers in `run()`.

    SIGTERM and SIGINT end it: requests that wait, or have not come as a whole, are refused. Texts that are being
    written have 30 seconds; then they are cancelled.

    Args:
        service (`Service`): The endpoints.
        host (`str`): The address to listen at.
        port (`int`): The port to listen at; 0 takes a free one.
        api_key (`str`, *optional*): What clients must send as their key.
    """

    def __init__(self, service: Service, host: str, port: int, api_key: str | None = None) -> None:
        app = Front(make_app(service), host, api_key)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
        super().__init__(config)
        self.service, self.engine = service, service.engine
        self._listener = socket.create_server((host, port))

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until a signal comes, or until `should_exit` is set."""
        try:
            super().run(sockets or [self._listener])
        finally:
            self.engine.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse what waits, end as uvicorn does, and then the engine, while there is still a loop to tell."""
        self.engine.drain()
        self.service.intake.refuse_unreceived()
        await super().shutdown(sockets)
        await asyncio.to_thread(self.engine.close)
