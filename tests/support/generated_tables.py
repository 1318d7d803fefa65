"""The tables that are generated from the checkout: run this module to renew them all."""

from collections.abc import Callable

from areal_hpc.agents.harness.programs import HARNESSES
from areal_hpc.areal.config.rules import RULE_BY_KEY
from areal_hpc.metrics.catalogue import read_catalogue
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from tests.support import (
    agents_table,
    attacks_table,
    bias_table,
    mistakes,
    newest_harnesses,
    oracle_table,
    parameter_table,
    rank_kill,
    slurm_events_table,
    slurm_releases,
    soak_table,
    submissions_table,
)
from tests.support.environments import CHECKOUT
from tests.support.tables import write_table


def _render_dialects() -> str:
    forms = {path: one.request for path, one in DIALECT_BY_ROUTE.items()}
    return parameter_table.render_parameter_table(forms)


def _render_harnesses() -> str:
    lines = ["| harness | package | dialect | remarks |", "|---|---|---|---|"]
    for name, one in HARNESSES.items():
        needs = f"needs Python {one.python_version}" if one.python_version else ""
        remarks = "; ".join(filter(None, (needs, one.note)))
        package = f"`{one.package}` {one.version} ({one.registry})"
        lines.append(f"| `{name}` | {package} | {one.dialect} | {remarks} |")
    return "\n".join(lines)


def _render_metrics() -> str:
    lines = ["| metric | unit | good | meaning | from |", "|---|---|---|---|---|"]
    lines += [
        f"| `{one.name}` | {one.unit} | {one.direction} | {one.meaning} | {one.source} |"
        for one in read_catalogue()
    ]
    return "\n".join(lines)


def _render_areal_keys() -> str:
    lines = ["| AReaL | here |", "|---|---|"]
    lines += [f"| `{key}` | {rule.counterpart} |" for key, rule in RULE_BY_KEY.items()]
    return "\n".join(lines)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("agents.md", "frameworks"): agents_table.table,
    ("bias.md", "cosines"): bias_table.table,
    ("bias.md", "eight"): bias_table.table_of_eight,
    ("bias.md", "norms"): bias_table.norm_table,
    ("bias.md", "three"): bias_table.table_of_three,
    ("devcluster.md", "releases"): slurm_releases.table,
    ("dialects.md", "parameters"): _render_dialects,
    ("errors.md", "agents"): mistakes.agent_mistakes_table,
    ("errors.md", "mistakes"): mistakes.mistakes_table,
    ("harnesses.md", "newest"): newest_harnesses.render_table,
    ("harnesses.md", "programs"): _render_harnesses,
    ("metrics.md", "metrics"): _render_metrics,
    ("migrating-from-areal.md", "keys"): _render_areal_keys,
    ("objectives.md", "biases"): bias_table.table_of_biases,
    ("objectives.md", "oracles"): oracle_table.table,
    ("operating.md", "events"): slurm_events_table.tables,
    ("operating.md", "rank kill"): rank_kill.table,
    ("operating.md", "soak"): soak_table.table,
    ("operating.md", "submissions"): submissions_table.table,
    **{("attacks.md", name): make for name, make in attacks_table.TABLES.items()},
}
"""Document below docs/ and name of the table -> what must stand there."""

if __name__ == "__main__":
    for (document, name), make in TABLES.items():
        write_table(CHECKOUT / "docs" / document, name, make())
