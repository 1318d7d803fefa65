"""Rewards of another function for a run's episodes: `rewards/<module>:<function>.jsonl`.

A line is one episode of a batch; of several lines the last one counts. Manifests are not changed.
"""

from collections.abc import Iterable

import msgspec

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import BatchManifest


class RejudgedEpisode(msgspec.Struct, frozen=True, omit_defaults=True):
    step: int
    ticket_id: int
    episode: int
    session_id: str
    shard: str
    rows: list[int]
    """Row numbers in the shard."""
    old_reward: float
    """Reward that the episode was trained with."""
    reward: float | None = None
    """New reward; None if the function failed, or could not be called."""
    error: str = ""


def read_rejudged_episodes(
    paths: RunPaths, function: str
) -> dict[tuple[str, int], RejudgedEpisode]:
    """Read the episodes with a new reward, by their shard and first row."""
    episodes = read_readable_records(paths.rejudged_rewards(function), RejudgedEpisode)
    return {
        (episode.shard, episode.rows[0]): episode
        for episode in episodes
        if episode.reward is not None
    }


def require_rejudged_episodes(paths: RunPaths, function: str) -> list[RejudgedEpisode]:
    """Read the episodes with a new reward; RecipeError without any."""
    if episodes := read_rejudged_episodes(paths, function):
        return [*episodes.values()]
    known = sorted(path.stem for path in paths.rejudged_rewards(function).parent.glob("*.jsonl"))
    raise RecipeError(
        f"the run has no rewards of {function}; it has those of: {', '.join(known) or 'none'}",
        key="--rewards",
        hint="make them with areal-hpc rejudge RUN --reward module:function",
    )


def replace_rewards(manifest: BatchManifest, episodes: Iterable[RejudgedEpisode]) -> BatchManifest:
    """Return the batch with the episodes' new rewards; other rows keep theirs."""
    new = {(each.shard, row): each.reward for each in episodes for row in each.rows}
    tickets = []
    for ticket in manifest.tickets:
        recorded = zip(ticket.rows, ticket.rewards, strict=True)
        rewards = [new.get((ticket.shard, row), reward) for row, reward in recorded]
        tickets.append(msgspec.structs.replace(ticket, rewards=rewards))
    return msgspec.structs.replace(manifest, tickets=tickets)
