"""HTTP below the routes: uvicorn's parser, whose own refusal looks as every other answer."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .logs import log_unread, new_id
from .problems import problem
from .security import RAW_HEADERS


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools. What is no HTTP request is answered 400 with an id and a problem document."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - it is written for uvicorn's own log
        """Refuse what cannot be parsed, and close: where the next request would begin is not known."""
        request_id = new_id()
        refusal = problem(400, "this is no HTTP request that the server can read")
        own = ((b"x-request-id", request_id.encode()), (b"connection", b"close"))
        headers = b"".join(b"%b: %b\r\n" % pair for pair in (*refusal.raw_headers, *own, *RAW_HEADERS))
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (headers, bytes(refusal.body)))
        self.transport.close()
        log_unread(request_id)
