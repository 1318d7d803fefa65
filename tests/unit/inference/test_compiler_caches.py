"""Compiler caches of SGLang: which variables, and whose folder."""

import os
import tempfile
from pathlib import Path

import pytest

from areal_hpc.inference.server.node_files import build_cache_variables, make_cache_dir


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("/node/x", "/node/x/jit", "/node/x/inductor")),
        ({"SGLANG_CACHE_DIR": "/site"}, ("/site", "/site/jit", "/site/inductor")),
        ({"TORCHINDUCTOR_CACHE_DIR": "/mine"}, ("/node/x", "/node/x/jit", "/mine")),
    ],
)
def test_what_the_site_has_set_stays(environ: dict[str, str], expected: tuple[str, ...]) -> None:
    variables = build_cache_variables(environ, Path("/node/x"))
    names = ("SGLANG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    assert variables == dict(zip(names, expected, strict=True))


def test_the_folder_is_kept_and_must_be_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fallback = tmp_path / "fallback"
    folder = make_cache_dir(fallback)
    assert folder == tmp_path / f"areal_hpc-compiled-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_cache_dir(fallback) == folder
    folder.chmod(0o777)
    assert make_cache_dir(fallback) == fallback
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert make_cache_dir(fallback) == fallback
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "compiled kernels are not kept for later servers"
    ] * 2
