"""The tables that are generated from the checkout: run this module to renew them all."""

from collections.abc import Callable

from areal_hpc.agents.harness.programs import render_harness_table
from areal_hpc.areal.config.translation import render_rule_table
from areal_hpc.metrics.alert_rules import render_alert_table
from areal_hpc.metrics.catalogue import render_metric_table
from areal_hpc.proxy.dialects.parameter_docs import render_parameter_table
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from tests.support import (
    agents_table,
    attacks_table,
    bias_table,
    document_table,
    mistakes,
    newest_harnesses,
    oracle_table,
    rank_kill,
    slurm_events_table,
    slurm_releases,
    soak_table,
    submissions_table,
)
from tests.support.environments import CHECKOUT
from tests.support.tables import write_table


def _render_dialects() -> str:
    return render_parameter_table({path: one.request for path, one in DIALECT_BY_ROUTE.items()})


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("agents.md", "frameworks"): agents_table.table,
    ("areal-documents.md", "blocks"): document_table.table,
    ("bias.md", "cosines"): bias_table.table,
    ("bias.md", "eight"): bias_table.table_of_eight,
    ("bias.md", "norms"): bias_table.norm_table,
    ("bias.md", "three"): bias_table.table_of_three,
    ("devcluster.md", "releases"): slurm_releases.table,
    ("dialects.md", "parameters"): _render_dialects,
    ("errors.md", "agents"): mistakes.agent_mistakes_table,
    ("errors.md", "mistakes"): mistakes.mistakes_table,
    ("harnesses.md", "newest"): newest_harnesses.render_table,
    ("harnesses.md", "programs"): render_harness_table,
    ("metrics.md", "alerts"): render_alert_table,
    ("metrics.md", "metrics"): render_metric_table,
    ("migrating-from-areal.md", "keys"): render_rule_table,
    ("objectives.md", "biases"): bias_table.table_of_biases,
    ("objectives.md", "oracles"): oracle_table.table,
    ("operating.md", "events"): slurm_events_table.tables,
    ("operating.md", "rank kill"): rank_kill.table,
    ("operating.md", "soak"): soak_table.table,
    ("operating.md", "submissions"): submissions_table.table,
    **{("security.md", name): make for name, make in attacks_table.TABLES.items()},
}
"""Document below docs/ and name of the table -> what must stand there."""

if __name__ == "__main__":
    for (document, name), make in TABLES.items():
        write_table(CHECKOUT / "docs" / document, name, make())
