"""Commands on a run directory in any state answer without traceback and without writing."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_hpc.rundir.lock import hold_lock
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE, ensure_service_key, publish_endpoint
from tests.support.commands import exit_code_of, run_program
from tests.support.run_files import list_files, unpack_kept_run
from tests.support.thoroughness import choose

LOOKS = (
    ("status",),
    ("why",),
    ("list",),
    ("audit",),
    ("logs",),
    ("shards", "ls"),
    ("shards", "verify"),
)
LONG_LOOKS = (
    *LOOKS,
    ("why", "--slow"),
    ("why", "--collapse"),
    ("why", "--hacking"),
    ("why", "--step", "9"),
    ("report", "--out", "report.html"),
)
REPRESENTATIVES = (
    ("status",),
    ("why", "--slow"),
    ("shards", "verify"),
    ("report", "--out", "report.html"),
)
DOCUMENTED_EXIT_CODES = {0, 1, 65, 70, 75, 78}
NO_OVERRIDE = "-dac_override,-dac_read_search"
"""Capabilities by which root reads everything."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_kept_run(tmp_path_factory.mktemp("runs"))


def look_at(run: Path) -> None:
    before = list_files(run)
    for command in LOOKS:
        assert exit_code_of(*command, run) in DOCUMENTED_EXIT_CODES, command
    assert list_files(run) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_file_may_be_cut_or_damaged(run: Path, data: st.DataObject) -> None:
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    path = data.draw(st.sampled_from(files), label="file")
    content = path.read_bytes()
    damaged = bytearray(content[: data.draw(st.integers(0, len(content)), label="bytes left")])
    if damaged and data.draw(st.booleans(), label="one byte is wrong"):
        position = data.draw(st.integers(0, len(damaged) - 1), label="place")
        damaged[position] = data.draw(st.integers(0, 255), label="byte")
    path.write_bytes(damaged)
    try:
        look_at(run)
    finally:
        path.write_bytes(content)


def test_a_run_of_a_newer_version_is_looked_at(run: Path, tmp_path: Path) -> None:
    newer = shutil.copytree(run, tmp_path / "experiment" / "trial", symlinks=True)
    with (newer / "recipe.yaml").open("a") as recipe:
        print("a_later_section: {key: value}", file=recipe)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (newer / name).open("a") as rows:
            print('{"step": 99, "event": "later", "role": "later", "time": 1e9}', file=rows)
    look_at(newer)


@pytest.mark.parametrize("whose", choose(["read-only", "a colleague's"], "a colleague's"))
def test_a_directory_that_may_only_be_read(run: Path, tmp_path: Path, whose: str) -> None:
    theirs = shutil.copytree(run, tmp_path / "experiment" / "trial", symlinks=True)
    before = list_files(theirs)
    for command in choose(LONG_LOOKS, *REPRESENTATIVES):
        named = [str(tmp_path / word) if word == "report.html" else word for word in command]
        words = [sys.executable, "-m", "areal_hpc", *named, str(theirs)]
        if whose == "read-only":
            mount = f"mount --bind {theirs} {theirs} && mount -o remount,ro,bind {theirs}"
            script = f'{mount} && exec "$@"'
            words = [
                "unshare",
                "--user",
                "--map-root-user",
                "--mount",
                "sh",
                "-c",
                script,
                "-",
                *words,
            ]
        else:
            words = [*give_away(theirs), *words]
        answer = run_program(*words)
        assert answer.returncode in DOCUMENTED_EXIT_CODES, answer.stderr
        assert "Traceback" not in answer.stderr, answer.stderr
        if command[0] != "shards":
            assert answer.returncode == 0, answer.stderr
    assert list_files(theirs) == before


def test_a_colleagues_run_at_work_tells_its_state(run: Path, tmp_path: Path) -> None:
    """Keys and addresses of services are its owner's alone, so the services cannot be asked."""
    paths = RunPaths(shutil.copytree(run, tmp_path / "experiment" / "trial", symlinks=True))
    paths.finished_marker.unlink()
    publish_endpoint(paths.rendezvous_dir, LEDGER_SERVICE, "http://127.0.0.1:9")
    ensure_service_key(paths.service_key)
    before = give_away(paths.root)
    with hold_lock(paths.lock):
        answer = run_program(*before, sys.executable, "-m", "areal_hpc", "status", str(paths.root))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "running here" in answer.stdout


def give_away(run: Path) -> list[str]:
    """Give a run to another user, readable by our group, and return our commands' prefix."""
    for path in [run, *run.rglob("*")]:
        if path.is_symlink():
            continue
        is_private = path.is_file() and path.stat().st_mode & 0o077 == 0
        if os.geteuid() == 0:
            os.chown(path, 65534, 0)
            path.chmod(0o600 if is_private else 0o750)
        elif is_private:
            path.chmod(0)
    options = [f"--bounding-set={NO_OVERRIDE}", f"--inh-caps={NO_OVERRIDE}"]
    return ["setpriv", *options] if os.geteuid() == 0 else []
