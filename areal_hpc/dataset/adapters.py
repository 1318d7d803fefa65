"""Adapters from public data sets (GSM8K, MATH, AIME, MBPP, ...) to tasks.

Each `convert_` function takes a row as its data set publishes it. Every task has `messages`, and
the arguments of its reward function: `answer` (`math_reward`), `target` and `numbers`
(`countdown_reward`), `tests` (`code_reward`).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from areal_hpc.reward.answer_extraction import extract_boxed

Task = dict[str, Any]

BOXED_INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
CODE_BLOCK_INSTRUCTION = "Reply with one program in a ```python block."
ANSWER_TAG_INSTRUCTION = "Put the expression, without an equals sign, within <answer></answer>."


def make_reasoning_tasks(name: str, size: int, seed: int, **options: Any) -> Iterator[Task]:
    """Generate `size` tasks of the reasoning-gym set `name`, with the set's own options."""
    import reasoning_gym

    for item in reasoning_gym.create_dataset(name, size=size, seed=seed, **options):
        yield {
            "messages": [{"role": "user", "content": item["question"]}],
            "question": item["question"],
            "answer": item["answer"],
            "metadata": item["metadata"],
        }


def convert_gsm8k(row: Mapping[str, Any]) -> Task:
    """Convert `openai/gsm8k`: `question`, and an `answer` that ends in `#### 1,234`."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError("the answer has no ####")
    return _build_math_task(row["question"], answer.strip().replace(",", ""))


def convert_competition_math(row: Mapping[str, Any]) -> Task:
    r"""Convert MATH (`EleutherAI/hendrycks_math`, `HuggingFaceH4/MATH-500`).

    The answer is `answer` if the row has it, else the last `\boxed{}` of `solution`.
    """
    answer = row.get("answer") or extract_boxed(row["solution"])
    if answer is None:
        raise ValueError("the solution has no \\boxed{}")
    return _build_math_task(row["problem"], answer)


def convert_aime(row: Mapping[str, Any]) -> Task:
    fields = {name.lower(): value for name, value in row.items()}
    question = fields["problem"] if "problem" in fields else fields["question"]
    return _build_math_task(question, str(int(fields["answer"])))


def convert_countdown(row: Mapping[str, Any]) -> Task:
    """Convert `Jiayi-Pan/Countdown-Tasks-3to4`: `target` and `nums`."""
    numbers = [int(number) for number in row["nums"]]
    question = (
        f"Use each of the numbers {numbers} exactly once, with + - * / and parentheses, to make "
        f"{row['target']}. {ANSWER_TAG_INSTRUCTION}"
    )
    return {
        "messages": _build_messages(question),
        "target": int(row["target"]),
        "numbers": numbers,
    }


def convert_mbpp(row: Mapping[str, Any]) -> Task:
    """Convert `google-research-datasets/mbpp`: `text` or `prompt`, and asserts in `test_list`."""
    asserts = list(row["test_list"])
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    question = row["text"] if "text" in row else row["prompt"]
    prompt = f"{question} It must pass this test: {asserts[0]}\n{CODE_BLOCK_INSTRUCTION}"
    return {
        "messages": _build_messages(prompt),
        "tests": {"program": "\n".join([setup, *asserts])},
    }


def convert_humaneval(row: Mapping[str, Any]) -> Task:
    question = f"Complete this function.\n```python\n{row['prompt']}```\n{CODE_BLOCK_INSTRUCTION}"
    program = f"{row['test']}\ncheck({row['entry_point']})"
    return {"messages": _build_messages(question), "tests": {"program": program}}


def convert_apps(row: Mapping[str, Any]) -> Task | None:
    """Convert `codeparrot/apps` and the like: `question`, and cases as JSON in `input_output`.

    Rows whose cases call a function, or that have no cases, give None and are left out.
    """
    cases = json.loads(row["input_output"] or "{}")
    inputs, outputs = cases.get("inputs", []), cases.get("outputs", [])
    if not inputs or "fn_name" in cases:
        return None
    channels = "Read standard input, print to standard output."
    question = f"{row['question']}\n{channels} {CODE_BLOCK_INSTRUCTION}"
    pairs = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    return {"messages": _build_messages(question), "tests": {"cases": pairs}}


def _build_math_task(question: str, answer: str) -> Task:
    return {"messages": _build_messages(f"{question}\n{BOXED_INSTRUCTION}"), "answer": answer}


def _build_messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
