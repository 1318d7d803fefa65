"""Who gets which GPUs, processors and memory, for every shipped recipe, on 1 to 8 made-up GPUs."""

import re

from tests.support.device_table import list_gpu_recipes, render_devices


def test_every_recipe_has_its_paragraph_and_each_server_and_rank_its_own_gpus() -> None:
    paragraphs = render_devices().split("\n\n")
    assert [one.split("\n")[0] for one in paragraphs] == [path.name for path in list_gpu_recipes()]
    for paragraph in paragraphs:
        for machine in re.split(r"\n  (?=\w)", paragraph)[1:]:
            ranks = re.findall(r"trainer task \d+: CUDA_VISIBLE_DEVICES=(gpu\d)$", machine, re.M)
            served = re.findall(r"--base-gpu-id \d+, (\S+)$", machine, re.M)
            used = [*ranks, *(gpu for gpus in served for gpu in gpus.split(","))]
            assert len(set(used)) == len(used), machine
