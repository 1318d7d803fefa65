"""LangChain, from its own environment, knows an overflow of the context for what it is."""

from __future__ import annotations

import subprocess

import pytest

from areal_hpc.jobs.environment import get_interpreter
from tests.support.proxy_stage import Stage

PROGRAM = """
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

url, key, responses, streams = sys.argv[1:]
model = ChatOpenAI(model="m", base_url=url, api_key=key, use_responses_api=responses == "True")
try:
    asked = "x y " * 2000
    list(model.stream(asked)) if streams == "True" else model.invoke(asked)
except ContextOverflowError:
    print("overflow")
"""


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_langchain_knows_an_overflow(parsing_stage: Stage, responses: bool, streams: bool) -> None:
    _, key = parsing_stage.open_session()
    done = subprocess.run(
        [
            *(get_interpreter("frameworks", "auto"), "-W", "ignore", "-c", PROGRAM),
            *(f"{parsing_stage.url}/v1", key, str(responses), str(streams)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "overflow\n", done.stderr
