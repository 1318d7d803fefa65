"""DSPy over OpenAI's chat: its agent, whose calls are text in fields."""

import os
import sys

import dspy


def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


dspy.configure(
    lm=dspy.LM(
        "openai/tiny",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        cache=False,
        num_retries=0,
    )
)
print(dspy.ReAct("task -> answer", tools=[run_command], max_iters=2)(task=sys.argv[1]).answer)
