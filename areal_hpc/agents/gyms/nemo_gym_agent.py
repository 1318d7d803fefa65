"""Agent for resources servers of NeMo Gym."""

from collections.abc import Mapping
from typing import Any

from areal_hpc.agents.gyms.gym_agent import GymAgent


class NemoGymAgent(GymAgent):
    """Plays rows of NeMo Gym's data sets, as they are: `train_dataset: {path: example.jsonl}`.

    A server with steps answers each reply; another offers its tools, and verifies the last reply.

    Args:
        server: Its folder in `resources_servers`, such as "blackjack".
        options: Further fields of its configuration.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self, server: str, options: Mapping[str, Any] | None = None, **gym_agent_options: Any
    ) -> None:
        config = {"server": server, "options": dict(options or {})}
        super().__init__("nemo_gym_worker.py", config, **gym_agent_options)
