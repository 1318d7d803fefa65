"""Options of SGLang's command line, ours and those that users add, read by its own parser.

SGLang takes seconds to import.
"""

import pytest

from areal_hpc.inference.server.command import NodeOptions, ServerPorts, build_replica_command
from areal_hpc.launch.checks.inputs import (
    OptionReport,
    find_option_problems,
    read_sglang_options,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.inference import (
    REFUSED_SGLANG_OPTIONS,
    InferenceConfig,
)
from tests.support.environments import CHECKOUT

SERVE_PYTHON = str(CHECKOUT / ".venvs" / "serve" / "bin" / "python")
RECIPES = [load_recipe(path) for path in sorted((CHECKOUT / "recipes").rglob("*.yaml"))]
WRONG = {
    "--mem-fraction-statik 0.5": ("SGLang has no option --mem-fraction-statik", "static?"),
    "--chunked-prefill-size many": ("invalid int value: 'many'", "two entries"),
    "4096 --enable-metrics": ("SGLang expects an option, got '4096'", "two entries"),
    "--schedule-policy": ("expected one argument", "two entries"),
}


def build_command_lines(recipe: Recipe) -> list[list[str]]:
    inference = recipe.inference
    nodes = inference.nodes_per_replica
    parts = [
        NodeOptions(node, nodes, "10.0.0.1:31002", f"10.0.0.{node}") if nodes > 1 else None
        for node in range(nodes)
    ]
    return [
        list(
            build_replica_command(
                inference,
                python="python",
                model_path="/models/m",
                device="cuda",
                dtype=recipe.trainer.dtype,
                index=0,
                ports=ServerPorts(31001, 31002),
                random_seed=7,
                updates_in_place=recipe.weights.pause_mode == "in_place",
                node_options=part,
            ).argv[3:]
        )
        for part in parts
    ]


OF_RECIPES = [line for recipe in RECIPES for line in build_command_lines(recipe)]


@pytest.fixture(scope="module")
def report() -> OptionReport:
    """Read all lines of this file at once: SGLang takes seconds to import."""
    spanning = InferenceConfig(tp=8, nodes_per_replica=2)
    lines = [
        *OF_RECIPES,
        *build_command_lines(
            RECIPES[0].model_copy(update={"inference": spanning}),
        ),
        *[["--model-path", "m", *words.split()] for words in WRONG],
    ]
    options = read_sglang_options(SERVE_PYTHON, lines)
    assert options is not None
    assert len(options.readings) == len(lines)
    return options


def test_sglang_knows_all_that_recipes_have_it_start_with(report: OptionReport) -> None:
    held = report.readings[: len(OF_RECIPES) + 2]
    assert [(row.unknown, row.complaint) for row in held] == [([], "")] * (len(OF_RECIPES) + 2)


def test_options_that_are_refused_exist(report: OptionReport) -> None:
    assert {*REFUSED_SGLANG_OPTIONS} <= {*report.known}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_option_is_told_with_a_way_out(words: str, report: OptionReport) -> None:
    reading = report.readings[len(OF_RECIPES) + 2 + [*WRONG].index(words)]
    (problem,) = find_option_problems(words.split(), reading, report.known)
    message, hint = WRONG[words]
    assert message in problem.message
    assert problem.key == "inference.extra_args"
    assert hint in problem.hint
