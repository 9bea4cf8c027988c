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

    Only loopback is listened on, and only requests that name it as their host are answered: a
    page of the internet whose name was made to point here gets nothing.

    Args:
        page: the file.
        port: where to listen; 0 takes a free port.

    Raises:
        InputError: the port cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, page: bytes, port: int = 0) -> None:
        """Listen."""
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
        """Ignore that a browser has disconnected; report other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Handles a request, without a log on stderr."""

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
        """Add what keeps other pages from using this one. Its own policy is in the page."""
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
