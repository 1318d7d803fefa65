"""Numbers of every step: JSON lines for programs, TensorBoard for people."""

from __future__ import annotations

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from areal_hpc.telemetry import append_json_line, read_json_lines

Line = dict[str, int | float | str]
"""The metrics of one step, by name."""


class MetricsLog:
    """`metrics.jsonl` and its TensorBoard copy.

    On a resume, lines of steps after the commit are removed: those steps will be trained again.
    The line of the committed step itself is taken back too, to be completed and written anew.

    Args:
        path: The JSON-lines file.
        tensorboard_dir: None writes no event files.
        resume_step: The committed step training goes on from.
    """

    def __init__(self, path: Path, tensorboard_dir: Path | None, resume_step: int) -> None:
        self._path = path
        kept = {line["step"]: line for line in read_json_lines(path) if line["step"] <= resume_step}
        self.reopened: Line = kept.pop(resume_step, {})
        """The line of the step that training goes on from; empty when there is none."""
        self.reopened.pop("step", None)
        if path.exists():
            partial = path.with_name(f".{path.name}.tmp")
            lines = (json.dumps(line, separators=(",", ":")) + "\n" for line in kept.values())
            partial.write_text("".join(lines))
            partial.replace(path)
        self._board = (
            SummaryWriter(str(tensorboard_dir), purge_step=resume_step) if tensorboard_dir else None
        )

    def write(self, step: int, values: Line) -> None:
        """Append the line of one step."""
        append_json_line(self._path, {"step": step, **values})
        if self._board is not None:
            for name, value in values.items():
                if not isinstance(value, str):
                    self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._board is not None:
            self._board.close()
