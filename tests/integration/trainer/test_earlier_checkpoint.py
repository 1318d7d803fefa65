"""A checkpoint that an earlier version wrote, of format 1, resumes and is exported as it was."""

import hashlib
from pathlib import Path

import pytest
from safetensors import safe_open

from areal_hpc.rundir.checkpoint_index import is_megatron_format
from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.trainer.checkpoints.export import export_checkpoint
from tests.support.earlier_checkpoint import EARLIER_FAMILY, unpack_earlier_checkpoint
from tests.support.layout_launch import launch
from tests.support.parity_table import RESUME_BOUND
from tests.support.rank_server import RankServer

EXPORTED_SHA256 = "a34e88c23ce771f6ebc85747e4cbf8de1fd1756b710bc726fdac14da60b7bbf1"
"""Of the weights as that version exported them."""


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return unpack_earlier_checkpoint(tmp_path)


@pytest.mark.parametrize("layout", [{"layers": 1}, {"dp": 2, "layers": 1}], ids=str)
def test_it_resumes_under_another_layout(
    ranks: RankServer, tmp_path: Path, earlier: Path, layout: dict[str, int]
) -> None:
    found = launch(ranks, tmp_path / "resumed", layout, [EARLIER_FAMILY], [earlier])
    gaps = found[EARLIER_FAMILY]["resumed_from"][earlier.name]
    assert max(gaps["loss_gap"], gaps["weight_gap"]) <= RESUME_BOUND
    latest = find_latest_checkpoint(tmp_path / "resumed" / EARLIER_FAMILY / "checkpoints")
    assert latest is not None
    assert not is_megatron_format(latest.path)


def test_its_export_has_the_same_bytes(earlier: Path, tmp_path: Path) -> None:
    folder = earlier / EARLIER_FAMILY
    checkpoint = find_latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    assert is_megatron_format(checkpoint.path)
    export_checkpoint(checkpoint, folder, tmp_path / "exported", lambda line: None)
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert len(list(tensors.keys())) > 10
    assert hashlib.sha256(file.read_bytes()).hexdigest() == EXPORTED_SHA256
