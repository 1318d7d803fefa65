"""Agent for environments of gymnasium."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.agents.gyms.gym_agent import GymAgent


class GymnasiumAgent(GymAgent):
    """The model reads observations and writes actions, `<action>2</action>`.

    A task may have `seed` and `options`, for `reset`. With `env_kwargs: {render_mode: ansi}` the
    model sees what the environment draws.

    Args:
        env_id: As `gymnasium.make` takes it.
        env_kwargs: Its other arguments.
        imports: Modules that register environments.
        gym_agent_options: See `GymAgent`.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        **gym_agent_options: Any,
    ) -> None:
        config = {"env_id": env_id, "env_kwargs": dict(env_kwargs or {}), "imports": [*imports]}
        super().__init__("gymnasium_worker.py", config, **gym_agent_options)
