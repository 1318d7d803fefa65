"""The tables that are generated from the checkout: run this module to renew them all."""

from collections.abc import Callable

from areal_hpc.agents.harness.programs import HARNESSES
from areal_hpc.areal.rules import RULE_BY_KEY
from areal_hpc.metrics.step_metrics import read_catalogue
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from tests.support import mistakes, parameter_table
from tests.support.results import markdown, write_table


def _render_dialects() -> str:
    forms = {path: one.request for path, one in DIALECT_BY_ROUTE.items()}
    return parameter_table.render_parameter_table(forms)


def _render_harnesses() -> str:
    rows = []
    for name, one in HARNESSES.items():
        needs = f"needs Python {one.python_version}" if one.python_version else ""
        remarks = "; ".join(filter(None, (needs, one.note)))
        package = f"`{one.package}` {one.version} ({one.registry})"
        rows.append((f"`{name}`", package, one.dialect, remarks))
    return markdown(("harness", "package", "dialect", "remarks"), rows)


def _render_metrics() -> str:
    rows = [
        (f"`{one.name}`", one.unit, one.direction, one.meaning, one.source)
        for one in read_catalogue()
    ]
    return markdown(("metric", "unit", "good", "meaning", "from"), rows)


def _render_areal_keys() -> str:
    rows = [(f"`{key}`", rule.counterpart) for key, rule in RULE_BY_KEY.items()]
    return markdown(("AReaL", "here"), rows)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("dialects.md", "parameters"): _render_dialects,
    ("errors.md", "agents"): mistakes.agent_mistakes_table,
    ("errors.md", "mistakes"): mistakes.mistakes_table,
    ("harnesses.md", "programs"): _render_harnesses,
    ("metrics.md", "metrics"): _render_metrics,
    ("migrating-from-areal.md", "keys"): _render_areal_keys,
}
"""Document below docs/ and name of the table -> what must stand there."""

if __name__ == "__main__":
    for (document, name), make in TABLES.items():
        write_table(document, name, make())
