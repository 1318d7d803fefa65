"""Environments with Transformer Engine or Apex, which Megatron would take over from."""

import sys
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.trainer.private_apis.megatron_replacing_packages import (
    MEGATRON_REPLACEMENTS,
    refuse_megatron_replacements,
)


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with both packages, either of which fails when it is imported."""
    for name in MEGATRON_REPLACEMENTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    return tmp_path


def test_a_rank_refuses_them_by_name_and_imports_neither(
    stubs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_megatron_replacements()
    monkeypatch.syspath_prepend(str(stubs))
    with pytest.raises(ClusterError) as caught:
        refuse_megatron_replacements()
    assert [problem.key for problem in caught.value.problems] == ["cluster.train.python"] * 2
    for name, problem in zip(MEGATRON_REPLACEMENTS, caught.value.problems, strict=True):
        assert name in problem.message
        assert problem.hint is not None
        assert "uninstall" in problem.hint
        assert name not in sys.modules
