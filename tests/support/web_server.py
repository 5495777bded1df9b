"""A folder served by nginx, which answers ranges as the servers of the web do.

    python tests/support/web_server.py FOLDER [--latency SECONDS]

As a program it serves the folder behind the proxy of slow_proxy.py and prints its port. When its
standard input ends it prints, as JSON, the requests and its processor seconds. A benchmark runs
it so, because a proxy in its own process would compete for Python's lock with what it measures.
"""

import argparse
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from slow_proxy import proxied

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
"""Path of nginx; None if it is not installed."""

START_SECONDS = 4.0


@contextmanager
def web_server(folder: Path, scratch: Path) -> Iterator[int]:
    """Serve a folder on a free port of this machine; yield the port.

    nginx writes its own files into `scratch`.
    """
    assert NGINX is not None, "nginx is not installed"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    temporary = "".join(
        f"{kind}_temp_path {scratch}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = scratch / "nginx.conf"
    config.write_text(
        f"user {getpass.getuser()}; daemon off; pid {scratch}/pid; events {{}}\n"
        f"error_log {scratch}/error.log;\n"
        f"http {{ access_log off; sendfile on; {temporary} "
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    command = [NGINX, "-e", f"{scratch}/error.log", "-c", str(config)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_open(port)
            yield port
        finally:
            process.terminate()


def _wait_until_open(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each response")
    args = parser.parse_args()
    if NGINX is None:
        sys.exit("nginx is not installed")
    with (
        TemporaryDirectory() as scratch,
        web_server(args.folder.resolve(), Path(scratch)) as port,
        proxied(("127.0.0.1", port), latency=args.latency) as proxy,
    ):
        print(proxy.port, flush=True)
        sys.stdin.read()
        num_requests = len(proxy.seen)
    # After the servers: the processor time of nginx is known once it has ended.
    seconds = sum(os.times()[:4])
    with suppress(BrokenPipeError):  # of a program that has failed
        print(json.dumps({"requests": num_requests, "processor seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
