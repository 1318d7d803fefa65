"""Tokens and masks of TRL for conversations: run by .venvs/oracles, which has TRL.

`python -m tests.support.sft_mask_program FOLDER` reads `scenes.json` and a model's tokenizer files
in each folder below; it writes `masks.json` there: for each scene ids and mask, or why not.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from trl.data_utils import _tokenize


def ask_masks(folder: Path, scenes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    answers: dict[str, Any] = {}
    for name, scene in scenes.items():
        try:
            answer = _tokenize(
                tokenizer,
                scene["messages"],
                return_assistant_tokens_mask=True,
                **{"tools": scene["tools"], **config},
            )
        except Exception as error:  # of Jinja or of the template
            answers[name] = {"refused": str(error)}
        else:
            answers[name] = {"ids": answer["input_ids"], "mask": answer["assistant_masks"]}
    return answers


def main() -> None:
    root = Path(sys.argv[1])
    scenes = json.loads((root / "scenes.json").read_text())
    for file in root.glob("*/tokenizer.json"):
        answers = ask_masks(file.parent, scenes)
        (file.parent / "masks.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
