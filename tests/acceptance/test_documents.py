"""The blocks of AReaL's guides: extracted, listed, and their settings understood."""

import re

import pytest
import yaml

from areal_hpc.areal.api.cli_args import AgentRLConfig
from areal_hpc.areal.config.rules import find_rule_key, flatten_to_dotted_keys
from areal_hpc.areal.config.translation import translate_to_recipe
from areal_hpc.areal.loading import to_config
from tests.support.agents_table import locked
from tests.support.document_commands import COMMANDS
from tests.support.document_scenes import SCENES
from tests.support.documents import Block, blocks

BLOCKS = {block.key: block for block in blocks()}
SETTINGS = [block for block in BLOCKS.values() if block.language == "yaml"]


def test_every_block_that_can_run_is_run() -> None:
    run = {key for key, block in BLOCKS.items() if block.language in ("python", "command")}
    assert run == SCENES.keys() | COMMANDS.keys()


@pytest.mark.parametrize("key", [key for key, one in COMMANDS.items() if one.how == "locked"])
def test_what_a_guide_installs_is_in_a_locked_environment(key: str) -> None:
    packages = re.findall(r"^pip install (\S+)$", BLOCKS[key].text, re.MULTILINE)
    assert packages
    for package in packages:
        assert any(package in locked(name) for name in ("main", "camel"))


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.key)
def test_settings_are_read_and_have_a_counterpart(block: Block) -> None:
    values = yaml.safe_load(block.text)
    to_config(values, AgentRLConfig, block.key)
    translation = translate_to_recipe({"actor": {}, **values})
    assert translation.untranslated == []
    assert {key for key in flatten_to_dotted_keys(values) if not find_rule_key(key)} == set()
