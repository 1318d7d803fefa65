"""The places where runs are killed exist: a renamed function must not disarm a fault in silence."""

from __future__ import annotations

import operator
from importlib import import_module

import pytest

from areal_hpc.trainer import cpu  # noqa: F401 (before anything of Megatron)
from tests.support.killed_run import HELD, POINTS, UPDATE, Point


@pytest.mark.parametrize(
    "point", [*POINTS.values(), UPDATE, *HELD.values()], ids=lambda point: point.function
)
def test_a_point_names_a_function(point: Point) -> None:
    module, _, path = point.function.partition(":")
    assert callable(operator.attrgetter(path)(import_module(module)))


def test_what_a_torn_record_needs_of_the_journal_is_there() -> None:
    journal = import_module("areal_hpc.shards.journal")
    for name in ("_appending", "_descriptor", "bytes_written"):
        assert name in journal.JournalWriter.__init__.__code__.co_names or hasattr(
            journal.JournalWriter, name
        )
    assert callable(journal.encode_header)
