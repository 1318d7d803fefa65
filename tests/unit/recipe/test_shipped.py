"""Shipped recipes: each header says what a reader chooses by, and each begins a project."""

import re
from pathlib import Path

import pytest

from areal_hpc.cli.main import main
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.project_files import read_project_files
from areal_hpc.recipe.shipped import list_shipped_recipes
from tests.support.commands import exit_code_of
from tests.support.environments import CHECKOUT

RECIPES = list_shipped_recipes()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_planned_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout's folders are not looked at
    assert exit_code_of("plan", name) == 0
    assert "job trainer: " in capsys.readouterr().out


def test_the_list_has_every_recipe_quick_start_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("recipes") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == ["name", "hardware", "wall time", "purpose"]
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert lines[0].startswith("quickstart  ")
    assert max(map(len, lines)) < 170


@pytest.mark.parametrize("name", RECIPES)
def test_a_project_like_it_is_the_same_recipe_with_its_own_code(name: str, tmp_path: Path) -> None:
    project = read_project_files(name)
    for path, content in project.contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    text = load_recipe(tmp_path / project.recipe).model_dump_json()
    assert text == load_recipe(name).model_dump_json().replace("examples.", "")
    for module in re.findall(r'"([a-z_]+(?:\.[a-z_]+)+)[:.]\w+"', text):
        inside = (tmp_path / module.replace(".", "/")).with_suffix(".py")
        assert module.startswith("areal_hpc.") or inside.is_file(), module
    code = b"\n".join(project.contents.values())
    assert b"examples." not in code
    assert b"recipes/" not in code


def test_init_writes_what_can_be_run_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my project"
    assert exit_code_of("init", folder) == 0
    said = capsys.readouterr().out
    assert f"wrote    {folder / 'my_recipe.yaml'}\n" in said
    assert f"next     cd '{folder}'\n" in said
    assert said.endswith("areal-hpc run my_recipe.yaml\n")
    monkeypatch.chdir(folder)
    assert exit_code_of("plan", "my_recipe.yaml") == 0
    (folder / "my_agent.py").write_text("mine")
    capsys.readouterr()
    assert exit_code_of("init", folder) == 78
    assert "there is a file" in capsys.readouterr().err
    assert (folder / "my_agent.py").read_text() == "mine"
    with pytest.raises(SystemExit) as end:
        main(["init", str(folder), "--like", "quickstrt"])
    assert end.value.code == 78
    assert "did you mean quickstart?" in capsys.readouterr().err


def test_the_tutorial_shows_the_files_that_init_writes() -> None:
    document = (CHECKOUT / "docs" / "tutorial.md").read_text()
    agent, _ = re.findall(r"^```python\n(.*?)^```", document, re.M | re.S)
    (recipe,) = re.findall(r"^```yaml\n(.*?)^```", document, re.M | re.S)
    written = read_project_files(None).contents
    assert written == {"my_agent.py": agent.encode(), "my_recipe.yaml": recipe.encode()}
