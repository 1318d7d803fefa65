"""Each shipped recipe of one node starts its servers on GPUs of their own: made-up GPUs."""

from pathlib import Path

import pytest

from tests.support.made_up_gpus import (
    check_servers_get_gpus_of_their_own,
    list_recipes_of_one_node,
)


@pytest.mark.parametrize("name", list_recipes_of_one_node())
def test_each_recipe_of_one_node_starts_its_servers_on_gpus_of_their_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_servers_get_gpus_of_their_own(name, tmp_path, monkeypatch)
