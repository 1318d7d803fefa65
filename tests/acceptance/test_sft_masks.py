"""Tokens of demonstrations, and which are learned, against TRL's own with the same templates.

`make oracles` installs TRL into `.venvs/oracles` (or `ORACLES_DIR`). TRL learns from replies alone
where a template has `{% generation %}` blocks; its 34 templates that have them are compared. Writes
`benchmarks/results/sft_masks.json`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_hpc.dataset.demonstrations import Demonstration
from areal_hpc.errors import RecipeError
from areal_hpc.session.chat_template import Message
from areal_hpc.trainer.batch.demonstration_rows import DemonstrationTokenizer
from tests.support.environments import CHECKOUT
from tests.support.results import write_results
from tests.support.template_scenes import SCENES, SPECIAL_TOKENS, TOOLS, build_tokenizer

pytestmark = pytest.mark.timeout(900)

ORACLES = Path(os.environ.get("ORACLES_DIR", CHECKOUT / ".venvs" / "oracles"))
N_TEMPLATES = 34
REASONS = {
    "split": "the template writes earlier turns otherwise once more have come: TRL learns replies "
    "as they look afterwards, here each reply is learned as it is sampled, in another row",
    "other tokens": "gpt-oss ends a reply otherwise once another message follows: TRL learns that "
    "end, here each reply is learned with the end that is sampled",
}


def choose_tools(scene: list[Message]) -> Any:
    return TOOLS if any(message["role"] == "tool" for message in scene) else None


def write_scenes(folder: Path) -> None:
    """Write the conversations with the reasoning under both names that templates read."""
    scenes = {
        name: {
            "tools": choose_tools(scene),
            "messages": [
                {**message, "thinking": message["reasoning_content"]}
                if "reasoning_content" in message
                else message
                for message in scene
            ],
        }
        for name, scene in SCENES.items()
    }
    (folder / "scenes.json").write_text(json.dumps(scenes))


def write_tokenizer(folder: Path, template_source: str) -> None:
    folder.mkdir()
    build_tokenizer(template_source).save(str(folder / "tokenizer.json"))
    config = {"chat_template": template_source, **SPECIAL_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def compare(tokenizer: DemonstrationTokenizer, name: str, theirs: dict[str, Any]) -> str:
    scene = SCENES[name]
    try:
        rows = tokenizer.build_rows([Demonstration(scene, choose_tools(scene))])
    except RecipeError:
        return "refused" if "refused" in theirs else "refused here alone"
    if "refused" in theirs:
        return "refused by TRL alone"
    if len(rows) > 1:
        return "split"
    size = 1 + int(np.flatnonzero(theirs["mask"])[-1])  # what follows the last reply is not read
    has_ids = rows[0].input_ids_T.tolist() == theirs["ids"][:size]
    has_mask = rows[0].loss_mask_T.tolist() == theirs["mask"][:size]
    return "equal" if has_ids and has_mask else "other tokens" if has_mask else "other mask"


def test_tokens_and_masks_are_those_of_trl(tmp_path: Path) -> None:
    (folder,) = ORACLES.glob("lib/python3*/site-packages/trl/chat_templates")
    sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    marked = {name: text for name, text in sources.items() if "endgeneration" in text}
    assert len(marked) == N_TEMPLATES
    write_scenes(tmp_path)
    for name, source in marked.items():
        write_tokenizer(tmp_path / name, source)
    done = subprocess.run(
        [str(ORACLES / "bin" / "python"), "-m", "tests.support.sft_mask_program", str(tmp_path)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases: dict[str, list[str]] = {}
    for name in marked:
        tokenizer = DemonstrationTokenizer(tmp_path / name)
        answers = json.loads((tmp_path / name / "masks.json").read_text())
        for scene in SCENES:
            outcome = compare(tokenizer, scene, answers[scene])
            cases.setdefault(outcome, []).append(f"{name}: {scene}")
    write_results(
        "sft_masks",
        {
            outcome: {"count": len(found), "reason": REASONS.get(outcome, ""), "cases": found}
            for outcome, found in cases.items()
        },
    )
    assert cases.keys() <= {"equal", "refused", *REASONS}
