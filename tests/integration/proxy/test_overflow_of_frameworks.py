"""LangChain, from its own environment, knows an overflow of the context for what it is."""

import subprocess
from pathlib import Path

from areal_hpc.jobs.environment import get_interpreter
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage

PROGRAM = """
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

url, key = sys.argv[1:]
asked = "x y " * 2000
for responses in (False, True):
    model = ChatOpenAI(model="m", base_url=url, api_key=key, use_responses_api=responses)
    for ask in (model.invoke, lambda asked: list(model.stream(asked))):
        try:
            ask(asked)
        except ContextOverflowError:
            print("overflow")
"""


def test_langchain_knows_an_overflow_in_both_dialects_streamed_or_whole(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    _, key = stage.open_session()
    python = get_interpreter("agents", "auto")
    done = subprocess.run(
        [python, "-W", "ignore", "-c", PROGRAM, f"{stage.url}/v1", key],
        capture_output=True,
        text=True,
        timeout=scaled(100),
    )
    stage.close()
    assert done.stdout == "overflow\n" * 4, done.stderr
