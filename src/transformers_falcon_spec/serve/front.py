"""What every request passes on its way to an endpoint: who asks and under which name, and a line in the log."""

import hmac
import ipaddress
import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from .service import refusal

_LOG = logging.getLogger(__name__)
OPEN_PATHS = {"/health"}  # without a key, for whoever watches over the server


class Front:
    """An application around another one, which lets in what may come in and logs how it was answered.

    Args:
        app (`ASGIApp`): The application with the endpoints.
        host (`str`): The address at which the server listens.
        api_key (`str`, *optional*): What clients must send as their key.
    """

    def __init__(self, app: ASGIApp, host: str, api_key: str | None = None) -> None:
        self.app, self._host, self._api_key = app, host, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or whatever else a server tells an application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        start = time.perf_counter()
        state = scope.setdefault("state", {})
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            error = self._error_of(scope["path"], Headers(scope=scope))
            app = self.app if error is None else refusal(error)
            await app(scope, receive, noted)
        finally:
            _LOG.info(
                "%s %.200s %d, %.3f s, %d tokens read, %d written",
                scope["method"],
                ascii(scope["path"])[1:-1],  # no line ends from outside
                status,
                time.perf_counter() - start,
                state.get("num_read", 0),
                state.get("num_written", 0),
            )

    def _error_of(self, path: str, headers: Headers) -> RequestError | None:
        """Why a request is not let in, if it is not."""
        if self._api_key is None:
            return self._error_of_name(headers.get("host", ""))
        given = headers.get("authorization", "").encode("latin-1")
        wanted = f"Bearer {self._api_key}".encode("latin-1")
        if path in OPEN_PATHS or hmac.compare_digest(given, wanted):
            return None
        return RequestError(
            "The header `Authorization` must be `Bearer` and the key of this server, but it is not. Give your client "
            "the key as its `api_key`.",
            401,
            "invalid_api_key",
        )

    def _error_of_name(self, name: str) -> RequestError | None:
        """A web page that leads its own name to this machine is not let in where only this machine should ask."""
        if not _is_loopback(self._host) or not name:
            return None
        try:
            asked = urlsplit(f"//{name}").hostname or ""
        except ValueError:
            asked = ""
        if asked in {"localhost", self._host.lower()} or _is_loopback(asked):
            return None
        return RequestError(
            f"The header `Host` must name this machine, as the server listens at {self._host} alone, but it is "
            f"{name!r:.80}. Ask `localhost`, or start the server with an `--api_key`, which lets other names in.",
            403,
            "wrong_host",
        )


def _is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which no other can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
