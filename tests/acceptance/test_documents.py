"""The blocks of AReaL's guides: extracted, listed, and their settings understood."""

import pytest
import yaml

from areal_hpc.areal.api.cli_args import AgentRLConfig
from areal_hpc.areal.config.rules import find_rule_key, flatten_to_dotted_keys
from areal_hpc.areal.config.translation import translate_to_recipe
from areal_hpc.areal.loading import to_config
from tests.support.documents import Block, blocks

BLOCKS = {block.key: block for block in blocks()}
SETTINGS = [block for block in BLOCKS.values() if block.language == "yaml"]


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.key)
def test_settings_are_read_and_have_a_counterpart(block: Block) -> None:
    values = yaml.safe_load(block.text)
    to_config(values, AgentRLConfig, block.key)
    translation = translate_to_recipe({"actor": {}, **values})
    assert translation.untranslated == []
    assert {key for key in flatten_to_dotted_keys(values) if not find_rule_key(key)} == set()
