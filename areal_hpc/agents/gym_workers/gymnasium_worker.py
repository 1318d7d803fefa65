"""Worker of `GymnasiumAgent`: describes observations of gymnasium in text, and parses actions."""

import importlib
import json
import re
from typing import Any

import gymnasium
from gymnasium import spaces
from worker_loop import Gym, find_action_tags, serve

INTEGER_PATTERN = re.compile(r"-?\d+")


class GymnasiumGym(Gym):
    def __init__(self, config: dict[str, Any]) -> None:
        for module in config["imports"]:
            importlib.import_module(module)
        self._env = gymnasium.make(config["env_id"], **config["env_kwargs"])
        self._space = self._env.action_space
        self._hint = format_action_instructions(self._space)

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        observation, _ = self._env.reset(seed=task.get("seed"), options=task.get("options"))
        return {"text": f"{self._describe(observation)}\n{self._hint}"}

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        try:
            action = parse_action(reply["text"], self._space)
        except (ValueError, TypeError, OverflowError, RecursionError):  # the model wrote no action
            return {"text": f"That is no action. {self._hint}", "reward": 0.0, "done": False}
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return {
            "text": self._describe(observation),
            "reward": float(reward),
            "done": bool(terminated or truncated),
        }

    def _describe(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return str(self._env.render()).strip()
        return f"Observation: {json.dumps(to_builtins(observation))}"


def format_action_instructions(action_space: Any) -> str:
    if isinstance(action_space, spaces.Discrete):
        first, last = int(action_space.start), int(action_space.start + action_space.n - 1)
        form = f"a whole number from {first} to {last}"
    elif isinstance(action_space, spaces.Text):
        form = "a text"
    elif isinstance(action_space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        form = f"a JSON list of shape {list(action_space.shape or ())} for {action_space}"
    else:
        raise TypeError(f"actions of {type(action_space).__name__} cannot be written by a model")
    return f"Reply with <action>A</action>, where A is {form}."


def parse_action(text: str, action_space: Any) -> Any:
    """Parse the content of a reply's last tag, else the reply, as an action of the space."""
    tags = find_action_tags(text)
    content = tags[-1].strip() if tags else text.strip()
    if isinstance(action_space, spaces.Text):
        action: Any = content
    elif isinstance(action_space, spaces.Discrete):
        numbers = INTEGER_PATTERN.findall(content)
        if not numbers:
            raise ValueError("no number")
        action = int(numbers[-1])
    else:
        import numpy as np

        values = json.loads(content)
        action = np.asarray(values, dtype=action_space.dtype)
        if action_space.dtype.kind != "f" and not np.array_equal(action, values):
            raise ValueError("not whole numbers")
    if not action_space.contains(action):
        raise ValueError("outside of the space")
    return action


def to_builtins(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): to_builtins(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_builtins(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    serve(GymnasiumGym)
