"""AReaL's configuration becomes a recipe; every key that is lost has a reason."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.areal.api.cli_args import (
    AgentConfig,
    AgentRLConfig,
    DatasetConfig,
    GenerationHyperparameters,
    GRPOConfig,
    NormConfig,
    RejectionSamplingConfig,
    TeacherConfig,
    load_expr_config,
    read_areal_config_file,
)
from areal_hpc.areal.rules import find_rule_key, flatten_to_dotted_keys
from areal_hpc.areal.translation import translate_to_recipe
from areal_hpc.errors import RecipeError
from areal_hpc.recipe.loading import build_recipe

DECOUPLED = {"use_decoupled_loss": True}
LOST_LAYOUTS = ("sglang:d4", "vllm:d4+fsdp:d4", "sglang:d2p2+fsdp:d4", "sglang:d4+fsdp:zero")
EXAMPLE = Path(__file__).parents[2] / "contract" / "areal_config.yaml"


def recipe_of(tree: dict[str, Any], rows: int | None = None) -> dict[str, Any]:
    return flatten_to_dotted_keys(translate_to_recipe(tree, rows).recipe)


def reasons(tree: Any, rows: int | None = None) -> dict[str, str]:
    return {item.key: item.reason for item in translate_to_recipe(tree, rows).untranslated}


def test_every_key_of_the_configuration_classes_has_a_rule() -> None:
    full = AgentRLConfig(
        valid_dataset=DatasetConfig(),
        eval_gconfig=GenerationHyperparameters(),
        teacher=TeacherConfig(),
    )
    full.rollout.openai = AgentConfig()
    full.actor.reward_norm = full.actor.adv_norm = NormConfig()
    full.actor.rejection_sampling = RejectionSamplingConfig()
    optional = {"critic", "ref"}
    keys = {key for key in flatten_to_dotted_keys(dataclasses.asdict(full)) if key not in optional}
    assert {key for key in keys if not find_rule_key(key)} == set()


def test_a_whole_file_becomes_a_recipe_that_is_valid() -> None:
    translation = translate_to_recipe(read_areal_config_file(EXAMPLE), train_rows=1000)
    recipe = build_recipe(translation.recipe)
    trainer, rollout, inference = recipe.trainer, recipe.rollout, recipe.inference
    assert (trainer.total_steps, trainer.export_every_steps) == (30, 10)
    sizes = trainer.parallel.model_dump(exclude={"shard_parameters"})
    assert sizes == {"dp": 2, "tp": 1, "pp": 2, "cp": 1, "ep": 2}
    assert trainer.optimizer.betas == (0.9, 0.95)
    objective = trainer.objective
    assert (objective.clip_low, objective.clip_high) == (0.2, 0.3)
    assert (objective.off_policy_correction, objective.off_policy_correction_high) == ("mask", 4.0)
    assert rollout.max_concurrent_rollouts == 256  # episodes, not groups
    assert rollout.limits.max_turns == 8
    assert rollout.agent.mode == "subproc"
    assert (objective.credit, objective.turn_discount) == ("turn", 0.9)
    assert rollout.sampling.temperature == 0.8
    assert (inference.cells, inference.replicas_per_cell) == (1, 4)
    assert (inference.tool_call_parser, inference.context_length) == ("qwen25", 2048)
    assert inference.extra_args == ("--chunked-prefill-size", "1024")
    assert recipe.evaluation.every_steps == 10
    sampling = recipe.evaluation.sampling
    assert (sampling.temperature, sampling.max_new_tokens) == (0.0, 256)


def test_what_is_lost_is_named_with_a_reason() -> None:
    lost = reasons(read_areal_config_file(EXAMPLE), 1000)
    assert set(lost) == {"actor.adv_norm.mean_level", "actor.adv_norm.std_level", "my_own_key"}
    assert "workflow_kwargs" in lost["my_own_key"]


def test_epochs_need_the_number_of_rows() -> None:
    tree = {"total_train_epochs": 2, "train_dataset": {"batch_size": 8}}
    assert "trainer.total_steps" not in recipe_of(tree)
    assert "total_train_epochs" in reasons(tree)
    assert recipe_of(tree, 83)["trainer.total_steps"] == 20
    assert recipe_of({**tree, "total_train_steps": 7}, 83)["trainer.total_steps"] == 7


def test_sampling_that_leaves_tokens_out_is_recorded_to_be_trained() -> None:
    no_parser = {"tool_call_parser": None}
    no_tools: dict[str, Any] = {"rollout": {"openai": no_parser, "agent": no_parser}}
    recipe = recipe_of({**no_tools, "gconfig": {"n_samples": 2, "top_p": 0.9, "temperature": 0.7}})
    assert recipe["rollout.sampling.top_p"] == recipe["evaluation.sampling.top_p"] == 0.9
    assert recipe["rollout.record_sampling_mask"] is True
    plain = {"gconfig": {"temperature": 0.7}}
    assert "rollout.record_sampling_mask" not in recipe_of({**no_tools, **plain})
    assert recipe_of(plain)["rollout.record_sampling_mask"] is True, "strict tools, by default"
    lost = translate_to_recipe({"gconfig": {"n_samples": 2, "top_k": 5000}}).untranslated
    assert "at most 4096, or no bound" in {item.key: item.reason for item in lost}["gconfig.top_k"]


@pytest.mark.parametrize(
    ("actor", "proximal", "correction", "high"),
    [
        ({}, "none", "none", None),
        ({"recompute_logprob": True}, "recompute", "none", None),
        (DECOUPLED, "recompute", "none", None),
        ({**DECOUPLED, "prox_logp_method": "loglinear"}, "log_linear", "none", None),
        ({**DECOUPLED, "behav_imp_weight_cap": 3.0}, "recompute", "mask", 3.0),
        ({**DECOUPLED, "rejection_sampling": {"action": "clamp"}}, "recompute", "clamp", 5.0),
    ],
)
def test_the_proximal_policy_follows_three_switches(
    actor: dict[str, Any], proximal: str, correction: str, high: float | None
) -> None:
    recipe = recipe_of({"actor": actor})
    assert recipe["trainer.objective.proximal"] == proximal
    assert recipe["trainer.objective.off_policy_correction"] == correction
    assert recipe.get("trainer.objective.off_policy_correction_high") == high


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"metric": "kl_k1", "lower": -0.5}, ("token", "k1", -0.5, None)),
        ({"metric": "kl_k2", "agg": "max"}, ("token", "k2", 0.0, None)),  # a token metric
        ({"metric": "kl_k3", "level": "sequence", "agg": "sum"}, ("sequence", "kl", 0.0, "sum")),
        ({"level": "sequence", "agg": "max"}, ("sequence", "ratio", 0.0, "max")),
    ],
)
def test_rejection_keeps_how_it_judges(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    recipe = recipe_of({"actor": {**DECOUPLED, "rejection_sampling": given}})
    names = ("level", "metric", "low", "agg")
    kept = tuple(recipe.get(f"trainer.objective.off_policy_correction_{name}") for name in names)
    assert kept == expected


@pytest.mark.parametrize(
    ("metric", "lower", "is_lost"),
    [("kl_k1", 0.0, True), ("kl_k1", -0.1, False), ("kl_k2", 0.1, True), ("kl_k3", 0.0, False)],
)
def test_a_bound_above_equal_policies_is_lost(metric: str, lower: float, is_lost: bool) -> None:
    rejection = {"metric": metric, "lower": lower}
    translation = translate_to_recipe({"actor": {**DECOUPLED, "rejection_sampling": rejection}})
    lost = [item.key for item in translation.untranslated]
    assert ("actor.rejection_sampling.lower" in lost) is is_lost


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ({"mean_level": "group", "std_level": "group"}, ("group_mean", "group", 1)),
        ({"std_unbiased": False}, ("batch_mean", "batch", 0)),
        ({"mean_level": None, "std_level": None}, ("none", "none", None)),
        (
            {"mean_level": "group", "std_level": None, "mean_leave1out": True},
            ("leave_one_out", "none", None),
        ),
    ],
)
def test_the_norm_of_rewards_is_baseline_and_scale(
    norm: dict[str, Any], expected: tuple[str, str, int | None]
) -> None:
    tree = {"actor": {"reward_norm": norm}, "gconfig": {"n_samples": 4}}
    recipe = recipe_of(tree)
    baseline, scale, ddof = expected
    assert recipe["trainer.objective.baseline"] == baseline
    assert recipe["trainer.objective.scale_rewards"] == scale
    assert recipe.get("trainer.objective.std_ddof", ddof) == ddof
    assert not [key for key in reasons(tree) if "reward_norm" in key]
    assert "trainer.objective.baseline" not in recipe_of({"gconfig": {"n_samples": 4}})


def test_a_scale_of_rewards_matters_where_no_deviation_divides_them() -> None:
    raw = {"reward_norm": {"mean_level": "group", "std_level": None}, "reward_scaling": 10}
    assert "scale them in the agent" in reasons({"actor": raw})["actor.reward_scaling"]
    assert "actor.reward_scaling" not in reasons({"actor": {"reward_scaling": 10}})


def test_the_penalty_is_carried_over_where_a_reference_is_configured() -> None:
    coef, path = "trainer.objective.kl.coef", "trainer.objective.kl.reference"
    assert coef not in recipe_of({"actor": {"kl_ctl": 0.05}}), "AReaL applies none either"
    recipe = recipe_of({"actor": {"kl_ctl": 0.05, "path": "/m"}, "ref": {"path": "/m"}})
    assert (recipe[coef], path in recipe) == (0.05, False)
    recipe = recipe_of({"actor": {"kl_ctl": 0.05, "path": "/m"}, "ref": {"path": "/other"}})
    assert recipe[path] == "/other"
    lost = reasons({"actor": {"kl_ctl": 0.05, "kl_estimator": "k2"}, "ref": {"path": "/m"}})
    assert "k1" in lost["actor.kl_ctl"]


def test_a_critic_is_carried_over() -> None:
    tree = {
        "actor": {"path": "/m", "discount": 0.99, "gae_lambda": 0.9, "gae_timestep_unit": "turn"},
        "critic": {"path": "/m", "eps_clip": 0.3, "optimizer": {"lr": 5e-6}},
    }
    recipe = recipe_of(tree)
    expected = {
        "baseline": "value", "scale_rewards": "none", "discount": 0.99, "gae_lambda": 0.9,
        "gae_unit": "turn", "critic.model": "initial", "critic.lr": 5e-6, "critic.clip_value": 0.3,
    }  # fmt: skip
    assert {name: recipe[f"trainer.objective.{name}"] for name in expected} == expected
    assert recipe_of({**tree, "critic": {"path": "/v"}})["trainer.objective.critic.model"] == "/v"
    assert not reasons(tree)
    scaled = {**tree, "actor": {**tree["actor"], "reward_scaling": 10.0}}
    assert "actor.reward_scaling" in reasons(scaled)
    other = {**tree, "critic": {"path": "/m", "ppo_n_minibatches": 9}}
    assert "critic.ppo_n_minibatches" in reasons(other)
    assert "actor.gae_lambda" in reasons({"actor": {"gae_lambda": 0.9}})


@pytest.mark.parametrize(
    ("weights", "coef", "min_reward_std"),
    [
        ({}, 0.005, None),
        ({"distill_loss_weight": 0.5, "rl_loss_weight": 1.0}, 0.5, None),
        ({"distill_loss_weight": 0.5, "rl_loss_weight": 2.0}, 0.25, None),
        ({"distill_loss_weight": 0.5, "rl_loss_weight": 0.0}, 0.5, 1e9),
    ],
)
def test_a_teacher_is_carried_over(
    weights: dict[str, float], coef: float, min_reward_std: float | None
) -> None:
    objective = "trainer.objective"
    tree = {"actor": {"path": "/m"}, "teacher": {"path": "/t", "backend": "fsdp:d1t4", **weights}}
    recipe = recipe_of(tree)
    assert recipe[f"{objective}.teacher.path"] == "/t"
    assert recipe[f"{objective}.teacher.coef"] == coef
    assert recipe.get(f"{objective}.min_reward_std") == min_reward_std
    assert set(reasons(tree)) == ({"teacher.rl_loss_weight"} if coef == 0.25 else set())


def test_what_no_teacher_here_does_is_said() -> None:
    tree = {"actor": {"path": "/m"}, "teacher": {"path": "Qwen/Qwen3-32B", "dtype": "float32"}}
    lost = reasons(tree)
    assert set(lost) == {"teacher.path", "teacher.dtype"}
    assert "download Qwen/Qwen3-32B" in lost["teacher.path"]
    assert "coef to 0.005" in lost["teacher.path"]
    assert not any("teacher" in key for key in recipe_of(tree))
    alone = {"teacher": {"path": "/t", "rl_loss_weight": 0.0}, "critic": {"path": "/m"}}
    assert "critic" in reasons({"actor": {"path": "/m"}, **alone})["teacher.path"]
    assert not reasons({"actor": {"path": "/m"}, "teacher": {"rl_loss_weight": 2.0}})
    undistilled = {"path": "/t", "distill_loss_weight": 0.0, "rl_loss_weight": 2.0}
    reason_of = reasons({"actor": {"path": "/m"}, "teacher": undistilled})
    assert "coef" not in reason_of["teacher.rl_loss_weight"]


@pytest.mark.parametrize(
    ("mode", "gpus", "expected"),
    [
        ("sglang:d4p1t1+fsdp:d2", 8, (1, 4, 1, 2)),
        ("sglang.d4t2+megatron.d2t2", 4, (2, 2, 2, 2)),
        ("sglang:d3+d1", 2, (3, 1, 1, 1)),
    ],
)
def test_allocation_mode_is_translated(mode: str, gpus: int, expected: tuple[int, ...]) -> None:
    recipe = recipe_of({"allocation_mode": mode, "cluster": {"n_gpus_per_node": gpus}})
    keys = ("cells", "replicas_per_cell", "tp")
    assert tuple(recipe[f"inference.{key}"] for key in keys) == expected[:3]
    assert recipe["trainer.parallel.dp"] == expected[3]


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"gconfig": {"greedy": True}}, "gconfig.greedy"),
        ({"rollout": {"agent": {"prefix_matcher": "my.module"}}}, "rollout.agent.prefix_matcher"),
        ({"actor": {"use_lora": True}}, "actor.use_lora"),
        ({"actor": {"eps_clipp": 1}}, "actor.eps_clipp"),
        ({"rollout": {"backend": "vllm:d4"}}, "rollout.backend"),
        *[({"allocation_mode": mode}, "allocation_mode") for mode in LOST_LAYOUTS],
    ],
)
def test_nothing_is_dropped_in_silence(tree: dict[str, Any], key: str) -> None:
    assert reasons(tree)[key]


@dataclass
class OwnConfig(GRPOConfig):
    """Configuration extended as AReaL's guide shows."""

    my_rounds: int = dataclasses.field(default=3)


def test_a_subclass_is_read_with_overrides_and_interpolations(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "actor: {path: /m}\ntokenizer_path: ${actor.path}\nrollout: {openai: {mode: subproc}}\n"
    )
    argv = ["--config", str(file), "my_rounds=5", "gconfig.n_samples=4"]
    config, path = load_expr_config(argv, OwnConfig)
    assert (config.my_rounds, config.gconfig.n_samples) == (5, 4)
    assert (config.tokenizer_path, path) == ("/m", str(file))
    assert config.rollout.openai is not None
    assert config.rollout.openai.mode == "subproc"


def test_unknown_keys_are_refused_together_with_the_nearest_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("actor: {pth: /m, reward_norm: {mean_lvl: group}}\n")
    with pytest.raises(RecipeError) as caught:
        load_expr_config(["--config", str(file), "seeed=1"], GRPOConfig)
    hints = {problem.key: problem.hint for problem in caught.value.problems}
    assert hints == {
        "actor.pth": "did you mean path?",
        "actor.reward_norm.mean_lvl": "did you mean mean_level?",
        "seeed": "did you mean seed?",
    }
