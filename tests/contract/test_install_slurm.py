"""scripts/install_slurm.sh says what to do where it can install nothing. Nothing is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_slurm.sh"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A PATH without Slurm, apt-get or rights."""
    bash = shutil.which("bash")
    env = shutil.which("env")
    assert bash
    assert env
    (tmp_path / "bash").symlink_to(bash)
    (tmp_path / "env").symlink_to(env)
    (tmp_path / "id").write_text("#!/bin/bash\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    return tmp_path


def refusal(commands: Path) -> str:
    ended = subprocess.run(
        (SCRIPT,), env={"PATH": str(commands)}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 78
    return ended.stderr


def test_another_distribution_is_told_what_to_install(commands: Path) -> None:
    said = refusal(commands)
    assert "apt-get is not here (missing: " in said
    assert "  try: install Slurm 22.05 or newer with slurmdbd, munge and MariaDB" in said


def test_a_user_without_root_is_told_the_command_for_one_who_has_it(commands: Path) -> None:
    (commands / "apt-get").write_text("#!/bin/bash\nexit 1\n")
    (commands / "apt-get").chmod(0o755)
    said = refusal(commands)
    assert "installing packages needs root (missing: " in said
    assert "  try: sudo scripts/install_slurm.sh" in said
