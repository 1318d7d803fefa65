"""A server that listens is seen from every environment in which its supervisor may run."""

import subprocess

import pytest

from tests.support.environments import CHECKOUT, python_of

LOOKS = """
import os, socket
from areal_hpc.inference.server.sglang_server import _is_listening
with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
    print(_is_listening(os.getpid(), port), _is_listening(os.getpid(), 1))
"""


@pytest.mark.parametrize("environment", ["main", "camel"])
def test_a_server_is_seen_to_listen(environment: str) -> None:
    looked = (python_of(environment), "-W", "error", "-c", LOOKS)
    found = subprocess.run(looked, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["True", "False"], found.stderr
