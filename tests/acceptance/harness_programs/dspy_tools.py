"""DSPy over OpenAI's chat with the API's own tool calls: a prediction a turn, told of the calls."""

import os
import sys

import dspy


def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


class CallingLM(dspy.LM):
    @property
    def supports_function_calling(self) -> bool:
        """Always."""
        return True


class Step(dspy.Signature):
    """Do the next step of the task."""

    task: str = dspy.InputField()
    results: list[str] = dspy.InputField(desc="of the calls so far")
    tools: list[dspy.Tool] = dspy.InputField()
    thought: str = dspy.OutputField()
    calls: dspy.ToolCalls = dspy.OutputField()


dspy.configure(
    lm=CallingLM(
        "openai/tiny",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        cache=False,
        num_retries=0,
    ),
    adapter=dspy.ChatAdapter(use_native_function_calling=True),
)
predict, tools, results = dspy.Predict(Step), [dspy.Tool(run_command)], []
while True:
    prediction = predict(task=sys.argv[1], results=results, tools=tools)
    if prediction.calls is None or not prediction.calls.tool_calls:
        print(prediction.thought)
        break
    results += [run_command(**call.args) for call in prediction.calls.tool_calls]
