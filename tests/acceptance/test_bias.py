"""Bias of every preset over tiny tasks, which docs/bias.md shows; a quarter of an hour."""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.support.bias import (
    OBJECTIVES,
    SCENARIOS,
    SEEDS,
    UNTAUGHT_PPO,
    measure,
    measure_cosine,
    prepare,
)
from tests.support.results import write_results

pytestmark = pytest.mark.timeout(3600)
EXACT = ("rloo", "reinforce", "group_mean, none, sums")
EXACT_WITH_CREDIT = ("rloo, credit=turn", "reinforce, credit=turn")
EXACT_WHERE_REPLIES_ARE_LEFT_OUT = (
    "graded, the second turn is greedy",
    "graded, the second turn has a `top_p` of .8",
    "graded, `top_p` .8 with `record_sampling_mask`",
    "binary, the same, `failed_episodes={reward: 0}`",
)


def test_every_preset_is_as_biased_as_the_document_says() -> None:
    cases = list(itertools.product(SCENARIOS, OBJECTIVES, SEEDS))
    # spawned: a process that has used torch's threads must not be forked
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        measured = dict(zip(cases, pool.map(measure, *zip(*cases, strict=True)), strict=True))
    cosines = {
        scenario: {name: [measured[scenario, name, seed] for seed in SEEDS] for name in OBJECTIVES}
        for scenario in SCENARIOS
    }
    write_results("bias", cosines)

    def least(scenario: str, name: str) -> float:
        return min(cosine for cosine, _ in cosines[scenario][name])

    names = list(SCENARIOS)
    exact = [
        *itertools.product(names[:4], EXACT),
        *itertools.product(names[3:5], EXACT_WITH_CREDIT),
        *itertools.product(EXACT_WHERE_REPLIES_ARE_LEFT_OUT, ("rloo",)),
    ]
    for case in exact:
        assert least(*case) >= 1 - 1e-9, case
    for name, ratio in (("rloo", 1.0), ("reinforce", 1.0), ("group_mean, none, sums", 0.5)):
        assert cosines["binary rewards"][name][0][1] == pytest.approx(ratio, rel=1e-6)
    assert cosines["binary, 80 % of long episodes fail and are repeated"]["rloo"][0][0] < 0.95
    assert cosines["graded rewards (lognormal)"]["default"][0][0] < 0.95
    assert cosines["binary rewards"]["default"][0][0] > 0.98
    # A critic that has learned turns PPO less than one that has not.
    learned, untaught = (cosines["binary rewards"][name][0][0] for name in ("ppo", UNTAUGHT_PPO))
    assert untaught < learned < 1 - 1e-6


def test_a_penalty_and_a_teacher_are_a_part_of_what_is_true() -> None:
    branches = list(SCENARIOS)[4]
    for name in ("reinforce_pp", "opd"):
        task, plain = prepare(branches, name, 1), prepare(branches, "default", 1)
        assert 1 - measure_cosine(task.truth, plain.truth) > 1e-9
