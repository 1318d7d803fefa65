"""Errors tell the person who can act what to do, and survive submitit's pickles."""

from __future__ import annotations

import pickle

from areal_hpc.errors import Problem, RecipeError


def test_message_has_the_place_and_the_next_step() -> None:
    error = RecipeError("expected 4, got 5", key="trainer.parallel.tp", hint="use 4")
    assert str(error) == "expected 4, got 5\n  at: trainer.parallel.tp\n  try: use 4"


def test_several_problems_survive_a_pickle() -> None:
    error = RecipeError.of([Problem("one", "a"), Problem("two", hint="b")])
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == error.problems
    assert str(copy) == str(error)
    assert copy.exit_code == 78
