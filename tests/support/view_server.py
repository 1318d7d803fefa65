"""The server of `areal-hpc view`, at work until a test is done with it."""

import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import start_areal_hpc
from tests.support.deadlines import scaled


def start_view_server(place: Path, environ: Mapping[str, str]) -> tuple[subprocess.Popen[str], str]:
    """A server of a run or of a file root, and its address."""
    server = start_areal_hpc("view", place, environ=environ)
    assert server.stdout
    line = server.stdout.readline()
    found = re.search(r"http://\S+", line)
    if found is None:
        server.kill()
        raise AssertionError(f"no address: {line}{server.communicate()[0]}")
    return server, found[0]


@contextmanager
def serving_pages(place: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """The address of a server, which Ctrl-C must then end well."""
    server, url = start_view_server(place, environ)
    try:
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=scaled(30))
    assert server.returncode == 0
