"""Options that a user adds for SGLang, where there is no SGLang; the parser: tests/acceptance."""

from pathlib import Path

from areal_hpc.launch.checks.inputs import find_extra_args_problems
from areal_hpc.recipe.loading import load_recipe
from tests.support.environments import CHECKOUT


def test_without_sglang_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho no module named sglang >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml")
    inference = recipe.inference.model_copy(update={"extra_args": ("--enable-metriks",)})
    odd = recipe.model_copy(update={"inference": inference})
    assert list(find_extra_args_problems(odd, str(tmp_path / "python"))) == []
    assert list(find_extra_args_problems(recipe, "/nowhere/python")) == []
