"""Sections of a recipe: precedence, inheritance, hidden values and refusals."""

from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.keys import flatten_keys, hide_private_arguments
from areal_hpc.recipe.loading import load_recipe, parse_overrides
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.recipe.sections.evaluation import EvaluationSet, resolve_keep_best
from areal_hpc.recipe.sections.rollout import RolloutConfig
from tests.support.environments import CHECKOUT
from tests.support.small_run import WITHOUT_SETS

KINDS = {
    "jobs": {
        "trainer": {"partition": "a", "sbatch": {"mem": "9G"}},
        "sft": {"sbatch": {"mem": "1G"}},
        "cell": {"partition": "low", "sbatch": {"mem": "8G"}},
        "evaluation": {"sbatch": {"mem": "2G"}},
    }
}
"""Options by kind; SFT falls back to the trainer's, the evaluation to a cell's."""


@pytest.mark.parametrize(
    ("slurm", "job", "partition", "mem"),
    [
        (
            {"sbatch": {"mem": "8G"}, "jobs": {"cell": {"partition": "low"}}},
            *("cell-12", "low", "8G"),
        ),
        ({"partition": "gpu", "jobs": {"cell": {"partition": "low"}}}, "trainer", "gpu", None),
        (KINDS, "sft", "a", "1G"),
        (KINDS, "evaluation", "low", "2G"),
        (KINDS, "cell-0", "low", "8G"),
    ],
)
def test_options_of_a_kind_of_job_win_over_those_that_it_would_have_without(
    slurm: dict[str, Any], job: str, partition: str, mem: str | None
) -> None:
    config = SlurmConfig.model_validate(slurm)
    options = config.get_options_of_job(job)
    assert (options.partition, options.sbatch.get("mem")) == (partition, mem)
    reread = SlurmConfig.model_validate(config.model_dump(mode="json"))
    assert reread.get_options_of_job(job) == options, "written and read"


def test_a_container_needs_both_images() -> None:
    with pytest.raises(ValueError, match="one for `serve`"):
        SlurmConfig.model_validate({"container": {"kind": "pyxis", "train": "a.sqsh"}})


def test_the_network_becomes_variables_of_gloo_and_nccl() -> None:
    network = {"interface": "ib0", "nccl": {"NCCL_DEBUG": "INFO"}}
    assert SlurmConfig.model_validate(
        {"network": network}
    ).network.build_environment_variables() == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_DEBUG": "INFO",
    }
    with pytest.raises(ValueError, match="LD_PRELOAD"):
        SlurmConfig.model_validate({"network": {"nccl": {"LD_PRELOAD": "x"}}})


HARNESS_AGENT = "areal_hpc.agents.harness.harness_agent.HarnessAgent"


@pytest.mark.parametrize(
    ("given", "sampling", "auxiliary"),
    [
        ({"workflow": HARNESS_AGENT}, "recipe", "drop"),
        ({"workflow": HARNESS_AGENT, "agent": {"sampling": "agent"}}, "agent", "drop"),
        ({"workflow": HARNESS_AGENT, "agent": {"auxiliary": "keep"}}, "recipe", "keep"),
        ({"workflow": "my.Agent"}, "agent", "keep"),
        ({}, "agent", "keep"),
    ],
)
def test_a_harness_has_own_defaults(given: dict[str, Any], sampling: str, auxiliary: str) -> None:
    config = RolloutConfig.model_validate(given)
    assert (config.agent.sampling, config.agent.auxiliary) == (sampling, auxiliary)
    assert RolloutConfig.model_validate(config.model_dump()) == config


QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"


def load_sets(*overrides: str) -> dict[str, EvaluationSet]:
    recipe = load_recipe(QUICKSTART, [*WITHOUT_SETS, *overrides])
    return {item.name: item for item in recipe.evaluation_sets}


def test_valid_dataset_is_the_set_named_valid_with_the_keys_of_evaluation() -> None:
    (valid,) = load_sets("evaluation.tasks=7", "evaluation.every_steps=3").values()
    assert (valid.name, valid.number, valid.dataset_key) == ("valid", 0, "valid_dataset")
    assert (valid.tasks, valid.every_steps, valid.n_samples) == (7, 3, 1)
    assert valid.sampling_key == "evaluation.sampling"


def test_a_set_overrides_what_it_names_and_inherits_the_rest() -> None:
    sets = load_sets(
        "evaluation.workflow=package.module:Other",
        "evaluation.workflow_kwargs={depth: 2}",
        "evaluation.sets={zebra: {dataset: {path: z.jsonl}, every_steps: 0}, aime: {dataset: "
        "{path: a.jsonl}, n_samples: 8, sampling: {temperature: 0.6}, workflow: 'a.b:C'}}",
    )
    assert {name: item.number for name, item in sets.items()} == {"valid": 0, "aime": 1, "zebra": 2}
    aime, zebra = sets["aime"], sets["zebra"]
    assert (aime.workflow, aime.workflow_kwargs) == ("a.b:C", {})
    assert (aime.sampling.temperature, aime.n_samples) == (0.6, 8)
    assert aime.sampling_key == "evaluation.sets.aime.sampling"
    assert (zebra.workflow, zebra.workflow_kwargs) == ("package.module:Other", {"depth": 2})
    assert zebra.every_steps == 0


def test_a_set_with_the_name_of_a_source_is_played_by_the_agent_of_the_source() -> None:
    sources = "[{name: sums, path: a, workflow: a.Sums, workflow_kwargs: {depth: 2}}, {path: b}]"
    dataset = f"train_dataset={{generator: null, kwargs: {{}}, sources: {sources}}}"
    wanted = "evaluation.sets={sums: {dataset: {path: c}}, more: {dataset: {path: d}}}"
    sets = load_sets(dataset, wanted)
    assert (sets["sums"].workflow, sets["sums"].workflow_kwargs) == ("a.Sums", {"depth": 2})
    assert sets["more"].workflow == ""


def test_the_best_checkpoint_is_chosen_by_a_metric_with_a_number_in_place_of_k() -> None:
    sets = "evaluation.sets={aime: {dataset: {path: a}, n_samples: 8, metrics: [pass@k, pass@2]}}"
    for named, meant in (
        ("", ""),
        ("aime/pass@k", "aime/pass@8"),
        ("aime/pass@2", "aime/pass@2"),
        ("valid/avg@k", "valid/avg@1"),
    ):
        recipe = load_recipe(QUICKSTART, [*WITHOUT_SETS, sets, f"evaluation.keep_best='{named}'"])
        assert resolve_keep_best(recipe.evaluation, recipe.evaluation_sets) == meant


SECRET = "sk-1"


@pytest.mark.parametrize(
    "override",
    [
        f"cluster.agents.variables.API_KEY={SECRET}",
        f"cluster.agents.variables={{API_KEY: {SECRET}}}",
        f"cluster.agents={{variables: {{API_KEY: {SECRET}}}}}",
        f"cluster={{agents: {{variables: {{API_KEY: {SECRET}}}}}}}",
        f"cluster.agents[variables][API_KEY]={SECRET}",
        f"cluster[agents][variables]={{API_KEY: {SECRET}}}",
        f"rollout={{workflow_kwargs: {{key: {SECRET}}}}}",
        f'rollout={{"workflow_kwargs": {{key: {SECRET}}}}}',
        f"rollout[workflow_kwargs].key={SECRET}",
    ],
)
def test_a_recorded_command_has_no_secret_of_its_overrides(override: str) -> None:
    assert SECRET in flatten_keys(parse_overrides([override])).values(), "it is an override"
    (shown,) = hide_private_arguments([override])
    assert SECRET not in shown
    assert shown.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    "overrides",
    [
        [f"rollout.workflow_kwargs={SECRET}"],
        # Validation of the whole section finds the error, and could quote the section.
        ["rollout.failed_episodes={reward: .inf}", f"rollout.workflow_kwargs.token={SECRET}"],
        [f"cluster.agents.variables={{A: [{SECRET}]}}"],
        [f"train_dataset={{sources: [{{path: a, workflow_kwargs: {{token: {SECRET}}}}}]}}"],
    ],
)
def test_an_error_of_a_recipe_tells_no_secret(overrides: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", overrides)
    assert SECRET not in str(refused.value)
    assert "got " in str(refused.value)


def test_a_recorded_command_has_the_rest_of_its_overrides() -> None:
    command = ["areal-hpc", "run", "variables.yaml", "seed=1", "rollout={n_samples: 4}", "--fresh"]
    assert list(hide_private_arguments(command)) == command
