"""AReaL's `PPOTrainer` refuses bad arguments before a start; `get_custom_dataset` reads rows."""

import asyncio
import importlib
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.areal.api.cli_args import AgentRLConfig, DatasetConfig, GRPOConfig
from areal_hpc.areal.dataset import get_custom_dataset
from areal_hpc.areal.ppo_trainer import PPOTrainer
from areal_hpc.errors import RecipeError
from areal_hpc.rollout.execution.agent_pickle import (
    get_import_path,
    load_agent_pickle,
    save_agent_as_module,
)
from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.rundir.paths import RunPaths

ROWS = [{"messages": [], "answer": "1"}]


class Answerer:
    """Agent that keeps its argument."""

    def __init__(self, said: float = 1.0) -> None:
        self.said = said

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return self.said


@pytest.fixture
def config(tmp_path: Path) -> AgentRLConfig:
    config = AgentRLConfig(experiment_name="e", trial_name="t", total_train_steps=1)
    config.cluster.fileroot = str(tmp_path)
    config.gconfig.n_samples = 2
    config.actor.path = str(tmp_path / "no_model")
    config.actor.ppo_n_minibatches = 1
    return config


@pytest.mark.parametrize(
    ("rows", "message"), [([], "empty"), (["text"], "row 0 is a str"), ([{"x": {1}}], "row 0")]
)
def test_rows_that_are_none_are_refused(config: GRPOConfig, rows: list[Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PPOTrainer(config, train_dataset=rows)


def evaluation_of(config: GRPOConfig, *agents: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    """Return the recipe's agent for held-out tasks and its arguments; empty for the same agent."""
    recipe, _ = PPOTrainer(config, train_dataset=ROWS).prepare(*agents, **kwargs)
    return recipe.evaluation.workflow, recipe.evaluation.workflow_kwargs


def test_another_agent_may_play_held_out_tasks(config: GRPOConfig, tmp_path: Path) -> None:
    assert evaluation_of(config, "a.B", "c.D") == ("c.D", {})
    kwargs: dict[str, Any] = {"workflow_kwargs": {"x": 1}, "eval_workflow_kwargs": {"x": 2}}
    assert evaluation_of(config, "a.B", **kwargs) == ("a.B", {"x": 2})
    handed = evaluation_of(config, Answerer(1.0), Answerer(2.0))
    assert handed == ("handed_over_for_evaluation.agent", {})
    folder = RunPaths(tmp_path / "e" / "t").agent_dir
    assert vars(load_agent_pickle(str(folder / "handed_over_for_evaluation.py")))["said"] == 2.0
    assert vars(load_agent_pickle(str(folder / "handed_over.py")))["said"] == 1.0


def test_what_the_configuration_says_beside_its_workflow_reaches_it(config: AgentRLConfig) -> None:
    config.workflow, config.reward_fn_path = "areal.workflow.rlvr.RLVRWorkflow", "areal.my.reward"
    trainer = PPOTrainer(config, train_dataset=ROWS)
    rollout = trainer.prepare()[0].rollout
    assert rollout.workflow == "areal_hpc.areal.workflow.rlvr.RLVRWorkflow"
    assert rollout.workflow_kwargs == {"reward_fn_path": "areal_hpc.areal.my.reward"}
    kwargs = trainer.prepare(workflow_kwargs={"x": 1})[0].rollout.workflow_kwargs
    assert kwargs == {"x": 1}
    assert trainer.prepare("a.B")[0].rollout.workflow_kwargs == {}


def test_the_agent_runs_with_the_python_of_its_script(config: GRPOConfig, tmp_path: Path) -> None:
    cluster = PPOTrainer(config, train_dataset=ROWS).prepare("a.B")[0].cluster
    assert cluster.agents.python == sys.executable
    site = tmp_path / "site.yaml"
    site.write_text("slurm: {partition: long}\nagents: {python: /their/python}\n")
    config.scheduler.site = str(site)
    cluster = PPOTrainer(config, train_dataset=ROWS).prepare("a.B")[0].cluster
    assert (cluster.agents.python, cluster.slurm.partition) == ("/their/python", "long")
    assert cluster.fileroot == tmp_path


def test_a_run_keeps_its_rows(config: GRPOConfig, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no model directory"):
        PPOTrainer(config, train_dataset=ROWS).train("tests.support.sums.SumAgent")
    assert RunPaths(tmp_path / "e" / "t").dataset("train").read_bytes().count(b"\n") == 1
    with pytest.raises(RecipeError, match="started with a different data set"):
        PPOTrainer(config, train_dataset=ROWS * 2).train("a.B")


def test_agents_are_found_by_a_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Answerer):
        """Agent that no other process can import."""

    assert get_import_path(Local) is None
    path = save_agent_as_module(Local, {"said": 3.0}, tmp_path, (), imports_areal_names=False)
    module, _, name = path.rpartition(".")
    monkeypatch.syspath_prepend(tmp_path)
    agent = getattr(importlib.import_module(module), name)
    monkeypatch.delitem(sys.modules, module)
    assert type(agent).__name__ == "Local"
    assert agent.said == 3.0


def test_an_agent_that_cannot_travel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be pickled"):
        save_agent_as_module(
            Answerer(), {"said": threading.Lock()}, tmp_path, (), imports_areal_names=False
        )


def test_a_function_without_a_name_is_called_in_a_process() -> None:
    offset = 4

    async def call() -> int:
        pool = ProcessPool(1)
        try:
            return int(await pool.call(lambda x: x + offset, 3))
        finally:
            pool.close_idle_workers()

    assert asyncio.run(call()) == 7


GSM8K = Path(__file__).parents[2] / "samples" / "gsm8k.parquet"


def put(folder: Path) -> None:
    (folder / "main").mkdir(parents=True)
    shutil.copy(GSM8K, folder / "main" / "train-00000-of-00001.parquet")


def test_a_folder_holds_a_file_for_each_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"split": split}))
        assert get_custom_dataset(split, DatasetConfig(str(tmp_path))) == [{"split": split}]
    assert get_custom_dataset("x", DatasetConfig(str(tmp_path / "test.jsonl"))) == [
        {"split": "test"}
    ]


def test_a_clone_of_gsm8k_becomes_tasks(tmp_path: Path) -> None:
    put(tmp_path / "gsm8k")
    config = DatasetConfig(str(tmp_path / "gsm8k"))
    tasks = get_custom_dataset("train", config)
    assert tasks
    assert all(task.keys() == {"messages", "answer"} for task in tasks)
    with pytest.raises(RecipeError, match=r"holds neither test.jsonl nor main/test-"):
        get_custom_dataset("test", config)


def test_gsm8k_that_is_not_in_the_cache_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"nobody-has/gsm8k \(revision main\) is not in"):
        get_custom_dataset("train", DatasetConfig("hub-that-nobody-has/gsm8k"))


class Words:
    """Tokenizer that encodes a word as a token."""

    def apply_chat_template(self, messages: list[Any], **options: Any) -> str:
        return " ".join(message["content"] for message in messages)

    def encode(self, text: str, **options: Any) -> list[str]:
        return text.split()


def test_longer_prompts_are_left_out(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "word " * n}]} for n in (2, 5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DatasetConfig(str(tmp_path), max_length=3)
    assert get_custom_dataset("train", config, Words()) == rows[:1]
    with pytest.raises(RecipeError, match="needs a tokenizer"):
        get_custom_dataset("train", config)
