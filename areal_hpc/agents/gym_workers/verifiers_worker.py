"""Worker of `VerifiersAgent`: runs an environment of verifiers (v1), which calls the model."""

import os
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.env import Env
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class, load_environment
from worker_loop import Gym, serve

API_KEY_VARIABLE = "AREAL_HPC_SESSION_KEY"


class VerifiersGym(Gym):
    def __init__(self, config: dict[str, Any]) -> None:
        taskset, options = config["taskset"], config["env"]
        environment_type = environment_class(taskset["id"], options.get("id", ""))
        config_type = concrete_type(environment_type, vf.EnvConfig, origin=Env) or vf.EnvConfig
        agent = {"runtime": {"type": "subprocess"}, "harness": config["harness"]}
        seats = {"agent": agent} if "agent" in config_type.model_fields else {}
        self._env = load_environment(
            config_type.model_validate({**seats, **options, "taskset": taskset})
        )
        self._tasks = list(self._env.taskset.select(vf.SelectConfig()))

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Play the whole episode."""
        os.environ[API_KEY_VARIABLE] = task["api_key"]
        client = vf.EvalClientConfig(base_url=task["base_url"], api_key_var=API_KEY_VARIABLE)
        context = vf.ModelContext(
            client=client, model="default", sampling=self._build_sampling(task["sampling"])
        )
        index = task["task"].get("index", 0)
        if not 0 <= index < len(self._tasks):
            raise IndexError(f"the task set has tasks 0 to {len(self._tasks) - 1}, not {index}")
        async with self._env.serving():
            (slot,) = self._env.slots(self._tasks[index])
            episode = await self._env.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        trace = episode.traces[0]
        parts = {name: r.score * r.weight for name, r in trace.rewards.items() if r is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": float(trace.reward), "parts": parts, "metrics": metrics}

    @staticmethod
    def _build_sampling(sampling_params: dict[str, Any]) -> Any:
        kind = vf.ModelContext.__dataclass_fields__["sampling"].default_factory
        return kind(**sampling_params)


if __name__ == "__main__":
    serve(VerifiersGym)
