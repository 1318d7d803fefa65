"""Print the lines of each package beside its budget in `pyproject.toml`; fail above it.

The training path is what the processes of a run can load: every module that a role's entry imports,
at its top or inside a function, and what these import in turn. Imports for types do not count.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping

from tests.support.environments import CHECKOUT, sources

ROLE_ENTRIES = (
    "areal_hpc.jobs.supervisor",
    "areal_hpc.inference.job",
    "areal_hpc.proxy.job",
    "areal_hpc.rollout.job",
    "areal_hpc.ledger.job",
    "areal_hpc.trainer.job",
)


def list_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from list_imports(node)


def follow_imports(texts: Mapping[str, str]) -> set[str]:
    """The modules that the entries of the six roles import, directly or not."""
    reached: set[str] = set()
    waiting = list(ROLE_ENTRIES)
    while waiting:
        module = waiting.pop()
        if module in texts and module not in reached:
            reached.add(module)
            waiting.extend(list_imports(ast.parse(texts[module])))
    return reached


def main() -> int:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    budgets: dict[str, int] = settings["tool"]["areal_hpc"]["line_budgets"]
    lines = dict.fromkeys(budgets, 0)
    modules: dict[str, str] = {}
    for path, text in sources().items():
        package = path.split("/")[0] if "/" in path else "top"
        lines[package] = lines.get(package, 0) + text.count("\n")
        modules["areal_hpc." + path.removesuffix(".py").replace("/", ".")] = text
    over = [package for package in lines if lines[package] > budgets.get(package, 0)]
    for package, count in sorted(lines.items(), key=lambda item: -item[1]):
        mark = "  over its budget" if package in over else ""
        print(f"{package:<14}{count:>8,} of {budgets.get(package, 0):>7,} lines{mark}")
    print(f"{'together':<14}{sum(lines.values()):>8,} of {sum(budgets.values()):>7,} lines")
    reached = follow_imports(modules)
    path_lines = sum(modules[module].count("\n") for module in reached)
    print(f"{'training path':<14}{path_lines:>8,} lines in {len(reached)} modules")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
