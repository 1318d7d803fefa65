"""`areal-hpc prefetch` fetches, keeps and records data of a local hub, and refuses bad names."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.commands import areal_hpc, said_by
from tests.support.json_server import JsonHandler, serving_http

COMMIT = "c0ffee00" * 5


class SmallHub:
    """Repositories as `{"models/owner/name": {"file": bytes}}`; large files are those over 64 B."""

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.asked: list[str] = []
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        hub = self

        class Handler(JsonHandler):
            protocol_version = "HTTP/1.1"

            def get(self) -> None:
                self.answer(*hub.find(self.command, self.path.partition("?")[0]))

        with serving_http(Handler) as self.url:
            yield

    def find(self, command: str, path: str) -> tuple[int, object, dict[str, str]]:
        self.asked.append(f"{command} {path}")
        for name, files in self.repos.items():
            plain = name.removeprefix("models/")
            listed = [{"rfilename": file} for file in files]
            described = {"id": plain.removeprefix("datasets/"), "sha": COMMIT, "siblings": listed}
            tree = [{"type": "file", "path": file, "size": 1, "oid": "0"} for file in files]
            api = {
                f"/api/{name}/revision/main": described,
                f"/api/{name}/revision/{COMMIT}": described,
                f"/api/{name}/tree/{COMMIT}": tree,
            }
            if path in api:
                return 200, api[path], {}
            file = path.removeprefix(f"/{plain}/resolve/{COMMIT}/")
            if file in files:
                return 200, files[file], _headers(files[file])
        return 404, b"", {"X-Error-Code": "RepoNotFound"}


def _headers(body: bytes) -> dict[str, str]:
    """Name large files by their SHA-256 and small ones as git does, as the hub does."""
    large = len(body) > 64
    git = hashlib.sha1(b"blob %d\0" % len(body) + body)
    etag = hashlib.sha256(body).hexdigest() if large else git.hexdigest()
    return {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}


ROWS = b'{"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}\n' * 3
WEIGHTS = b"weights of a model" * 100
REPOS = {
    "models/someone/small": {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"the same again" * 100,
        "tokenizer.json": b"{}",
    },
    "datasets/someone/sums": {
        "train-00000.jsonl": ROWS,
        "train-00001.jsonl": ROWS,
        "test-00000.jsonl": ROWS,
    },
}
RECIPE = """
experiment_name: fetched
trial_name: one
cluster: {{fileroot: {root}/runs}}
model: {{hub: someone/small}}
train_dataset: {{hub: "someone/sums/train-*.jsonl"}}
valid_dataset: {{path: {root}/valid.jsonl}}
rollout: {{workflow: some.Agent}}
"""


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    server = SmallHub(REPOS)
    with server.serving():
        yield server


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "valid.jsonl").write_bytes(ROWS)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(root=tmp_path))
    return path


def prefetch(recipe: Path, hub: SmallHub | None, *overrides: str) -> CompletedProcess[str]:
    """Run the command as a user does; without a hub, offline."""
    variables = {"HF_HOME": str(recipe.parent / "hf"), "HF_HUB_DISABLE_XET": "1"}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"} if hub else {"HF_HUB_OFFLINE": "1"}
    return areal_hpc("prefetch", recipe, *overrides, environ={**os.environ, **variables})


@pytest.mark.thorough
def test_what_the_recipe_names_is_fetched_once(recipe: Path, hub: SmallHub) -> None:
    output = said_by(prefetch(recipe, hub))
    model, train, valid, _ = output.splitlines()
    commit = COMMIT[:12]
    assert model.split()[:4] == ["model.hub", "someone/small", "at", commit]
    assert "(3 files, " in model
    assert train.split()[:4] == ["train_dataset.hub", "someone/sums", "at", commit]
    assert "(2 files, " in train
    assert valid.startswith("valid_dataset.path")

    hub.asked.clear()
    assert said_by(prefetch(recipe, hub)) == output
    assert not [call for call in hub.asked if call.startswith("GET") and "resolve" in call]
    assert said_by(prefetch(recipe, None)) == output


def test_everything_that_cannot_be_had_is_named_at_once(recipe: Path, hub: SmallHub) -> None:
    absent = (
        "model.hub=someone/else",
        "train_dataset.hub=someone/sums/absent-*",
        "valid_dataset.path=x",
    )
    answer = prefetch(recipe, hub, *absent)
    assert answer.returncode == 78
    for text in ("someone/else cannot be fetched", "at: train_dataset.hub", "valid_dataset.path"):
        assert text in answer.stderr, answer.stderr
    assert not (recipe.parent / "runs").exists()


def test_without_a_network_the_empty_cache_is_an_error(recipe: Path) -> None:
    answer = prefetch(recipe, None)
    assert answer.returncode == 78
    assert "someone/small cannot be fetched" in answer.stderr
    assert "someone/sums cannot be fetched" in answer.stderr


NPM = """#!/bin/sh
test -f package-lock.json && mkdir -p node_modules/.bin && cd node_modules/.bin &&
  printf '#!/bin/sh\\n' > opencode && chmod +x opencode
"""
"""Stand-in for npm, which puts the program of the lock's folder there."""


def test_the_harness_of_the_recipe_is_installed_once(
    recipe: Path, hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npm").write_text(NPM)
    (tmp_path / "bin" / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    overrides = (
        "rollout.workflow=areal_hpc.agents.harness.harness_agent.HarnessAgent",
        "rollout.workflow_kwargs.harness=opencode",
        "rollout.workflow_kwargs.reward=some.module:judge",
        f"rollout.workflow_kwargs.harnesses_dir={tmp_path / 'harnesses'}",
    )
    installed = tmp_path / "harnesses" / "opencode"
    assert f"opencode is installed in {installed}" in said_by(prefetch(recipe, hub, *overrides))
    assert os.access(installed / "node_modules" / ".bin" / "opencode", os.X_OK)
    assert f"opencode was there already: {installed}" in said_by(prefetch(recipe, hub, *overrides))
