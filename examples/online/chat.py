"""A chat program whose user gives the reward, as a product does in an online run.

areal-hpc run recipes/gpu8_online_qwen2.5_1.5b.yaml     # in another terminal, or submit it
python examples/online/chat.py runs/online/chat

Shows a question and the model's reply. `y` or `n` says whether it was good, and that is trained;
anything else is said to the model.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.paths import RunPaths

VERDICTS = {"y": 1.0, "n": 0.0}
Listen = Callable[[str, dict[str, Any]], str]
"""Function from the model's reply and the task to the user's input."""


def chat(run: Path, listen: Listen, max_tokens: int = 256) -> bool:
    """Hold one conversation, from a session to its reward; return False while no ticket waits."""
    paths = RunPaths(run)
    proxy = rendezvous.find_endpoint(paths.rendezvous_dir, "proxy-cell-0")
    if proxy is None:
        return False
    admin = bearer(paths.admin_key.read_text().strip())
    opened = httpx.post(f"{proxy.url}/rl/start_session", json={"task_id": "chat"}, headers=admin)
    if opened.status_code == httpx.codes.TOO_MANY_REQUESTS:  # no ticket waits
        return False
    session = opened.raise_for_status().json()
    with OpenAI(base_url=f"{proxy.url}/v1", api_key=session["api_key"]) as client:
        reward = converse(client, session["task"], listen, max_tokens)
    key = bearer(session["control_key"])  # the client that chats does not get it
    for route, body in (("set_reward", {"reward": reward}), ("end_session", {})):
        httpx.post(f"{proxy.url}/rl/{route}", json=body, headers=key).raise_for_status()
    return True


def converse(client: OpenAI, task: dict[str, Any], listen: Listen, max_tokens: int) -> float:
    messages = list(task["messages"])
    while True:
        reply = client.chat.completions.create(
            model="default", messages=messages, max_completion_tokens=max_tokens
        )
        text = reply.choices[0].message.content or ""
        heard = listen(text, task)
        if heard in VERDICTS:
            return VERDICTS[heard]
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": heard},
        ]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def at_the_terminal(text: str, task: dict[str, Any]) -> str:
    return input(f"\n> {task['messages'][-1]['content']}\n{text}\n[y/n, or say something] ")


if __name__ == "__main__":
    try:
        while True:
            if not chat(Path(sys.argv[1]), at_the_terminal):
                time.sleep(1.0)
    except (KeyboardInterrupt, EOFError):
        pass
