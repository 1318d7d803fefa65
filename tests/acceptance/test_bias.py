"""The bias of every preset in numbers. Writes docs/bias.md; a quarter of an hour."""

import pytest

from tests.support import bias_table
from tests.support.bias_scenarios import (
    OBJECTIVES,
    SCENARIOS,
    SEEDS,
    measure,
    measure_eight,
    measure_three,
)
from tests.support.environments import CHECKOUT
from tests.support.results import write_results
from tests.support.tables import write_table

pytestmark = pytest.mark.timeout(3600)
DOCUMENT, OBJECTIVES_DOCUMENT = (CHECKOUT / "docs" / name for name in ("bias.md", "objectives.md"))
KINDS = ("binary", "graded", "skewed")
EXACT = ("rloo", "reinforce", "group_mean, none, sums")


def test_every_preset_is_as_biased_as_the_document_says() -> None:
    two = {
        scenario: {name: [measure(scenario, name, seed) for seed in SEEDS] for name in OBJECTIVES}
        for scenario in SCENARIOS
    }
    three = {
        kind: {name: measure_three(kind, name, 1) for name in ("default", "grpo", *EXACT)}
        for kind in KINDS
    }
    eight = {
        kind: {name: measure_eight(kind, name, 1) for name in ("default", "dr_grpo")}
        for kind in KINDS
    }
    write_results(bias_table.RESULTS, {"two": two, "three": three, "eight": eight})
    write_table(DOCUMENT, "cosines", bias_table.table())
    write_table(DOCUMENT, "norms", bias_table.norm_table())
    write_table(DOCUMENT, "eight", bias_table.table_of_eight())
    write_table(DOCUMENT, "three", bias_table.table_of_three())
    write_table(OBJECTIVES_DOCUMENT, "biases", bias_table.table_of_biases())
    for kind in KINDS:
        assert min(three[kind][name] for name in EXACT) >= 1 - 1e-9
    for scenario in list(SCENARIOS)[:4]:
        for name in EXACT:
            assert min(cosine for cosine, _ in two[scenario][name]) >= 1 - 1e-9
    for scenario in list(SCENARIOS)[3:5]:
        for name in ("rloo, credit=turn", "reinforce, credit=turn"):
            assert min(cosine for cosine, _ in two[scenario][name]) >= 1 - 1e-9
