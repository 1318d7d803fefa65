"""The bias of every preset in numbers. Writes docs/bias.md; a quarter of an hour."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import pytest

from areal_hpc.recipe.presets import PRESETS
from tests.support import bias_table
from tests.support.bias_gradient import measure_cosine
from tests.support.bias_scenarios import (
    OBJECTIVES,
    SCENARIOS,
    SEEDS,
    UNTAUGHT_PPO,
    measure,
    measure_eight,
    measure_three,
    prepare,
)
from tests.support.environments import CHECKOUT
from tests.support.results import write_results
from tests.support.tables import write_table

pytestmark = pytest.mark.timeout(3600)
DOCUMENT, OBJECTIVES_DOCUMENT = (CHECKOUT / "docs" / name for name in ("bias.md", "objectives.md"))
LARGER_GROUPS = {scenario.split()[0]: scenario for scenario in list(SCENARIOS)[:3]}
"""Scenarios that are measured in groups of three and of eight too, by the kind of their rewards."""
EXACT = ("rloo", "reinforce", "group_mean, none, sums")
COUPLED_BY_BATCH = ("reinforce_pp", "reinforce_pp_baseline", "ppo")
"""Presets whose advantages depend on all of a batch."""
COUPLED_BY_GROUP = tuple(name for name in PRESETS if name not in (*COUPLED_BY_BATCH, *EXACT))
IN_THREES = (*COUPLED_BY_GROUP, *EXACT)
"""Objectives whose groups of three are all counted."""
IN_EIGHTS = ("default", "dr_grpo", *COUPLED_BY_BATCH)
"""Objectives whose groups of eight are drawn."""
Case = tuple[str, str, int]
"""Scenario, objective and seed."""
Measured = TypeVar("Measured")


def measure_each(
    pool: ProcessPoolExecutor,
    measure_one: Callable[[str, str, int], Measured],
    cases: Iterable[Case],
) -> dict[Case, Measured]:
    """What was measured of each case, on all cores."""
    cases = list(cases)
    return dict(zip(cases, pool.map(measure_one, *zip(*cases, strict=True)), strict=True))


def test_every_preset_is_as_biased_as_the_document_says() -> None:
    # spawned: a process that has used torch's threads must not be forked
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        twos = measure_each(pool, measure, itertools.product(SCENARIOS, OBJECTIVES, SEEDS))
        larger = LARGER_GROUPS.values()
        threes = measure_each(pool, measure_three, itertools.product(larger, IN_THREES, [1]))
        eights = measure_each(pool, measure_eight, itertools.product(larger, IN_EIGHTS, [1]))
    two = {
        scenario: {name: [twos[scenario, name, seed] for seed in SEEDS] for name in OBJECTIVES}
        for scenario in SCENARIOS
    }
    three = {
        kind: {name: threes[scenario, name, 1] for name in IN_THREES}
        for kind, scenario in LARGER_GROUPS.items()
    }
    eight = {
        kind: {name: eights[scenario, name, 1] for name in IN_EIGHTS}
        for kind, scenario in LARGER_GROUPS.items()
    }
    write_results(bias_table.RESULTS, {"two": two, "three": three, "eight": eight})
    write_table(DOCUMENT, "cosines", bias_table.table())
    write_table(DOCUMENT, "norms", bias_table.norm_table())
    write_table(DOCUMENT, "eight", bias_table.table_of_eight())
    write_table(DOCUMENT, "three", bias_table.table_of_three())
    write_table(OBJECTIVES_DOCUMENT, "biases", bias_table.table_of_biases())
    for kind in LARGER_GROUPS:
        assert min(three[kind][name] for name in EXACT) >= 1 - 1e-9
    for scenario in list(SCENARIOS)[:4]:
        for name in EXACT:
            assert min(cosine for cosine, _ in two[scenario][name]) >= 1 - 1e-9
    for scenario in list(SCENARIOS)[3:5]:
        for name in ("rloo, credit=turn", "reinforce, credit=turn"):
            assert min(cosine for cosine, _ in two[scenario][name]) >= 1 - 1e-9
    exact_where_replies_are_left_out = [
        "graded, the second turn is greedy",
        "graded, the second turn has a `top_p` of .8",
        "graded, `top_p` .8 with `record_sampling_mask`",
        "binary, the same, `failed_episodes={reward: 0}`",
    ]
    for scenario in exact_where_replies_are_left_out:
        assert min(cosine for cosine, _ in two[scenario]["rloo"]) >= 1 - 1e-9, scenario
    assert two["binary, 80 % of long episodes fail and are repeated"]["rloo"][0][0] < 0.95
    for name, ratio in (("rloo", 1.0), ("reinforce", 1.0), ("group_mean, none, sums", 0.5)):
        assert two["binary rewards"][name][0][1] == pytest.approx(ratio, rel=1e-6)
    assert two["graded rewards (lognormal)"]["default"][0][0] < 0.95
    assert two["binary rewards"]["default"][0][0] > 0.98
    # A critic that has learned turns PPO less than one that has not.
    learned, untaught = (two["binary rewards"][name][0][0] for name in ("ppo", UNTAUGHT_PPO))
    assert untaught < learned < 1 - 1e-6


def test_a_penalty_and_a_teacher_are_a_part_of_what_is_true() -> None:
    branches = list(SCENARIOS)[4]
    for name in ("reinforce_pp", "opd"):
        task, plain = prepare(branches, name, 1), prepare(branches, "default", 1)
        assert 1 - measure_cosine(task.truth, plain.truth) > 1e-9
