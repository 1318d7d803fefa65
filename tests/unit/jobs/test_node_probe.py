"""What the probe makes of what it finds on a node."""

import contextlib
import errno
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from areal_hpc.jobs.node_probe import (
    ReachabilityServer,
    compare_gpus_with_driver,
    compute_clock_skew_s,
    find_clock_skew_problems,
    parse_gpu_errors,
    probe_node,
    query_gpu_errors,
)
from tests.support.commands import write_program

WELL = "0, 0\n1, 0\n2, [N/A]\n3, 0\n"


def test_a_node_in_order_has_no_findings(tmp_path: Path) -> None:
    greeter = ReachabilityServer("127.0.0.1")
    greeter.start_answering(5.0)
    environ = {"SLURM_TMPDIR": str(tmp_path)}
    assert probe_node(environ, tmp_path, 1, greeter.address) == []


def test_a_clock_may_differ_a_little(tmp_path: Path) -> None:
    assert find_clock_skew_problems(0.5, tmp_path) == []
    (finding,) = find_clock_skew_problems(-90.0, tmp_path)
    assert finding.reason.startswith("its clock differs by -90 s")


def test_a_caller_that_hangs_up_leaves_the_first_node_to_be_reached_by_others(
    tmp_path: Path,
) -> None:
    greeter = ReachabilityServer("127.0.0.1")
    host, _, port = greeter.address.rpartition(":")
    with socket.create_connection((host, int(port))) as scanner:
        reset_at_close = struct.pack("ii", 1, 0)
        scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_close)
    greeter.start_answering(5.0)
    assert probe_node({"SLURM_TMPDIR": str(tmp_path)}, tmp_path, 1, greeter.address) == []


def test_what_is_wrong_is_found_and_whose_fault_it_is(tmp_path: Path) -> None:
    shared, own = probe_node({"SLURM_TMPDIR": str(tmp_path)}, tmp_path, 1 << 60, "")
    assert not shared.is_fault_of_node
    assert own.is_fault_of_node
    assert "MiB free, expected at least 1,099,511,627,776 MiB" in own.reason
    (finding,) = probe_node({"SLURM_TMPDIR": str(tmp_path / "gone")}, tmp_path, 1, "")
    assert finding.reason.endswith("gone cannot be read: No such file or directory")
    (finding,) = probe_node({}, tmp_path, 1, "127.0.0.1:1")
    assert "cannot reach the job's first node at 127.0.0.1:1" in finding.reason


def test_shared_storage_that_takes_no_files_is_no_fault_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, is_fault_of_node in ((errno.EROFS, False), (errno.EDQUOT, False), (5, True)):

        def refuse(number: int = number, **options: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
        (finding,) = probe_node({"SLURM_TMPDIR": str(tmp_path)}, tmp_path, 1, "")
        assert "cannot be written" in finding.reason
        assert finding.is_fault_of_node == is_fault_of_node


def test_storage_that_hangs_is_not_taken_for_a_clock_that_is_off() -> None:
    assert [compute_clock_skew_s(100.0, at, 165.0) for at in (100.0, 130.0, 165.0)] == [0.0] * 3
    assert compute_clock_skew_s(100.0, 60.0, 100.5) == 40.0, "the node's clock is ahead"
    assert compute_clock_skew_s(100.0, 140.5, 100.5) == -40.0, "it is behind"


def test_a_file_that_takes_long_to_go_is_no_fault_of_the_nodes_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage stands still for 65 s as the file is removed."""
    clock = [1000.0]
    monkeypatch.setattr("areal_hpc.jobs.node_probe.time.time", lambda: clock[0])

    @contextlib.contextmanager
    def make_file(**options: object) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as file:
            os.utime(file.fileno(), (clock[0], clock[0]))
            yield file
        clock[0] += 65.0

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", make_file)
    assert probe_node({"SLURM_TMPDIR": str(tmp_path)}, tmp_path, 1, "") == []


def test_gpus_are_counted_and_asked_for_their_errors() -> None:
    gpus = parse_gpu_errors(WELL)
    assert compare_gpus_with_driver(["0", "1", "2", "3"], gpus, "") == []
    (missing,) = compare_gpus_with_driver(["0", "1", "2", "3", "4"], gpus, "")
    assert missing.reason == "the driver shows 4 GPUs, Slurm allocated 5"
    broken = parse_gpu_errors(WELL.replace("3, 0", "3, 2"))
    (errors,) = compare_gpus_with_driver(["2", "3"], broken, "")
    assert errors.reason == "its GPU 3 has 2 uncorrected memory errors"
    assert compare_gpus_with_driver(["0", "1"], broken, "") == [], "another job's GPU"
    slices = ["MIG-6a0f", "MIG-91c2"]
    assert compare_gpus_with_driver(slices, parse_gpu_errors("0, 0\n"), "") == []
    # With device control groups the job's only GPU is number 0, whatever Slurm calls it.
    assert compare_gpus_with_driver(["6"], parse_gpu_errors("0, 1\n"), "")


def test_a_job_without_gpus_asks_no_driver_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node with GPUs of which Slurm shows it none."""
    write_program(tmp_path / "nvidia-smi", "echo No devices were found; exit 6\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_TMPDIR": str(tmp_path)}
    assert probe_node(environ, tmp_path, 1, "") == []


def test_the_drivers_error_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho Unable to determine the device handle for GPU3; exit 15\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = compare_gpus_with_driver(["0"], *query_gpu_errors())
    assert finding.reason.startswith(
        "the GPU driver reports an error: Unable to determine the device"
    )
    tool.write_text("#!/bin/sh\nprintf '0, 0\\n1, 3\\n'\n")
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TMPDIR": str(tmp_path)}
    (finding,) = probe_node(environ, tmp_path, 1, "")
    assert finding.reason == "its GPU 1 has 3 uncorrected memory errors"
