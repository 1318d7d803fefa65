"""Harbor's task folders become rows, and unsupported parts are refused by name."""

import asyncio
import errno
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.dataset.harbor.task_folder import (
    read_container_file,
    read_task_folder,
    read_task_folders,
)
from areal_hpc.dataset.sources import iterate_task_rows, list_source_paths
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.reward import harbor
from areal_hpc.reward.harbor import (
    HarborTask,
    build_archive,
    find_harbor_task,
    parse_verdict,
    resolve_task_path,
)
from areal_hpc.sandbox.sandbox import SandboxLimits, SandboxSpec


def write_task(folder: Path, task: str = "", container: str = "FROM debian:12\n") -> Path:
    for name, text in {
        "task.toml": f'schema_version = "1.4"\n{task}',
        "instruction.md": "Do it.",
        "environment/Dockerfile": container,
        "environment/app/a.py": "a = 1\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def read(folder: Path) -> HarborTask:
    task = find_harbor_task(json.loads(json.dumps(read_task_folder(folder))))
    assert task is not None
    return task


def test_a_task_folder_is_a_row_with_its_instruction_and_its_sandbox(tmp_path: Path) -> None:
    container = (
        "# a comment\nFROM python:3.11-slim\nWORKDIR /app\nENV A=1 \\\n  B='two words'\n"
        "COPY app/ ./\nCOPY --chown=me app/a.py /data/\nLABEL x=y\n"
    )
    task = (
        "[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 7.0\nenv = {C = 'x'}\n"
        "[environment]\nallow_internet = false\nmemory = '1G'\nstorage_mb = 8\n"
    )
    folder = write_task(tmp_path / "one", task, container)
    config = TaskSetConfig(path=tmp_path)
    (row,) = iterate_task_rows(config, "train_dataset")
    assert row["messages"] == [{"role": "user", "content": "Do it."}]
    assert row["limits"] == {"timeout_s": 37.0}
    assert list_source_paths(config, "train_dataset") == [tmp_path]
    loaded = read(folder)
    assert loaded.variables == {"A": "1", "B": "two words"}
    assert loaded.copies == (("environment/app", "/app"), ("environment/app/a.py", "/data/a.py"))
    assert loaded.folders == ("/logs", "/tests", "/solution", "/app", "/data")
    assert (loaded.work_dir, loaded.has_network, loaded.test_timeout_s) == ("/app", False, 7.0)
    assert (loaded.memory_bytes, loaded.disk_bytes) == (1 << 30, 8 << 20)
    assert loaded.test_variables == {"C": "x"}


def test_unreadable_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harbor, "READ_PAUSE_S", 0.0)
    errors = iter([OSError(errno.ESTALE, "Stale file handle")])

    def build_archive_after_errors(*pairs: Any, **folders: Any) -> bytes:
        for error in errors:
            raise error
        return build_archive(*pairs, **folders)

    monkeypatch.setattr(harbor, "build_archive", build_archive_after_errors)
    (tmp_path / "test.sh").write_text("true")
    content = asyncio.run(harbor._build_archive_with_retries([(tmp_path, "/tests")], ["/logs"]))
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["logs", "tests", "tests/test.sh"]


def test_a_task_s_sandbox_has_no_more_than_the_recipe_or_the_task_allows(tmp_path: Path) -> None:
    closed = read(write_task(tmp_path / "closed", "[agent]\nnetwork_mode = 'no-network'\n"))
    spec = SandboxSpec(network="open", limits=SandboxLimits(memory_bytes=1 << 30))
    assert closed.apply_task_to_sandbox_spec(spec).network == "session-only"
    assert closed.apply_task_to_sandbox_spec(SandboxSpec(network="none")).network == "none"
    large = read(write_task(tmp_path / "large", "[environment]\nmemory_mb = 4096\n"))
    assert large.apply_task_to_sandbox_spec(spec).limits.memory_bytes == 1 << 30
    assert large.apply_task_to_sandbox_spec(spec).network == "open"


def test_a_root_file_system_beside_the_dockerfile_stands_for_its_image(tmp_path: Path) -> None:
    container = "FROM x\nWORKDIR /src\nRUN make\nCOPY app /src\n"
    folder = write_task(tmp_path / "one", "[environment]\ndocker_image = 'a/b:1'\n", container)
    with pytest.raises(RecipeError) as caught:
        read_task_folder(folder)
    messages = [problem.message for problem in caught.value.problems]
    assert messages == ["its image has to be built: RUN make", "its image a/b:1 has to be fetched"]
    (folder / "environment/rootfs").mkdir()
    task = read(folder)
    assert (task.root, task.work_dir) == (str(folder / "environment/rootfs"), "/src")
    assert task.copies == ()


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("[[steps]]\nname = 'one'\n", "steps is not supported"),
        ("[agent]\nuser = 'root'\n", "agent.user is not supported"),
        ("[verifier]\nuser = 0\n", "verifier.user is not supported"),
        (
            "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org']\n",
            "agent.network_mode is not supported: .*pypi.org",
        ),
        (
            "[agent]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'public'\n",
            "one sandbox has one network",
        ),
        ("[verifier]\nenvironment_mode = 'separate'\n", "verifier.environment_mode"),
        ("[[verifier.collect]]\ncommand = 'x'\n", "verifier.collect"),
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ("[environment]\nos = 'windows'\n", "environment.os"),
        ("[[environment.mcp_servers]]\nname = 'x'\n", "environment.mcp_servers"),
        ("[environment.healthcheck]\ncommand = 'x'\n", "environment.healthcheck"),
        ("[environment]\nenv = {A = '${HOME}'}\n", "environment.env.A refers to a variable"),
        ("[environment]\nworkdir = 'app'\n", "absolute path"),
        ("[agent]\nspeed = 1\n", "unknown key 'speed'"),
        ("[agent\n", "cannot be read as TOML"),
    ],
)
def test_what_a_sandbox_cannot_do_is_refused_by_name(task: str, named: str, tmp_path: Path) -> None:
    write_task(tmp_path / "fine")
    write_task(tmp_path / "odd", task)
    with pytest.raises(RecipeError, match=named) as caught:
        read_task_folders(tmp_path, "train_dataset.harbor")
    assert all("odd" in problem.key for problem in caught.value.problems)


def test_a_folder_without_tasks_or_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no Harbor task at"):
        read_task_folders(tmp_path, "train_dataset.harbor")
    folder = write_task(tmp_path / "one", container="FROM x\nCOPY app /usr/lib/app\n")
    (folder / "tests/test.sh").unlink()
    with pytest.raises(RecipeError, match=r"no tests/test\.sh") as caught:
        read_task_folder(folder)
    assert "read-only in a sandbox" in str(caught.value)


def test_a_copy_from_outside_of_the_build_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", container="FROM x\nCOPY ../../secret /app/\n")
    with pytest.raises(RecipeError, match="not below"):
        read_container_file(folder / "environment/Dockerfile")


@pytest.mark.parametrize(
    "name", ["instruction.md", "tests", "environment/data", "environment/rootfs", "task.toml"]
)
def test_a_task_whose_links_lead_out_of_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("of the user")
    container = "FROM x\nCOPY data/key /app/key\n" if name.endswith("data") else ""
    folder = write_task(tmp_path / "one", container=container or "FROM x\n")
    path = folder / name
    target: Path = secret
    if path.is_file():
        target = path.rename(secret / path.name)
    elif path.exists():
        target = path.rename(secret / "moved")
    path.symlink_to(target)
    with pytest.raises(RecipeError, match=f"{name}.* leads to {secret}"):
        read_task_folder(folder)


def test_a_link_that_is_planted_later_is_not_played(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one")
    (tmp_path / "secret").mkdir()
    (folder / "tests").rename(folder / "old")
    (folder / "tests").symlink_to(tmp_path / "secret")
    with pytest.raises(RecipeError, match="out of the task's folder"):
        resolve_task_path(folder, "tests")


@pytest.mark.parametrize("line", ["ENV A=it's", "COPY app/a'.py /app/", 'COPY ["app/a.py" /app/'])
def test_an_instruction_that_cannot_be_read_is_quoted(line: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", container=f"FROM x\n{line}\n")
    with pytest.raises(RecipeError, match="cannot be read, ") as caught:
        read_task_folder(folder)
    assert line in str(caught.value)


def test_a_file_goes_into_the_working_folder_and_never_in_its_place(tmp_path: Path) -> None:
    container = "FROM x\nWORKDIR /app\nCOPY\tapp/a.py /app\n"
    task = read(write_task(tmp_path / "one", container=container))
    assert task.copies == (("environment/app/a.py", "/app/a.py"),)


def test_rewards_of_files_are_read_as_harbor_reads_them() -> None:
    assert parse_verdict("reward.txt", b" 0.5\n").value == 0.5
    assert parse_verdict("reward.json", b"1").value == 1.0
    both = parse_verdict("reward.json", b'{"reward": 0.25, "speed": 3}')
    assert (both.value, both.parts) == (0.25, {"reward": 0.25, "speed": 3.0})
    assert parse_verdict("reward.json", b'{"a": 1, "b": 0}').value == 0.5
    for name, content in (
        ("reward.txt", b""),
        ("reward.txt", b"nan"),
        ("reward.json", b'{"a": "1"}'),
        ("reward.json", b"[1]"),
        ("reward.json", b"{}"),
        ("reward.json", b"[" * 10_000),
    ):
        with pytest.raises(ValueError, match="holds no reward"):
            parse_verdict(name, content)


@pytest.mark.parametrize(
    ("container", "work_dir", "variables", "built"),
    [
        ("FROM x\nRUN <<EOF\nENV A=1\nCOPY a /b\nWORKDIR /c\nEOF\nENV B=2\n", "", {"B": "2"}, 1),
        ("FROM x\nRUN <<-'E' cat\n\tENV A=1\n\tE\nWORKDIR /d\n", "/d", {}, 1),
        ("FROM x\nCOPY <<A <<B /app/\nENV A=1\nA\nENV B=1\nB\nENV C=3\n", "", {"C": "3"}, 1),
        ("# escape=`\nFROM x\nENV A=1 `\n  B=2\nWORKDIR /e\n", "/e", {"A": "1", "B": "2"}, 0),
        ("FROM x AS one\nWORKDIR /one\nENV A=1\nRUN make\nFROM y\nENV B=2\n", "", {"B": "2"}, 0),
        ("FROM --platform=p x AS one\nENV A=1\nFROM one\nWORKDIR /f\n", "/f", {"A": "1"}, 0),
        ("FROM x\nWORKDIR /../../app\nWORKDIR ../data\n", "/data", {}, 0),
        ("FROM x\nADD app.tgz /app/\n", "", {}, 1),
        ("FROM x\nRUN cat <<< word\nENV A=1\n", "", {"A": "1"}, 1),
        ("FROM x\nRUN echo $((1<<20)) $((n<<k))\nENV A=1\n", "", {"A": "1"}, 1),
    ],
)
def test_a_dockerfile_is_read_as_docker_reads_it(
    tmp_path: Path, container: str, work_dir: str, variables: dict[str, str], built: int
) -> None:
    (tmp_path / "Dockerfile").write_text(container)
    parsed = read_container_file(tmp_path / "Dockerfile")
    assert (parsed.work_dir, parsed.variables, parsed.copies) == (work_dir, variables, [])
    assert len(parsed.instructions_needing_build) == built
