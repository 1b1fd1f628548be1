"""A web server on 127.0.0.1 for the storage tests, which misbehaves on request."""

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Behaviour:
    """Behaviour of the server; tests change it while it runs."""

    ranges: bool = True  # support Range
    tells_size: bool = True  # answers to Range requests have the file's size
    tag: str = "1"  # the ETag
    redirect: str = ""  # from /x to this and /x
    fail: int = 0  # number of next requests to answer with 503
    short: int | None = None  # close the connection after this many bytes of a body
    breaks_at: int = 0  # number of the request of which only the headers are answered
    stall: int | None = None  # send nothing more after this many bytes of a body
    trickle: int | None = None  # after this many bytes of a body, send one byte every 0.1 s
    drip: bool = False  # send one byte of a header every 0.1 s, for ever
    drip_chunk: bool = False  # the same in the length of the body's first chunk
    size: str | None = None  # what answers to Range requests have for the file's size
    coding: str | None = None  # the Content-Encoding
    shift: int = 0  # start this many bytes after the requested offset
    requests: Counter[str] = field(default_factory=Counter)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(folder: Path):
    """Yield the base URL and the Behaviour of a server for the files of a folder. It stops with the block."""
    behaviour = Behaviour()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self):
            behaviour.requests[self.path] += 1
            if behaviour.fail > 0:
                behaviour.fail -= 1
                return self._head(503, 0)
            if behaviour.drip:
                return self._drip(b"HTTP/1.1 200 OK\r\nX: ", b"x")
            if behaviour.redirect and not self.path.startswith("/moved/"):
                return self._head(302, 0, {"Location": behaviour.redirect + self.path})
            path = folder / self.path.removeprefix("/moved").lstrip("/")
            if not path.is_file():
                return self._head(404, 0)
            data, headers, status = path.read_bytes(), {"ETag": behaviour.tag}, 200
            wanted = self.headers.get("Range")
            if wanted and behaviour.ranges:
                first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
                first += behaviour.shift if last else 0
                last = min(last + behaviour.shift, len(data) - 1)
                size = behaviour.size or (len(data) if behaviour.tells_size else "*")
                headers["Content-Range"] = f"bytes {first}-{last}/{size}"
                data, status = data[first : last + 1], 206
            if behaviour.drip_chunk and wanted != "bytes=0-0":
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                head = f"HTTP/1.1 {status} OK\r\nTransfer-Encoding: chunked\r\n{lines}\r\n"
                return self._drip(head.encode(), b"0")
            if behaviour.coding:
                headers["Content-Encoding"] = behaviour.coding
            self._head(status, len(data), headers)
            if behaviour.requests.total() == behaviour.breaks_at:
                self.close_connection = True
                return
            limit = next((n for n in (behaviour.short, behaviour.stall, behaviour.trickle) if n is not None), None)
            if limit is None or len(data) <= limit:
                self.wfile.write(data)
                return
            self.wfile.write(data[:limit])
            self.wfile.flush()
            if behaviour.stall is not None:
                behaviour.released.wait(10)
            while behaviour.trickle is not None and not behaviour.released.wait(0.1):
                try:
                    self.wfile.write(data[limit : limit + 1])
                except OSError:  # the client closed the connection
                    break
            self.close_connection = True

        def _drip(self, head: bytes, byte: bytes):
            with suppress(OSError):  # the client closed the connection
                self.wfile.write(head)
                while not behaviour.released.wait(0.1):
                    self.wfile.write(byte)
            self.close_connection = True

        def _head(self, status: int, size: int, headers: dict[str, str] | None = None):
            self.send_response(status)
            for name, value in {"Content-Length": str(size), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", behaviour
    finally:
        behaviour.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
