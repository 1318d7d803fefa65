"""The table of known models gives the numbers of parameters that their authors publish."""

import pytest

from areal_hpc.trainer.model.families.architecture import parse_architecture
from areal_hpc.trainer.model.families.known_models import find_known_config, read_known_configs
from areal_hpc.trainer.model.memory_estimate import count_model_parameters

PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
}


@pytest.mark.parametrize(("repo", "parameters"), PUBLISHED_PARAMETERS.items())
def test_a_known_model_has_its_published_size(repo: str, parameters: int) -> None:
    config = find_known_config(repo)
    assert config is not None
    assert count_model_parameters(parse_architecture(config, repo)) == parameters


def test_thirty_shapes_are_known_and_no_other() -> None:
    known = read_known_configs()
    assert len({str(config) for config in known.values()}) >= 20
    assert len(known) >= 60
    for repo, config in known.items():
        parse_architecture(config, repo)
    assert find_known_config("Qwen/Qwen3-32B-Base") is None
