"""A server of one page, for browsers on this machine alone."""

from __future__ import annotations

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvcore.errors import InputError

HOST = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """HTTP server of one page: it answers GET and HEAD of `/`, and nothing else.

    The server listens on loopback alone, and answers only requests with that address as their
    host: a web site cannot read the page through a name that resolves to loopback.

    Args:
        page: the bytes of the page.
        port: port to listen at; 0 takes a free one.

    Raises:
        InputError: the port is in use, or not permitted.
    """

    daemon_threads = True

    def __init__(self, page: bytes, port: int = 0) -> None:
        """Start to listen."""
        self.page = page
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            msg = f"port {port} of {HOST}: {error.strerror}; --port 0 takes a free one"
            raise InputError(msg) from error
        port = self.server_address[1]
        self.hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        self.url = f"http://{HOST}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of disconnected browsers; report others."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers a request, without a log on stderr."""

    server: PageServer
    server_version = "kvcore"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Send the page."""
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this page is for this machine")
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(self.server.page)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(self.server.page)

    do_HEAD = do_GET  # noqa: N815 - as above

    def end_headers(self) -> None:
        """Add headers that keep other pages from embedding or reading this one."""
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Discard the log line of a request."""
