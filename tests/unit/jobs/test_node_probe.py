"""Node probe: its judgment of a node's faults, and the GPUs that a process may use."""

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

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.node import (
    VISIBLE_DEVICES_VARIABLE,
    VisibleGpus,
    find_visible_gpus,
    read_numa_nodes,
    select_wanted_gpus,
)
from areal_hpc.jobs.node_probe import (
    ReachabilityServer,
    compare_gpus_with_driver,
    compute_clock_skew_s,
    find_clock_skew_problems,
    parse_gpu_errors,
    probe_node,
    query_gpu_errors,
)
from areal_hpc.jobs.task_processes import build_visible_gpus_variable
from areal_hpc.recipe.sections.cluster import WantedGpus
from areal_hpc.rundir.jobs import JobSpec, LaunchFile, ProcessSpec
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


def test_a_caller_that_hangs_up_leaves_the_first_node_to_others(tmp_path: Path) -> None:
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


def test_full_storage_is_no_node_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_slow_removal_is_no_clock_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_job_without_gpus_asks_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has GPUs, and Slurm shows the job none of them."""
    write_program(tmp_path / "nvidia-smi", "echo No devices were found; exit 6\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_TMPDIR": str(tmp_path)}
    assert probe_node(environ, tmp_path, 1, "") == []


def test_the_drivers_error_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    write_program(tool, "echo Unable to determine the device handle for GPU3; exit 15")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = compare_gpus_with_driver(["0"], *query_gpu_errors())
    assert finding.reason.startswith(
        "the GPU driver reports an error: Unable to determine the device"
    )
    write_program(tool, r"printf '0, 0\n1, 3\n'")
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TMPDIR": str(tmp_path)}
    (finding,) = probe_node(environ, tmp_path, 1, "")
    assert finding.reason == "its GPU 1 has 3 uncorrected memory errors"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3,5,7,9", ("3", "5", "7", "9")),
        (" 1, 0 ", ("1", "0")),
        ("GPU-8932f937,MIG-c1a2", ("GPU-8932f937", "MIG-c1a2")),
        ("0,-1,1", ("0",)),
        ("2,2,4", ("2", "4")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_the_variable_beats_files(value: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    visible = find_visible_gpus({VISIBLE_DEVICES_VARIABLE: value}, tmp_path)
    assert visible.ids == expected
    assert visible.source == f"CUDA_VISIBLE_DEVICES={value!r}"


def test_without_the_variable_device_files_are_counted_and_numbered_from_0(tmp_path: Path) -> None:
    for name in ("nvidia4", "nvidia6", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert find_visible_gpus({}, tmp_path).ids == ("0", "1")
    assert find_visible_gpus({}, tmp_path / "none").ids == ()


def test_a_process_sees_its_tasks_gpus_if_it_uses_them_and_under_slurm_what_slurm_says() -> None:
    trainer = ProcessSpec("trainer", "train", "a:b", {}, uses_gpus=True)
    ledger = ProcessSpec("ledger", "train", "a:b", {})
    job = JobSpec("trainer", "train", [ledger, trainer], tasks=2)
    launch = LaunchFile(job, "jobs", "logs", "events", {}, gpus=[["3", "5"], ["7", "9"]])
    assert build_visible_gpus_variable(trainer, launch, 1) == {VISIBLE_DEVICES_VARIABLE: "7,9"}
    assert build_visible_gpus_variable(ledger, launch, 1) == {VISIBLE_DEVICES_VARIABLE: ""}
    by_slurm = LaunchFile(job, "jobs", "logs", "events", {})
    assert build_visible_gpus_variable(trainer, by_slurm, 1) == {}


def test_gpus_of_a_numa_node_stand_together_and_a_list_keeps_its_order() -> None:
    visible = VisibleGpus(("0", "1", "2", "3"), "here")
    nodes = {"0": 1, "1": 0, "2": 1, "3": 0}
    assert select_wanted_gpus(visible, "auto", nodes).ids == ("1", "3", "0", "2")
    assert select_wanted_gpus(visible, 3, nodes).ids == ("1", "3", "0")
    assert select_wanted_gpus(visible, (2, "1"), nodes).ids == ("2", "1")
    assert select_wanted_gpus(visible, "none", nodes).ids == ()
    assert select_wanted_gpus(visible, "auto", {}).ids == visible.ids


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (5, "cluster.gpus=5; this machine shows 4 GPUs"),
        ((1, 7, "GPU-a"), "cluster.gpus names GPUs 7, GPU-a; this machine shows 0, 1, 2, 3"),
    ],
)
def test_gpus_that_are_not_visible_are_refused(wanted: WantedGpus, message: str) -> None:
    with pytest.raises(RecipeError, match=r"at: cluster\.gpus") as refusal:
        select_wanted_gpus(VisibleGpus(("0", "1", "2", "3"), "here"), wanted, {})
    assert message in str(refusal.value)


def test_numa_nodes_are_those_of_the_pci_addresses(tmp_path: Path) -> None:
    dev, driver, pci = tmp_path / "dev", tmp_path / "driver", tmp_path / "pci"
    dev.mkdir()
    for number, (address, node) in enumerate([("0000:9A:00.0", "1"), ("0000:1b:00.0", "0")]):
        (dev / f"nvidia{number}").touch()
        (driver / address).mkdir(parents=True)
        (pci / address.lower()).mkdir(parents=True)
        (pci / address.lower() / "numa_node").write_text(node + "\n")
    assert read_numa_nodes(dev, driver, pci) == {"0": 0, "1": 1}
    (dev / "nvidia1").unlink()  # a container that shows one of them
    assert read_numa_nodes(dev, driver, pci) == {}
    assert read_numa_nodes(tmp_path, tmp_path / "none", pci) == {}
