"""How long a node has lacked something for episodes, and when that is too long."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from areal_hpc.errors import ClusterError, NodeResourceShortageError, PersistentNodeShortageError
from areal_hpc.rollout.episodes.episode import EpisodeOutcome
from areal_hpc.wire.ledger import TicketRef

SHORTAGE_PAUSE_S = 15.0
"""Before an episode for which the node lacked something is tried again."""
MAX_SHORTAGE_S = 300.0
"""A node that has lacked something for so long is no longer taken for loaded. Well below
`RestartPolicy.healthy_s`: a driver that got no further than this has made no progress."""
MAX_HELD_OUT_SHORTAGES = 3
"""So often a held-out episode has to last that long: its task scores 0, which may say nothing of
the model that is judged."""


@dataclass(slots=True)
class _Shortage:
    since: float
    held_out_ticket: TicketRef | None = None
    longest_try_s: float = 0.0
    times_found_own_fault: int = 0
    """Times that it was found to be this episode's own."""
    were_others_played: bool = False
    """Once while it was short for `MAX_SHORTAGE_S`: the node had what those needed."""


class ShortageTracker:
    """How long the episodes of a cell have met nothing but shortages, each and all together."""

    def __init__(self) -> None:
        self._shortages: dict[str, _Shortage] = {}
        self._tries_begun_at: dict[str, float] = {}
        self._played_at = float("-inf")

    @contextmanager
    def follow_episode(self, episode: str) -> Iterator[None]:
        """Within the context the episode of this name is tried; after it nothing is known of it."""
        try:
            yield
        finally:
            self._tries_begun_at.pop(episode, None)
            self._shortages.pop(episode, None)

    def record_episode_try_begin(self, episode: str) -> None:
        self._tries_begun_at[episode] = time.monotonic()

    def record_try_end_and_raise_if_stuck(
        self, episode: str, outcome: EpisodeOutcome, *, held_out_ticket: TicketRef | None = None
    ) -> None:
        """Take in how a try of an episode ended, by its name.

        Training waits for the last held-out episodes of an evaluation, so nothing else may be
        tried beside them. That one task alone is short says nothing of the node, and the next
        driver would end for it as well; so it is with those that were short beside others played.

        Raises:
            ClusterError: Neither this one nor another could be played for `MAX_SHORTAGE_S`, and
                none is being played.
            PersistentNodeShortageError: This one could not, and others could, or are not tried.
        """
        now = time.monotonic()
        begun_at = self._tries_begun_at.pop(episode, now)
        if not outcome.is_node_short:
            self._shortages.pop(episode, None)
            self._played_at = now
            return
        shortage = self._shortages.setdefault(episode, _Shortage(now, held_out_ticket))
        shortage.longest_try_s = max(shortage.longest_try_s, now - begun_at)
        if now - shortage.since < MAX_SHORTAGE_S:
            return
        for_long = f"could be played for {MAX_SHORTAGE_S:g} s, the last time because of"
        are_others_played = self._played_at >= shortage.since
        shortage.were_others_played |= are_others_played
        if shortage.were_others_played or self._is_only_task_short(shortage):
            shortage.times_found_own_fault += 1
            if (
                held_out_ticket is not None
                and shortage.times_found_own_fault < MAX_HELD_OUT_SHORTAGES
            ):
                shortage.since = now
                return
            del self._shortages[episode]
            who = (
                "others, but not this one,"
                if are_others_played
                else "nothing else is left, and this one never"
            )
            raise PersistentNodeShortageError(
                f"{who} {for_long}: {outcome.reason}", kind=NodeResourceShortageError.__name__
            )
        if not self._has_try_outlasting_shortages(now):
            raise ClusterError(f"no episode {for_long}: {outcome.reason}")
        shortage.since = now  # what those leave at their ends may be all that it needs

    def _is_only_task_short(self, shortage: _Shortage) -> bool:
        return shortage.held_out_ticket is not None and all(
            one.were_others_played or one.held_out_ticket == shortage.held_out_ticket
            for one in self._shortages.values()
        )

    def _has_try_outlasting_shortages(self, now: float) -> bool:
        """True if a try under way has outlasted all that the node cut short: it has what it needs.

        Episodes may take hours, and those that run must not end with the driver.
        """
        longest_s = max(one.longest_try_s for one in self._shortages.values())
        return any(now - begun_at > longest_s for begun_at in self._tries_begun_at.values())
