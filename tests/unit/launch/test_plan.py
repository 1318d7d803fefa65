"""A plan is a pure function of the recipe and a few facts."""

from dataclasses import replace
from pathlib import Path

from areal_hpc.launch.plan import JobStage, PlanInputs, plan_run
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.paths import RunPaths

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
FACTS = PlanInputs(
    train_tasks=100,
    tasks_by_evaluation_set={"valid": 20},
    serve_python="/serve/python",
    sys_path=("/here",),
)


def planned(*overrides: str, facts: PlanInputs = FACTS) -> tuple[JobStage, ...]:
    return plan_run(load_recipe(QUICKSTART, overrides), RunPaths(Path("/run")), facts)


def test_the_trainer_imports_a_custom_loss_from_where_the_run_was_launched() -> None:
    name = "trainer.objective.custom=examples.objectives.sapo:compute_terms"
    (trainer,) = [one for one in planned(name)[1].leader.processes if one.name == "trainer"]
    assert trainer.config["sys_path"] == ["/here"]
    assert [one.config["sys_path"] for one in planned()[1].leader.processes] == [[], []]


def test_every_cell_is_one_job_with_its_share_of_the_episodes() -> None:
    cells = ("inference.cells=3", "rollout.max_concurrent_rollouts=60")
    train = planned(*cells)[1]
    assert [job.name for job in train.others] == ["cell-0", "cell-1", "cell-2"]
    assert load_recipe(QUICKSTART, cells).episode_slots_per_cell == 20


def test_a_replica_that_spans_nodes_has_a_task_on_each_and_serves_from_the_first() -> None:
    overrides = ("inference.tp=4", "inference.nodes_per_replica=2")
    train = planned(*overrides, "trainer.device=cuda", "evaluation.separate_cell=true")[1]
    for job, name in zip(train.others, ("cell-0", "evaluation"), strict=True):
        assert (job.tasks, job.is_task_a_node, job.gpus_per_task) == (2, True, 2)
        run_by = {process.name: process.tasks for process in job.processes}
        assert run_by.pop("follower") == "others"
        assert run_by == dict.fromkeys(("inference", "proxy", "driver"), "first")
        assert {process.config["cell"] for process in job.processes} == {name}


def test_the_ledger_knows_the_size_of_every_source() -> None:
    parts = "[{generator: 'a:b', weight: 2.0}, {path: c.jsonl}]"
    facts = replace(FACTS, tasks_of_sources=(30, 70))
    _, train = planned(f"train_dataset={{sources: {parts}, generator: null}}", facts=facts)
    assert train.leader.processes[0].config["tasks_of_sources"] == [30, 70]


def test_the_trainer_has_a_task_per_rank_and_one_ledger() -> None:
    leader = planned("trainer.parallel.tp=2", "trainer.parallel.dp=2")[1].leader
    assert leader.tasks == 4
    assert leader.processes[1].config["tasks_by_evaluation_set"] == {"valid": 20}
    assert [process.name for process in leader.processes if process.tasks == "first"] == ["ledger"]


def test_training_cells_evaluate_unless_a_job_of_its_own_does() -> None:
    train = planned()[1]
    assert [job.processes[-1].config["splits"] for job in train.others] == [["train", "valid"]]
    train = planned("evaluation.separate_cell=true", "inference.cells=2")[1]
    assert {job.name: job.processes[-1].config["splits"] for job in train.others} == {
        "cell-0": ["train"],
        "cell-1": ["train"],
        "evaluation": ["valid"],
    }
