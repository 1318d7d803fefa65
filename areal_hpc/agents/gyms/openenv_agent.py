"""Agent for environments of OpenEnv."""

from typing import Any

from areal_hpc.agents.gyms.gym_agent import GymAgent
from areal_hpc.agents.gyms.gym_worker import get_host_of_url
from areal_hpc.errors import RecipeError


class OpenEnvAgent(GymAgent):
    """The model reads observations and writes actions: a text, or JSON in `<action>` tags.

    A task may have `reset`, arguments of the environment's `reset`.

    Args:
        base_url: A server that runs already; or
        app: `package.module:app` of one, which each worker starts for itself.
        gym_agent_options: See `GymAgent`; `variables: {PYTHONPATH: ...}` tells where the app's
            package is.
    """

    def __init__(self, base_url: str = "", app: str = "", **gym_agent_options: Any) -> None:
        if bool(base_url) == bool(app):
            raise RecipeError(
                f"give one of base_url and app, got {base_url!r} and {app!r}",
                key="rollout.workflow_kwargs.base_url",
                hint="app=package.module:app starts a server of its own",
            )
        config = {"base_url": base_url.rstrip("/"), "app": app}
        if base_url:
            host = get_host_of_url(base_url, "rollout.workflow_kwargs.base_url")
            gym_agent_options["hosts"] = [*gym_agent_options.get("hosts", ()), host]
        super().__init__("openenv_worker.py", config, **gym_agent_options)
