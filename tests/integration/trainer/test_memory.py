"""The plan's estimate of activations against what autograd really keeps."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.environments import CHECKOUT


def test_a_layer_keeps_as_much_as_is_estimated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.trainer.activation_worker"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"qwen2", "qwen3", "qwen3_moe"}
    for measured, estimated in found.values():
        assert measured == pytest.approx(estimated, rel=0.04)
