"""A bundle proves a run's records on another machine, and whether a copy of the run is that run."""

import io
import json
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import exit_code_of
from tests.support.dashboard_run import SECRET
from tests.unit.view.run_directory import RunDirectory

AUDIT = "trained_once=6 duplicates=0 lost=0 open=0"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = RunDirectory(tmp_path / "paper" / "main")
    made.finish()
    with made.paths.recipe.open("a") as recipe:
        recipe.write(f"cluster: {{agents: {{variables: {{HF_TOKEN: {SECRET}}}}}}}\n")
    model = made.paths.export_dir("step_00000003") / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"weights")
    made.paths.metrics.write_text(
        '{"step": 1, "reward/mean": 0.25}\n{"step": 3, "reward/mean": 0.75}\n'
    )
    return made.paths


@pytest.fixture
def bundle(run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = tmp_path / "bundle.tar.gz"
    assert exit_code_of("report", run.root, "--bundle", "--out", out) == 0
    assert "SHA-256 of the bundle: " in capsys.readouterr().out
    return out


def test_a_bundle_is_audited_without_its_run_and_against_a_copy_of_it(
    run: RunPaths, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    with tarfile.open(bundle) as archive:
        names = set(archive.getnames())
        card, manifest, recipe = (
            archive.extractfile(name).read().decode()  # type: ignore[union-attr]
            for name in ("MODEL_CARD.md", "MANIFEST.json", "run/recipe.yaml")
        )
    assert {"report.html", "uv.lock", "run/metrics.jsonl", "run/index/cell-0.jsonl"} <= names
    assert "| training reward | 0.250 at first, 0.750 at last |" in card
    assert AUDIT in card
    assert SECRET not in recipe
    left_out = {f"shards/cell-0-00000{number}.h5" for number in range(3)}
    left_out.add("export/step_00000003/model.safetensors")
    assert json.loads(manifest)["left_out"].keys() == left_out
    assert exit_code_of("audit", run.root, "--bundle", bundle) == 0
    assert "compared 13 files of the bundle and 4 in " in capsys.readouterr().out
    shutil.rmtree(run.root)
    assert exit_code_of("audit", "--bundle", bundle) == 0
    assert AUDIT in capsys.readouterr().out


def test_a_bundle_of_sft_alone_has_its_model_and_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = RunPaths(tmp_path / "paper" / "sft")
    run.sft_export.mkdir(parents=True)
    run.recipe.write_text(
        "train_dataset: null\nsft: {total_steps: 2, dataset: {hub: team/chats}}\ntrainer: {}\n"
    )
    (run.sft_export / "model.safetensors").write_bytes(b"weights")
    run.sft_metrics.write_text(
        '{"step": 1, "loss": 2.5, "eval/loss": 2.0}\n{"step": 2, "loss": 1.25, "eval/loss": 1.5}\n'
    )
    out = tmp_path / "bundle.tar.gz"
    assert exit_code_of("report", run.root, "--bundle", "--out", out) == 0
    with tarfile.open(out) as archive:
        card, manifest = (
            archive.extractfile(name).read().decode()  # type: ignore[union-attr]
            for name in ("MODEL_CARD.md", "MANIFEST.json")
        )
    assert json.loads(manifest)["left_out"].keys() == {"export/sft/model.safetensors"}
    assert "| demonstrations | team/chats |" in card
    assert "| loss on demonstrations | 2.500 at first, 1.250 at last |" in card
    assert "| held-out loss | 2.000 at first, 1.500 at last |" in card
    assert "agent" not in card


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run.shards_dir / "cell-0-000001.h5").unlink(), "the file is missing"),
        (
            lambda run: (run.export_dir("step_00000003") / "model.safetensors").write_text("other"),
            "expected 7 bytes with SHA-256",
        ),
    ],
)
def test_a_copy_that_differs_is_told(
    run: RunPaths,
    bundle: Path,
    damage: Callable[[RunPaths], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(run)
    assert exit_code_of("audit", run.root, "--bundle", bundle) == 65
    assert message in capsys.readouterr().out


def change(members: dict[str, bytes]) -> None:
    members["run/metrics.jsonl"] += b'{"step": 4, "reward/mean": 1.0}\n'


def forge(members: dict[str, bytes]) -> None:
    """Leave out a batch of the checkpoint, and its digest."""
    name = "run/manifests/batch_00000002.json"
    del members[name]
    manifest = json.loads(members["MANIFEST.json"])
    del manifest["files"][name]
    members["MANIFEST.json"] = json.dumps(manifest).encode()


def recolor(members: dict[str, bytes]) -> None:
    manifest = json.loads(members["MANIFEST.json"])
    manifest |= {"run": "paper\x1b[2J", "areal_hpc": "1\x1b[2J", "time": "now\x1b[2J"}
    members["MANIFEST.json"] = json.dumps(manifest).encode()
    members["more"] = b""


def escape(members: dict[str, bytes]) -> None:
    manifest = json.loads(members["MANIFEST.json"])
    manifest["files"]["../../etc/passwd"] = manifest["files"]["uv.lock"]
    members["MANIFEST.json"] = json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change, "bytes with SHA-256"),
        (lambda members: members.pop("run/metrics.jsonl"), "the file is missing"),
        (lambda members: members.update({"more": b""}), "the manifest does not name it"),
        (escape, "names a file outside"),
        (forge, "lost=2"),
        (recolor, "paper\\x1b[2J, written by areal-hpc 1\\x1b[2J at now\\x1b[2J: compared"),
    ],
)
def test_a_bundle_that_was_tampered_with_is_told(
    bundle: Path,
    tamper: Callable[[dict[str, bytes]], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tarfile.open(bundle) as archive:
        members = {
            member.name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }
    tamper(members)
    with tarfile.open(bundle, "w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert exit_code_of("audit", "--bundle", bundle) == 65
    assert message in capsys.readouterr().out


def test_nothing_outside_of_a_bundle_is_read_through_its_links(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(bundle) as archive:
        manifest = archive.extractfile("MANIFEST.json").read()  # type: ignore[union-attr]
    (tmp_path / "MANIFEST.json").write_bytes(manifest)
    with tarfile.open(bundle, "w:gz") as archive:
        link = tarfile.TarInfo("MANIFEST.json")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "MANIFEST.json")
        archive.addfile(link)
    assert exit_code_of("audit", "--bundle", bundle) == 78
    assert "this is no bundle, or a damaged one" in capsys.readouterr().err


def test_other_files_are_no_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.tar.gz"
    other.write_bytes(b"no archive")
    assert exit_code_of("audit", "--bundle", other) == 78
    assert "this is no bundle, or a damaged one" in capsys.readouterr().err
    assert exit_code_of("audit") == 78
    assert "expected a run directory" in capsys.readouterr().err
