"""Roles find one another through private files; generations are taken exclusively."""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.x509 import BasicConstraints, load_pem_x509_certificate

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.jobs.node import detect_task_position
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import claim_next_number, read_newest_number
from areal_hpc.rundir.service_client import ServiceClient
from tests.support.deadlines import scaled
from tests.support.service_keys import OTHER_SERVICE_KEY, SERVICE_KEY


def test_a_published_role_is_found_until_it_withdraws(tmp_path: Path) -> None:
    rendezvous.publish_endpoint(tmp_path, "ledger", "http://127.0.0.1:1")
    endpoint = rendezvous.find_endpoint(tmp_path, "ledger")
    assert endpoint is not None
    assert endpoint.url == "http://127.0.0.1:1"
    file = tmp_path / "ledger.json"
    own = file.read_text()
    file.write_text(own.replace(f'"pid":{os.getpid()}', '"pid":1'))
    rendezvous.remove_own_endpoint(tmp_path, "ledger")
    assert rendezvous.find_endpoint(tmp_path, "ledger") is not None, "it is its successor's"
    file.write_text(own)
    rendezvous.remove_own_endpoint(tmp_path, "ledger")
    assert rendezvous.find_endpoint(tmp_path, "ledger") is None


def test_a_service_that_has_not_started_is_named(tmp_path: Path) -> None:
    client = ServiceClient(tmp_path, "proxy-cell-0", SERVICE_KEY)
    with pytest.raises(ClusterError, match="proxy-cell-0 has not started"):
        client.call("/status", None, dict)
    client.close()


def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    key = rendezvous.ensure_admin_key(tmp_path / "admin.key")
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    assert len(key) >= 32
    assert rendezvous.ensure_admin_key(tmp_path / "admin.key") == key


def test_roles_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    start = threading.Barrier(4)

    def ensure(path: Path) -> str:
        start.wait(scaled(60))
        return rendezvous.ensure_admin_key(path)

    with ThreadPoolExecutor(4) as pool:
        for number in range(25):
            path = tmp_path / f"run-{number}" / "admin.key"
            assert len({*pool.map(ensure, [path] * 4)}) == 1
            assert [file.name for file in path.parent.iterdir()] == ["admin.key"]


@pytest.mark.parametrize(
    ("key", "mode", "complaint"),
    [
        ("", 0o600, "expected an admin key of 32 to 1024 ASCII characters, got 0"),
        ("a", 0o600, "got 1"),
        ("k" * 40, 0o644, "expected mode 0600, got 0644"),
        ("k" * 40, 0o660, "expected mode 0600, got 0660"),
    ],
)
def test_an_open_admin_key_is_refused(tmp_path: Path, key: str, mode: int, complaint: str) -> None:
    path = tmp_path / "admin.key"
    path.write_text(key)
    path.chmod(mode)
    with pytest.raises(RecipeError, match=complaint):
        rendezvous.ensure_admin_key(path)


def test_a_key_of_the_users_is_read_from_a_file_of_theirs_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text("abc\n")
    assert rendezvous.read_user_key(path, "a key") == "abc"
    for content, mode, complaint in (
        ("", 0o600, "got 0"),
        ("a\nb", 0o600, "printable"),
        ("abc", 0o640, "got 0640"),
    ):
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(RecipeError, match=complaint):
            rendezvous.read_user_key(path, "a key")
    path.chmod(0o600)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read: it is no text"):
        rendezvous.read_user_key(path, "a key")
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        rendezvous.read_user_key(tmp_path / "gone", "a key")


def test_each_service_of_each_run_has_a_key_of_its_own_which_outlasts_restarts() -> None:
    keys = [
        rendezvous.derive_bearer_key(run, name)
        for run in (SERVICE_KEY, OTHER_SERVICE_KEY)
        for name in "ab"
    ]
    assert len({*keys}) == 4
    assert keys[0] == rendezvous.derive_bearer_key(SERVICE_KEY, "a")
    assert not [key for key in keys if key in SERVICE_KEY]


def test_a_runs_certificate_holds_at_any_time_and_signs_no_other() -> None:
    certificate = load_pem_x509_certificate(
        SERVICE_KEY[SERVICE_KEY.index("-----BEGIN CERTIFICATE-----") :].encode()
    )
    assert certificate.not_valid_before_utc.year == 1950
    assert certificate.not_valid_after_utc.year == 9999
    assert not certificate.extensions.get_extension_for_class(BasicConstraints).value.ca


def test_trainers_that_start_at_once_take_different_generations(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: claim_next_number(tmp_path / "generations"), range(8)))
    assert sorted(taken) == list(range(1, 9))
    assert read_newest_number(tmp_path / "generations") == 8


def test_position_is_read_from_slurm_or_from_the_local_executor() -> None:
    slurm = detect_task_position(
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    )
    assert (slurm.rank, slurm.num_tasks, slurm.local_rank, slurm.node_rank) == (3, 4, 1, 1)
    local = detect_task_position({"SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"})
    assert (local.rank, local.num_tasks) == (1, 2)
    assert detect_task_position({}).is_first
