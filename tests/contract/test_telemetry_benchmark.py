"""What `areal-hpc bench telemetry` leaves out on its other side: the names are in the package."""

import ast
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import read_spans
from areal_hpc.rundir.telemetry.spans import log_spans_of_process, record_span
from areal_hpc.rundir.telemetry.token_annotations import AnnotationWriter, StepAnnotations
from benchmarks.telemetry import WITH, WITHOUT, require_side
from benchmarks.without_telemetry.sitecustomize import REPLACEMENTS
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

NAMES = [(module, path) for module, paths in REPLACEMENTS.items() for path in paths]
NAMES += [("areal_hpc.trainer.learner", "run_forward_backward")]  # called without the entropy


def test_every_name_that_is_replaced_exists() -> None:
    for module, path in NAMES:
        body = ast.parse((CHECKOUT / f"{module.replace('.', '/')}.py").read_text()).body
        *owner, name = path.split(".")
        if owner:
            (body,) = (
                one.body for one in body if isinstance(one, ast.ClassDef) and [one.name] == owner
            )
        assert name in {found for statement in body for found in names_bound_by(statement)}, path


def names_bound_by(statement: ast.stmt) -> set[str]:
    """Names that a class, a function or an import binds."""
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {statement.name} if hasattr(statement, "name") else set()


def test_sides_are_told_apart_by_all_that_telemetry_writes(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    append_line(paths.metrics, {"step": 2})
    require_side(paths, WITHOUT, 2)
    with pytest.raises(ClusterError, match="took 2 steps"):
        require_side(paths, WITHOUT, 3)

    append_line(paths.events, {"role": "trainer"})
    with log_spans_of_process(paths.spans("trainer-trainer")):
        record_span("train", 1.0, 2.0)
    wait_for(lambda: bool(read_spans(paths)))
    for side in (WITH, WITHOUT):
        with pytest.raises(ClusterError, match="'annotations': False"):
            require_side(paths, side, 2)

    writer = AnnotationWriter(paths)
    writer.start_write_or_skip(StepAnnotations(step=2, generation=1, rows_of_batch=0, rows=[]))
    writer.close(timeout_s=scaled(60.0))
    require_side(paths, WITH, 2)
    with pytest.raises(ClusterError, match="'annotations': True"):
        require_side(paths, WITHOUT, 2)
