"""The tables of documents, by name. `python -m tests.support.site.tables NAME` prints one.

A document has the line `<!-- table: NAME -->` where the site has the table.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable

import msgspec

import areal_hpc
from areal_hpc.agents.harness.programs import HARNESSES
from areal_hpc.areal.rules import RULE_BY_KEY
from areal_hpc.cli.arguments import OVERRIDES, RECIPE, RUN, find_subparsers
from areal_hpc.cli.main import build_parser
from areal_hpc.metrics.step_metrics import read_catalogue
from areal_hpc.proxy.http.agent_api import DIALECT_BY_ROUTE
from areal_hpc.recipe.presets import PRESETS
from areal_hpc.recipe.reference import read_meanings, render_key_table
from areal_hpc.wire.trajectory import CallRecord, RowRecord
from tests.support import mistakes, parameter_table
from tests.support.environments import CHECKOUT
from tests.support.results import markdown
from tests.support.site import evidence

SHARED_LINES = re.compile(
    r"^  (-h, --help +show this help message and exit"
    f"|run +{RUN[1]['help']}|recipe +{RECIPE[1]['help']}|key=value +{OVERRIDES[1]['help']})\n",
    re.MULTILINE,
)
"""Lines of the help of most commands; docs/commands.md says once what they say."""


def _render_dialects() -> str:
    forms = {path: dialect.request for path, dialect in DIALECT_BY_ROUTE.items()}
    return parameter_table.render_parameter_table(forms)


def _render_presets() -> str:
    rows = []
    for name, preset in PRESETS.items():
        values = [
            f"`{key.removeprefix('trainer.objective.')}={json.dumps(value).strip(chr(34))}`"
            for key, value in preset.values.items()
        ]
        rows.append((f"`{name}`", ", ".join(values), preset.source))
    return markdown(("preset", "sets", "source"), rows)


def _render_records() -> str:
    parts = []
    for title, struct in (("a record", RowRecord), ("a call", CallRecord)):
        meanings, rows = read_meanings(struct), []
        for field in msgspec.structs.fields(struct):
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            value = "" if field.required else f"`{json.dumps(default)}`"
            rows.append((f"`{field.name}`", value, meanings.get(field.name, "")))
        parts.append(markdown((f"field of {title}", "if missing", "holds"), rows))
    return "\n\n".join(parts)


def _render_decisions() -> str:
    notes = sorted((CHECKOUT / "docs" / "decisions").glob("0*.md"))
    titles = [note.read_text().partition("\n")[0].removeprefix("# ") for note in notes]
    return "\n".join(f"- [{title}]({note.name})" for title, note in zip(titles, notes, strict=True))


def _render_harnesses() -> str:
    rows = []
    for name, harness in HARNESSES.items():
        needs = f"needs Python {harness.python_version}" if harness.python_version else ""
        remarks = "; ".join(filter(None, (needs, harness.note)))
        package = f"`{harness.package}` {harness.version} ({harness.registry})"
        rows.append((f"`{name}`", package, harness.dialect, remarks))
    return markdown(("harness", "package", "dialect", "remarks"), rows)


def _render_metrics() -> str:
    rows = [
        (f"`{row.name}`", row.unit, row.direction, row.meaning.replace("|", "\\|"), row.source)
        for row in read_catalogue()
    ]
    return markdown(("metric", "unit", "good", "meaning", "from"), rows)


def _render_areal_keys() -> str:
    keys: dict[str, list[str]] = defaultdict(list)
    for key, rule in RULE_BY_KEY.items():
        keys[rule.counterpart].append(f"`{key}`")
    return markdown(("AReaL", "here"), ((", ".join(names), here) for here, names in keys.items()))


def _render_recipe_keys() -> str:
    _, head, rows = render_key_table().partition("| key |")
    return f"{head}{rows}".rstrip()


def _render_commands() -> str:
    os.environ["COLUMNS"] = "90"  # by which argparse breaks lines
    parts = []
    for name, command in find_subparsers(build_parser()).items():
        parts += [f"## {name}", _quote_help(command)]
        for action, below in find_subparsers(command).items():
            parts += [f"### {name} {action}", _quote_help(below)]
    return "\n\n".join(parts)


def _quote_help(parser: argparse.ArgumentParser) -> str:
    """Quote the help of a command, without its usage and lines that it shares with others."""
    parser.usage = argparse.SUPPRESS
    text = SHARED_LINES.sub("", parser.format_help())
    text = re.sub(r"^(options|positional arguments):\n(?=\n|\Z)", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    return f"```text\n{text}\n```"


def _render_api() -> str:
    """Write instructions for mkdocstrings. `PPOTrainer` is one of AReaL's names."""
    names = [name for name in areal_hpc.__all__ if name not in ("__version__", "PPOTrainer")]
    objects = [getattr(areal_hpc, name) for name in names]
    return "\n\n".join(f"::: {item.__module__}.{item.__qualname__}" for item in objects)


TABLES: dict[str, Callable[[], str]] = {
    "agents": mistakes.agent_mistakes_table,
    "agreements": evidence.render_agreements,
    "ages": evidence.render_old_tokens,
    "api": _render_api,
    "attacks": evidence.render_attacks,
    "commands": _render_commands,
    "cosines": evidence.render_bias,
    "decisions": _render_decisions,
    "events": evidence.render_slurm_events,
    "keys": _render_areal_keys,
    "metrics": _render_metrics,
    "mistakes": mistakes.mistakes_table,
    "oracles": evidence.render_oracles,
    "parameters": _render_dialects,
    "presets": _render_presets,
    "programs": _render_harnesses,
    "rank kill": evidence.render_rank_kills,
    "recipe keys": _render_recipe_keys,
    "records": _render_records,
    "resumes": evidence.render_resumes,
    "runs": evidence.render_learning,
    "seconds": evidence.render_kills,
    "soak": evidence.render_soak,
    "submissions": evidence.render_submissions,
    "templates": evidence.render_templates,
}

if __name__ == "__main__":
    print(TABLES[" ".join(sys.argv[1:])]())
