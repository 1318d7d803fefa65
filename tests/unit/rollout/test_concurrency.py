"""The number of a cell's episodes follows its servers, between a floor and a ceiling."""

import asyncio

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rollout.concurrency import AdaptiveSlots, EngineLoad
from tests.support.environments import CHECKOUT

QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"
FLOOR, CEILING, GROUP = 32, 256, 8


class SimulatedEngine:
    """Servers that run `capacity` requests at once; each episode has a request for `share` of its
    time, and the others wait. `open_episodes` follow the slots at once, or end one after the other.
    """

    def __init__(self, capacity: int, share: float = 1.0) -> None:
        self.capacity, self.share = capacity, share
        self.open_episodes = 0
        self.slots = AdaptiveSlots(self.read, floor=FLOOR, ceiling=CEILING, increase=GROUP)

    async def read(self) -> EngineLoad | None:
        requests = int(self.open_episodes * self.share)
        used = min(1.0, requests / (self.capacity * 1.05))
        return EngineLoad(max(0, requests - self.capacity), used)

    def run(self, looks: int, *, ends_per_look: int = CEILING) -> list[int]:
        """Return the number of slots at each look."""
        counts = []
        for _ in range(looks):
            least = self.open_episodes - ends_per_look
            self.open_episodes = max(least, self.slots.count)
            counts.append(asyncio.run(self.slots.look(self.open_episodes)))
        return counts


@pytest.mark.parametrize(
    ("capacity", "share", "least", "most"),
    [
        (1000, 1.0, CEILING, CEILING),  # never crowded
        (100, 1.0, 70, 112),  # around what the servers run at once
        (60, 0.5, 80, 136),  # agents that work with tools for half their time
        (8, 1.0, FLOOR, FLOOR),  # too small for the next batch: it gets its episodes all the same
    ],
)
def test_slots_settle_at_what_the_servers_run(
    capacity: int, share: float, least: int, most: int
) -> None:
    engine = SimulatedEngine(capacity, share)
    settled = engine.run(200)[100:]
    assert least <= min(settled)
    assert max(settled) <= most


def test_slots_rise_again_when_replies_become_shorter() -> None:
    engine = SimulatedEngine(50)
    assert max(engine.run(100)[50:]) < 70
    engine.capacity = 1000
    assert engine.run(60)[-1] == CEILING


def test_one_decrease_is_waited_for_before_the_next() -> None:
    engine = SimulatedEngine(1000)
    engine.run(50)
    engine.capacity = 200
    counts = engine.run(20, ends_per_look=2)
    assert counts[:2] == [CEILING] * 2, "a moment's queue changes nothing"
    assert set(counts[2:]) == {CEILING * 3 // 4}


def test_slots_stay_while_they_are_not_used_or_the_load_is_not_known() -> None:
    engine = SimulatedEngine(1000)
    assert [asyncio.run(engine.slots.look(FLOOR - GROUP)) for _ in range(5)] == [FLOOR] * 5

    async def read_nothing() -> None:
        return None

    slots = AdaptiveSlots(read_nothing, floor=300, ceiling=CEILING, increase=GROUP)
    assert [asyncio.run(slots.look(CEILING)) for _ in range(5)] == [CEILING] * 5


@pytest.mark.parametrize(
    ("overrides", "floor"),
    [
        (["inference.max_running_requests=null"], 256),
        (["inference.max_running_requests=null", "inference.cells=3"], 86),
        (["inference.max_running_requests=10", "inference.replicas_per_cell=3"], 30),
        (["inference.max_running_requests=1"], 8),
    ],
)
def test_the_floor_is_what_a_batch_needs_and_the_servers_run(
    overrides: list[str], floor: int
) -> None:
    recipe = load_recipe(QUICKSTART, overrides)
    assert recipe.min_episode_slots_per_cell == floor


def test_slots_that_could_not_adapt_are_refused() -> None:
    overrides = ["rollout.adaptive_concurrency=true", "inference.max_running_requests=64"]
    with pytest.raises(RecipeError) as refused:
        load_recipe(QUICKSTART, overrides)
    (problem,) = refused.value.problems
    assert problem.key == "rollout.adaptive_concurrency"
    load_recipe(QUICKSTART, [*overrides, "rollout.max_concurrent_rollouts=128"])
