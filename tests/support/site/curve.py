"""The quick start's learning curve as SVG, from benchmarks/results/quickstart.json."""

from tests.support.environments import CHECKOUT
from tests.support.results import read_results

CURVE = CHECKOUT / "docs" / "learning_curve.svg"
COLORS = {
    "synchronous seed 1": "#c0392b",
    "synchronous seed 2": "#d98880",
    "synchronous seed 3": "#7b241c",
    "asynchronous seed 1": "#2e6da4",
}
LEFT, RIGHT, TOP, BOTTOM = 60, 700, 20, 260
LAST_STEP = 25


def render_curve() -> str:
    runs = read_results("quickstart", {})
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 310" font-family="sans-serif" '
        'font-size="13">',
        '<rect width="720" height="310" fill="white"/>',
    ]
    for reward in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _place_reward(reward)
        parts += [
            f'<line x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{reward:g}</text>',
        ]
    for step in range(0, LAST_STEP + 1, 5):
        parts.append(
            f'<text x="{_place_step(step)}" y="{BOTTOM + 18}" text-anchor="middle">{step}</text>'
        )
    parts.append('<text x="380" y="300" text-anchor="middle">optimizer steps</text>')
    parts.append(
        '<text x="16" y="140" text-anchor="middle" transform="rotate(-90 16 140)">'
        "held-out reward</text>"
    )
    for number, (name, color) in enumerate(COLORS.items()):
        rewards = runs[name]["eval_reward"].items()
        points = " ".join(f"{_place_step(int(at))},{_place_reward(mean)}" for at, mean in rewards)
        y = 180 + 20 * number
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>',
            f'<line x1="500" y1="{y}" x2="530" y2="{y}" stroke="{color}" stroke-width="2.5"/>',
            f'<text x="538" y="{y + 4}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place_step(step: int) -> float:
    return round(LEFT + (RIGHT - LEFT) * step / LAST_STEP, 1)


def _place_reward(reward: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * reward, 1)
