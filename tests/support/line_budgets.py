"""Print the lines of each package beside its budget in `pyproject.toml`; fail above it."""

import tomllib

from tests.support.environments import CHECKOUT, sources


def main() -> int:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    budgets: dict[str, int] = settings["tool"]["areal_hpc"]["line_budgets"]
    lines = dict.fromkeys(budgets, 0)
    for path, text in sources().items():
        package = path.split("/")[0] if "/" in path else "top"
        lines[package] = lines.get(package, 0) + text.count("\n")
    over = [package for package in lines if lines[package] > budgets.get(package, 0)]
    for package, count in sorted(lines.items(), key=lambda item: -item[1]):
        mark = "  over its budget" if package in over else ""
        print(f"{package:<12}{count:>8,} of {budgets.get(package, 0):>7,} lines{mark}")
    print(f"{'together':<12}{sum(lines.values()):>8,} of {sum(budgets.values()):>7,} lines")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
