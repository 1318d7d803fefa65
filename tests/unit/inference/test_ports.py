"""The ports that a server is given."""

from pathlib import Path

import pytest

from areal_hpc.inference.server import sglang_server


@pytest.fixture
def outgoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel says of the ports of outgoing connections."""
    path = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(sglang_server, "_LOCAL_PORT_RANGE_FILE", path)
    return path


def test_ports_differ_and_are_given_to_no_outgoing_connection(outgoing: Path) -> None:
    outgoing.write_text("20000\t60999\n")
    found = [sglang_server.choose_server_ports() for _ in range(50)]
    assert all(ports.http != ports.rendezvous for ports in found)
    assert len({ports.http for ports in found}) > 25, "cells that start together choose alike"
    assert max(max(ports.http, ports.rendezvous) for ports in found) < 20000


def test_where_all_ports_may_be_outgoing_any_free_one_will_do(outgoing: Path) -> None:
    outgoing.write_text("1024\t65535\n")
    ports = sglang_server.choose_server_ports()
    assert 0 < ports.http != ports.rendezvous > 0
