"""Patience with a node: what waits, what ends the driver, and what ends one ticket."""

import pytest

from areal_hpc.errors import AgentError, ClusterError
from areal_hpc.rollout.episodes import shortages
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.rollout.episodes.shortages import ShortageTracker

SHORT = EpisodeOutcome("interrupted", "", reason="no process left", is_node_short=True)
GOOD = EpisodeOutcome("ok", "session", reward=1.0)


def test_a_node_that_lacks_something_for_all_episodes_is_given_up_and_for_one_its_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patience = ShortageTracker()
    for name, outcome in (("a", SHORT), ("b", GOOD), ("c", SHORT), ("a", SHORT)):
        patience.note_end(name, outcome)
    monkeypatch.setattr(shortages, "MAX_SHORTAGE_S", 0.0)
    with pytest.raises(AgentError, match=r"others, but not this one, could .* no process left"):
        patience.note_end("a", SHORT)
    with pytest.raises(ClusterError, match=r"no episode could be played .* no process left"):
        patience.note_end("c", SHORT)
    patience.note_end("c", GOOD)
