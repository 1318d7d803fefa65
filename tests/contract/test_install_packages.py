"""How the scripts that install Debian's packages call apt-get, here a stand-in."""

from pathlib import Path
from subprocess import CompletedProcess

from tests.support.commands import only_programs, run_program, write_program
from tests.support.environments import CHECKOUT

SUCCEEDS_AFTER_AN_UPDATE = """
echo "$*" >>"$ASKED"
[ "$1" != update ] || exit 0
grep -q update "$ASKED"
"""
FAILS = 'echo "$*" >>"$ASKED"; echo "no such package"; exit 1'


def install_browser(folder: Path, apt_get: str) -> tuple[CompletedProcess[str], list[str]]:
    """How the script ended as root, and what it asked of apt-get."""
    write_program(folder / "apt-get", apt_get)
    write_program(folder / "id", "echo 0")
    asked = folder / "asked"
    path = only_programs(folder, "bash", "dirname", "env", "grep", "mktemp", "rm", "sed", "tail")
    environ = {"PATH": path, "ASKED": str(asked), "TMPDIR": str(folder)}
    ended = run_program(CHECKOUT / "scripts" / "install_browser.sh", environ=environ)
    return ended, asked.read_text().splitlines()


def test_a_package_that_is_not_found_is_asked_for_again_after_an_update(tmp_path: Path) -> None:
    ended, asked = install_browser(tmp_path, SUCCEEDS_AFTER_AN_UPDATE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line.split()[0] for line in asked] == ["install", "update", "install"]
    assert asked[-1].endswith(" chromium")
    assert list(tmp_path.glob("tmp.*")) == []


def test_what_apt_get_said_is_told_and_kept_when_it_fails(tmp_path: Path) -> None:
    ended, asked = install_browser(tmp_path, FAILS)
    assert (ended.returncode, len(asked)) == (78, 2)
    (log,) = tmp_path.glob("tmp.*")
    assert "    no such package\n" in ended.stderr
    assert f"browser: apt-get failed; its whole output is in {log}\n  try: " in ended.stderr
