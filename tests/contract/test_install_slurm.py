"""scripts/install_slurm.sh says what to do where it can install nothing. Nothing is installed."""

from pathlib import Path

from tests.support.commands import only_programs, run_program, write_program
from tests.support.environments import CHECKOUT


def refusal(path: Path) -> str:
    """What a user without root is told, with no Slurm on the PATH."""
    write_program(path / "id", "echo 1000")
    environ = {"PATH": only_programs(path, "bash", "dirname", "env")}
    ended = run_program(CHECKOUT / "scripts" / "install_slurm.sh", environ=environ)
    assert ended.returncode == 78
    return ended.stderr


def test_another_distribution_is_told_what_to_install(tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert "apt-get is not here (missing: " in said
    assert "  try: install Slurm 22.05 or newer with slurmdbd, munge and MariaDB" in said


def test_a_user_without_root_is_told_the_command_for_one_who_has_it(tmp_path: Path) -> None:
    write_program(tmp_path / "apt-get", "exit 1")
    said = refusal(tmp_path)
    assert "installing packages needs root (missing: " in said
    assert "  try: sudo scripts/install_slurm.sh" in said
