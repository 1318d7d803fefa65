"""Errors tell the person who can act what to do, and survive submitit's pickles."""

import pickle

import pytest

from areal_hpc.errors import (
    ArealError,
    HttpStatusError,
    JobFailedError,
    LedgerRequestError,
    Problem,
    PromptTooLongError,
    ProxyRequestError,
    RecipeError,
    RunInterruptedError,
    escape_line,
)


@pytest.mark.parametrize(
    "error",
    [
        RecipeError.from_problems([Problem("one", "a"), Problem("two", hint="b")]),
        HttpStatusError(503, "http://n01/ready", "later"),
        JobFailedError("the job ended", code=65),
        LedgerRequestError(409, "a newer trainer", hint="go"),
        PromptTooLongError(17, 16, "messages"),
        ProxyRequestError(400, "no such tool", key="tool_choice"),
        RunInterruptedError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_pickle_with_all_that_it_carries(error: ArealError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))


def test_a_failure_s_text_begins_no_line_of_its_own() -> None:
    """As it stands in `status`, `why` and `shards show`."""
    shown = escape_line("task 3 failed: no\n\x1b[2Jall is well\nreward 1.0")
    assert [line[:6] for line in shown.splitlines()] == ["task 3", "      ", "      "]
    assert "\x1b" not in shown
