"""How long a node has lacked something for episodes, and when that is too long."""

import time

from areal_hpc.errors import AgentError, ClusterError, NodeShortageError
from areal_hpc.rollout.episodes.episode import EpisodeOutcome

SHORTAGE_PAUSE_S = 15.0
"""Before an episode for which the node lacked something is tried again."""
MAX_SHORTAGE_S = 600.0
"""A node that has lacked something for so long is no longer taken for loaded."""


class ShortageTracker:
    """How long the episodes of a cell have met nothing but shortages, each and all together."""

    def __init__(self) -> None:
        self._short_since: dict[str, float] = {}
        self._played_at = float("-inf")

    def note_end(self, episode: str, outcome: EpisodeOutcome) -> None:
        """Take in how an episode ended, by its name.

        Raises:
            ClusterError: Neither this one nor another could be played for `MAX_SHORTAGE_S`.
            AgentError: This one could not, and others could: it asks for what the node never has.
        """
        now = time.monotonic()
        if not outcome.is_node_short:
            self._short_since.pop(episode, None)
            self._played_at = now
            return
        since = self._short_since.setdefault(episode, now)
        if now - since < MAX_SHORTAGE_S:
            return
        del self._short_since[episode]
        for_long = f"could be played for {MAX_SHORTAGE_S:g} s, the last time because of"
        if self._played_at < since:
            raise ClusterError(f"no episode {for_long}: {outcome.reason}")
        raise AgentError(
            f"others, but not this one, {for_long}: {outcome.reason}",
            kind=NodeShortageError.__name__,
        )
