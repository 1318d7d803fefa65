"""A recipe is read whole or refused with every problem it has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.base import BaseConfig, get_section_class
from areal_hpc.recipe.cross_checks import find_likely_mistakes
from areal_hpc.recipe.loading import load_recipe, read_site_values
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from tests.support.environments import CHECKOUT

RECIPES = CHECKOUT / "recipes"
QUICKSTART = RECIPES / "quickstart.yaml"
SOURCES = "train_dataset={generator: null, kwargs: {}, sources: [{path: a.jsonl, weight: 3}]}"
ONLINE = "rollout.agent.mode=online; rollout.workflow=''"
NO_TASKS = "valid_dataset=null; evaluation.sets=null"

REFUSED = [
    # overrides with `; ` between them, the keys at fault, parts of the message
    ("trainer.totl_steps=3", "trainer.totl_steps", "unknown key 'totl_steps'|mean total_steps?"),
    ("total_steps=5", "total_steps", "mean trainer.total_steps? (or sft.total_steps)"),
    ("n_samples=5", "n_samples", "did you mean rollout.n_samples? (or evaluation.n_samples"),
    ("reward.isolaton=none", "reward.isolaton", "did you mean isolation?"),
    ("reward.function=a.b", "reward.function", "it is what the agent's `run` returns"),
    ("rollout.reward_fn=a.b", "rollout.reward_fn", "it is what the agent's `run` returns"),
    ("trainer.total_steps=many", "trainer.total_steps", "it must be a valid integer, got 'many'"),
    ("cluster.gpus=abc", "cluster.gpus", "'auto' or 'none'|valid integer|grep -F cluster.gpus"),
    ("train_dataset.path=a; train_dataset.hub=b/c/*", "train_dataset", "exactly one of `path`"),
    ("cluster.gpus=[0, -1]", "cluster.gpus", "greater than or equal to 0|got -1"),
    ("trainer.optimizer.betas=[0.9, 1.0]", "trainer.optimizer.betas.1", "less than 1|got 1.0"),
    ("trainer.optimizer.lr=.inf", "trainer.optimizer.lr", "must be a finite number, got inf"),
    ("evaluation.sampling.top_k=-5", "evaluation.sampling.top_k", "or equal to -1|got -5"),
    (
        "rollout.failed_episodes={rewrad: 0.5}",
        "rollout.failed_episodes",
        "it must be 'reward', got 'rewrad'",
    ),
    (
        "trainer.total_steps=0; rollout.nonsense=1; inference.cells=none",
        "trainer.total_steps rollout.nonsense inference.cells",
        "",
    ),
    (
        "trainer.minibatches=5; rollout.n_samples=1; trainer.parallel={dp: 3, ep: 2}",
        "trainer.minibatches trainer.batch_size trainer.parallel.ep rollout.n_samples",
        "trainer.batch_size=32 is not divisible by trainer.minibatches=5|"
        "over ep=2: each pipeline stage has tp x cp x dp = 3 ranks|parallel.dp=3|n_samples=1",
    ),
    ("rollout.workflow=''", "rollout.workflow", "this key is required"),
    (
        "rollout.agent.mode=online",
        "rollout.workflow valid_dataset evaluation.sets",
        "external programs",
    ),
    (f"{NO_TASKS}; evaluation.separate_cell=true", "evaluation.separate_cell", "a valid_dataset"),
    (
        "evaluation.sets={aime: {dataset: {path: a}, metrics: [pass@8], n_samples: 4}, "
        "valid: {dataset: {path: b}, workflow_kwargs: {a: 1}}}",
        "evaluation.sets.valid evaluation.sets.aime.metrics evaluation.sets.valid.workflow_kwargs",
        "pass@8 needs 8 samples of a task|use pass@4 or less|valid_dataset is the evaluation set",
    ),
    ("evaluation.keep_best=aime/pass@k", "evaluation.keep_best", "there are: valid/avg@1"),
    ("evaluation.sets={aime: {}}", "evaluation.sets.aime.dataset", "this key is required"),
    (
        "evaluation.sets={aime: {dataset: {path: a}, n_sample: 4}}",
        "evaluation.sets.aime.n_sample",
        "did you mean n_samples?",
    ),
    ("rollout.episode_timeout_s=2400", "proxy.session_timeout_s", "=3600 is shorter than 3 attem"),
    (
        "rollout.sampling.top_p=0.7; rollout.sampling.top_k=20",
        "rollout.sampling.top_p rollout.sampling.top_k",
        "top_p=0.7 leaves tokens out|use 1.0, or rollout.record_sampling_mask=true|use -1",
    ),
    (
        "rollout.sampling.temperature=1e-7",
        "rollout.sampling.temperature",
        "temperature=1e-07 makes all episodes of a group identical",
    ),
    (
        "rollout.record_sampling_mask=true; rollout.sampling.top_k=5000",
        "rollout.sampling.top_k",
        "records up to 4096 tokens a place",
    ),
    (
        "trainer.objective.teacher={coef: 1, url: 'http://node7:30000'}; "
        "rollout.sampling.temperature=0.7; rollout.record_sampling_mask=true",
        "rollout.sampling.temperature rollout.record_sampling_mask rollout.agent.sampling",
        "whole softmax at temperature 1|use 1.0, or trainer.objective.teacher.path|use false|"
        "lets agents request another temperature|use recipe",
    ),
    (
        "trainer.objective.teacher={coef: 1, url: 'http://node7:99999'}",
        "trainer.objective.teacher",
        "url=http://node7:99999 is no address of a server: Port out of range",
    ),
    (
        "rollout.failed_episodes=drop; rollout.max_episode_tries=2",
        "rollout.max_episode_tries",
        "no episode is repeated",
    ),
    (
        f"{ONLINE}; {NO_TASKS}; rollout.failed_episodes={{reward: 0}}",
        "rollout.failed_episodes",
        "cannot be used with mode=online",
    ),
    (
        "rollout.agent.python=/usr/bin/python3; rollout.agent.isolation=bwrap",
        "rollout.agent.python rollout.agent.isolation",
        "cannot be used with mode=inline|gets no sandbox",
    ),
    ("rollout.agent.variables=[SEARCH_*]", "rollout.agent.variables", "mode=inline has none"),
    (
        "rollout.sampling=[1]; evaluation.sets=[aime]",
        "rollout.sampling evaluation.sets",
        "expected keys and values, got a list",
    ),
    ("trainer.objective=[]", "trainer.objective", "instance of ObjectiveConfig"),
    ("rollout.min_samples=100", "rollout.min_samples", "is more than n_samples"),
    ("rollout.extra_samples=10000", "rollout.max_concurrent_rollouts", "is too small"),
    (f"{SOURCES}; rollout.curriculum=my.tasks:weigh", "train_dataset.sources", "are ignored when"),
    (
        "weights.transport=disk; weights.replicas_per_group=2",
        "weights",
        "from disk every replica loads by itself",
    ),
    ("weights.senders=3", "weights.senders", "weights.senders=3 of 1 trainer ranks"),
    (
        "trainer.lora={sync: adapter}; weights.transport=disk",
        "weights.transport",
        "sync=adapter sends an adapter",
    ),
    ("trainer.lora={sync: adapter, dora: true}", "trainer.lora", "SGLang has neither"),
    ("trainer.lora={sync: adapter, target_modules: [c_attn]}", "trainer.lora", "not c_attn"),
    (
        "trainer.lora={sync: adapter, target_modules: [q_proj, o_proj]}",
        "trainer.lora",
        "needs q_proj and v_proj together",
    ),
    (
        "trainer.lora={sync: adapter, target_modules: [up_proj]}",
        "trainer.lora",
        "needs gate_proj beside up_proj",
    ),
    (
        "trainer.profile={steps: [3, 99], ranks: [0, 1]}",
        "trainer.profile.steps trainer.profile.ranks",
        "steps has 99, and the last is 25|ranks has 1, and the last is 0",
    ),
    (
        "train_dataset=null; trainer.profile={steps: [3]}",
        "trainer.profile",
        "without train_dataset there are none",
    ),
    ("trainer.profile={memory: true}", "trainer.profile.steps", "this key is required"),
    # names that would leave the file root
    *(
        (f"trial_name='{name}'", "trial_name", "regular expression")
        for name in ("..", ".hidden", "a/b", "")
    ),
]


@pytest.mark.parametrize(("overrides", "keys", "parts"), REFUSED)
def test_every_mistake_is_told_with_its_key(overrides: str, keys: str, parts: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, overrides.split("; "))
    assert sorted(problem.key for problem in caught.value.problems) == sorted(keys.split())
    message = str(caught.value)
    assert [part for part in parts.split("|") if part not in message] == [], message
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_parse_and_resolve_to_themselves(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.run_dir == recipe.cluster.fileroot / recipe.experiment_name / recipe.trial_name
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(resolved) == recipe


def test_overrides_reach_any_depth_and_keep_their_types() -> None:
    recipe = load_recipe(
        QUICKSTART, ["trainer.optimizer.lr=1e-3", "rollout.max_head_offpolicyness=2"]
    )
    assert recipe.trainer.optimizer.lr == 1e-3
    assert recipe.rollout.max_head_offpolicyness == 2
    with pytest.raises(RecipeError, match="expected key=value, got 'trainer'"):
        load_recipe(QUICKSTART, ["trainer"])
    with pytest.raises(RecipeError, match=r"(?s)the overrides cannot be read.*duplicate key"):
        load_recipe(QUICKSTART, ["train_dataset.kwargs={size: 1, size: 2}"])


@pytest.mark.parametrize(
    ("section", "override", "kept"),
    [
        ("train_dataset", "train_dataset={path: own.jsonl}", {"path": Path("own.jsonl")}),
        ("train_dataset", "train_dataset.hub=me/a/b.parquet", {"hub": "me/a/b.parquet"}),
        (
            "train_dataset",
            "train_dataset.generator=my.tasks:make",
            {"generator": "my.tasks:make", "kwargs": {"size": 20000, "seed": 1, "terms": 5}},
        ),
        ("train_dataset", "train_dataset.sources=[{path: a.jsonl}]", {"path": None}),
        ("valid_dataset", "valid_dataset.path=own.jsonl", {"path": Path("own.jsonl")}),
        ("model", "model.path=/models/own", {"path": Path("/models/own"), "tiny": None}),
        ("model", "model.path=${cluster.fileroot}/own", {"path": Path("runs/own"), "tiny": None}),
    ],
)
def test_an_override_replaces_the_source(section: str, override: str, kept: dict[str, Any]) -> None:
    """All keys of the source go; an override adds to a source of the same kind."""
    recipe = load_recipe(QUICKSTART, [override])
    values = getattr(recipe, section).model_dump(exclude_defaults=True)
    values.pop("sources", None)
    assert values == {name: value for name, value in kept.items() if value is not None}


def test_a_folder_of_harbor_tasks_needs_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "task.toml").touch()
    tasks = f"train_dataset.path={tmp_path}"
    with pytest.raises(RecipeError, match=r"rollout\.agent\.isolation is null") as refused:
        load_recipe(QUICKSTART, [tasks])
    assert refused.value.problems[0].key == "train_dataset.path"
    isolated = load_recipe(QUICKSTART, [tasks, "rollout.agent.isolation=bwrap"])
    assert isolated.train_dataset
    assert isolated.train_dataset.is_harbor


DOUBTFUL = [
    ("trainer.objective.clip_high=0.4", "every ratio is 1"),
    ("trainer.optimizer.warmup_steps=500", "never reaches its peak in 25 steps"),
    ("rollout.failed_episodes=drop", "set min_samples=2 to train the others"),
    ("trainer.optimizer={lr: 1e-6, weight_decay: 0.01}", "weight_decay=0.01 has no effect"),
    (
        "train_dataset.generator=areal_hpc.dataset.adapters:make_reasoning_tasks; "
        "train_dataset.kwargs={name: coin_flip}",
        "train_dataset.kwargs.name=coin_flip: its own scorer gives 0.96",
    ),
    ("rollout.agent.isolation=none", "rollout.agent.isolation=none"),
    (
        "rollout.agent.isolation=bwrap; rollout.agent.sandbox.network=open",
        "rollout.agent.sandbox.network=open",
    ),
]
FREE_OF_DOUBT = [
    "trainer.total_steps=25",
    f"{ONLINE}; {NO_TASKS}",
    SOURCES,
    "rollout.n_samples=2; rollout.min_samples=2",
    # tokens may be left out if the recipe records which
    "rollout.sampling={top_p: 0.7, top_k: 20}; rollout.record_sampling_mask=true",
]


@pytest.mark.parametrize(
    ("overrides", "expected"), [*DOUBTFUL, *((overrides, None) for overrides in FREE_OF_DOUBT)]
)
def test_what_a_recipe_can_hardly_mean_is_told(overrides: str, expected: str | None) -> None:
    doubts = [*find_likely_mistakes(load_recipe(QUICKSTART, overrides.split("; ")))]
    assert len(doubts) == (expected is not None)
    assert all(expected in doubt for doubt in doubts if expected)


@pytest.mark.parametrize("key", ["surrogate=cispo", "ratio_level=sequence"])
def test_objectives_of_ratios_that_are_always_one_are_refused(key: str) -> None:
    chosen = f"trainer.objective.{key}"
    for proximal in ("recompute", "log_linear"):
        overrides = [chosen, f"trainer.objective.proximal={proximal}"]
        with pytest.raises(RecipeError, match=r"would have no effect.*every ratio is 1"):
            load_recipe(QUICKSTART, overrides)
        load_recipe(QUICKSTART, [*overrides, "trainer.minibatches=2"])
    naive = ("proximal=none", "off_policy_correction=none")
    load_recipe(QUICKSTART, [chosen, *(f"trainer.objective.{override}" for override in naive)])


def test_one_sample_is_enough_where_nothing_is_compared_within_a_group() -> None:
    for baseline in ("none", "batch_mean"):
        objective = [
            f"trainer.objective.baseline={baseline}",
            "trainer.objective.scale_rewards=batch",
        ]
        load_recipe(QUICKSTART, ["rollout.n_samples=1", *objective])
    overrides = ["rollout.n_samples=1", "trainer.objective.preset=reinforce"]
    with pytest.raises(RecipeError, match="every one"):
        load_recipe(QUICKSTART, [*overrides, "rollout.filter_same_reward=true"])
    with pytest.raises(RecipeError, match="scale_rewards=group"):
        load_recipe(QUICKSTART, ["rollout.n_samples=1", "trainer.objective.baseline=none"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollout.agent.sandbox.network=open", "rollout.agent.isolation names none"),
        (
            "rollout.agent.isolation=bwrap rollout.agent.mode=online rollout.workflow=''",
            "external programs run the agent",
        ),
        ("rollout.agent.isolation=none rollout.agent.sandbox.root=/images/a", "cannot be used"),
        ("rollout.agent.isolation=docker", "bwrap"),
    ],
)
def test_a_sandbox_that_no_agent_can_have_is_refused(words: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(QUICKSTART, words.split())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1", "is not YAML"),
        ("5", "is not YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("x: ${nowhere}\n", "nowhere.*not found"),
        ("trial_name: ???\n", r"expected a value, got \?\?\?\n  at: trial_name"),
        (None, "there is no recipe at"),
    ],
)
def test_files_without_recipes_fail(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "broken.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=expected):
        load_recipe(path)


def site_file(folder: Path, **cluster: object) -> Path:
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def test_a_recipe_wins_over_its_site_and_the_command_line_over_both(tmp_path: Path) -> None:
    slurm = {"partition": "gpu", "sbatch": {"account": "low"}}
    site = site_file(tmp_path, fileroot="/shared", stop_grace_s=20, slurm=slurm)
    recipe = load_recipe(QUICKSTART, ["cluster.slurm.sbatch.account=high"], site)
    assert recipe.cluster.fileroot == Path("runs"), "the recipe names one"
    assert recipe.cluster.stop_grace_s == 20
    assert (recipe.cluster.slurm.partition, recipe.cluster.slurm.sbatch) == (
        "gpu",
        {"account": "high"},
    )


def test_every_unknown_key_of_a_site_is_refused_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no site file at"):
        load_recipe(QUICKSTART, (), tmp_path / "nowhere.yaml")
    site = site_file(tmp_path, slurm={"partitoin": "gpu", "jobs": {"cell": {"memory": "1G"}}})
    with pytest.raises(RecipeError) as caught:
        load_recipe(QUICKSTART, (), site)
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {f"{site}: slurm.partitoin", f"{site}: slurm.jobs.cell.memory"}
    assert "did you mean partition?" in str(caught.value)


def test_a_site_may_read_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {
        "partition": "${oc.env:PARTITION}",
        "sbatch": {"mem": "${experiment_name}", "account": "???"},
    }
    settings = {"fileroot": "/shared", "stop_grace_s": "${oc.env:GRACE}", "slurm": slurm}
    site = site_file(tmp_path, **settings)
    monkeypatch.setenv("GRACE", "45")
    with pytest.raises(RecipeError, match="the environment variable PARTITION is not set") as error:
        read_site_values(site)
    assert error.value.problems[0].key == f"{site}: cluster.slurm.partition"
    monkeypatch.setenv("PARTITION", "gpu")
    with pytest.raises(
        RecipeError, match=r"expected a value.*\n  at: cluster.slurm.sbatch.account"
    ):
        load_recipe(QUICKSTART, (), site)
    recipe = load_recipe(QUICKSTART, ["cluster.slurm.sbatch.account=team"], site)
    assert (recipe.cluster.stop_grace_s, recipe.cluster.slurm.partition) == (45.0, "gpu")
    assert recipe.cluster.slurm.sbatch["mem"] == recipe.experiment_name
    values = read_site_values(site)
    assert values == settings | {"stop_grace_s": "45", "slurm": {"partition": "gpu", "sbatch": {}}}
    monkeypatch.setenv("GRACE", "soon")
    with pytest.raises(RecipeError, match="valid number"):
        read_site_values(site)


def test_a_recipe_may_be_forbidden_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(QUICKSTART.read_text())

    def refuse(path: object) -> None:  # the file system asks no right of root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(OmegaConf, "load", refuse)
    with pytest.raises(RecipeError, match="may not be read") as refused:
        load_recipe(path)
    assert "YAML" not in str(refused.value)


@pytest.mark.parametrize("path", sorted((CHECKOUT / "slurm" / "sites").glob("*.yaml")))
def test_every_shipped_site_fits_a_recipe(path: Path) -> None:
    assert load_recipe(QUICKSTART, (), path).cluster.slurm != SlurmConfig()


def default_sections(section: type[BaseConfig], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseConfig):
            yield f"{prefix}{name}", field.default
        if inner := get_section_class(field.annotation):
            yield from default_sections(inner, f"{prefix}{name}.")


@pytest.mark.parametrize(("key", "default"), [*default_sections(Recipe)])
def test_a_section_written_in_part_keeps_its_other_defaults(key: str, default: BaseConfig) -> None:
    """One key is laid over the class's defaults, so these must be the section's."""
    assert default == type(default)()
