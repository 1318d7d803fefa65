from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.recipe.sections.objective import ObjectiveConfig
from areal_hpc.trainer.batch.batch_metrics import summarize_tokens
from areal_hpc.trainer.batch.packing import Channel
from areal_hpc.trainer.batch.training_rows import (
    build_rows,
    find_observed_tokens,
    list_versions_of_current_weights,
    select_sound_rows,
)
from areal_hpc.wire.agent_reward import MAX_REWARD
from areal_hpc.wire.ledger import NO_VERSION, BatchManifest, SealedTicket, TicketRef
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import TrajectoryRow
from areal_hpc.wire.weight_version import GenerationFork, WeightVersion
from tests.support.sample_episodes import MadeUpTurn, build_batch
from tests.support.sample_trajectories import plain_row

NOW = WeightVersion(1, 9)
FORKS = [GenerationFork(1, 0)]
STRETCHES = st.lists(
    st.tuples(st.sampled_from([None, 3, 7, 9]), st.integers(1, 5)), min_size=1, max_size=6
)
"""Steps of the weights that sampled tokens, None for no sampling, and numbers of tokens."""


def row(
    episode: int, stretches: list[tuple[int | None, int]], reward: float = 1.0
) -> TrajectoryRow:
    steps = [step for step, tokens in stretches for _ in range(tokens)]
    mask = [step is not None for step in steps]
    packed = [-1 if step is None else WeightVersion(1, step).packed for step in steps]
    return plain_row(mask, episode=episode, reward=reward, versions=packed)


@given(st.lists(STRETCHES, min_size=1, max_size=5))
def test_a_batch_is_described_as_its_tokens_say(rows: list[list[tuple[int | None, int]]]) -> None:
    rows[0].append((3, 1))  # a batch has at least one sampled token
    summary = summarize_tokens([row(i, parts) for i, parts in enumerate(rows)], NOW, FORKS)
    steps = [[step for step, tokens in parts for _ in range(tokens) if step] for parts in rows]
    ages = [9 - step for part in steps for step in part]
    assert summary["tokens/sampled"] == len(ages)
    assert summary["staleness/max"] == max(ages)
    np.testing.assert_allclose(summary["staleness/mean"], np.mean(ages))
    assert summary["staleness/mixed_version_rows"] == sum(len(set(part)) > 1 for part in steps)


def test_a_log_linear_proximal_policy_needs_the_age_of_every_token() -> None:
    rows = [row(0, [(None, 1), (3, 2), (9, 1), (3, 1)])]
    (built,) = build_rows(rows, NOW, FORKS, ObjectiveConfig(proximal="log_linear"))
    assert built.channels[Channel.STALENESS].tolist() == [0, 6, 6, 0, 6]


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_a_token_between_replies_is_observed_once_however_rows_are_packed(style: Any) -> None:
    turns = [MadeUpTurn(9, 0.0), MadeUpTurn(0, 0.0), MadeUpTurn(1, 1.0)]
    rows = build_batch([[turns]], ExportSettings(style))
    observed = [row.input_ids_T[find_observed_tokens(row)] for row in rows]
    assert sorted(np.concatenate(observed).tolist()) == [201, 202], "prompts but the first"


def test_a_restart_renames_the_weights_of_the_checkpoint_alone() -> None:
    forks = [GenerationFork(1, 0), GenerationFork(2, 4), GenerationFork(3, 9)]
    renamed = [WeightVersion(1, 4), WeightVersion(2, 4)]
    assert list_versions_of_current_weights(WeightVersion(2, 4), forks) == renamed
    # 1.5 was trained after the checkpoint and lost: 2.5 are other weights of the same step.
    assert list_versions_of_current_weights(WeightVersion(2, 5), forks) == [WeightVersion(2, 5)]
    renamed = [WeightVersion(2, 9), WeightVersion(3, 9)]
    assert list_versions_of_current_weights(WeightVersion(3, 9), forks) == renamed


def one_ticket_each(rewards: list[list[float]]) -> tuple[list[list[TrajectoryRow]], BatchManifest]:
    """Make a ticket for each list of rewards, with a row for each reward."""
    rows, tickets, first = [], [], 0
    for number, ticket_rewards in enumerate(rewards):
        places = [*range(first, first + len(ticket_rewards))]
        rows.append([row(index, [(None, 1), (9, 2)], reward=0.0) for index in places])
        ref = TicketRef(10 + number, 1)
        tickets.append(SealedTicket(ref, "cell-0-000000.h5", places, ticket_rewards, NO_VERSION))
        first += len(ticket_rewards)
    return rows, BatchManifest(5, 1, tickets)


def test_a_ticket_goes_whole_for_a_row_or_a_reward_that_cannot_be_trained_on() -> None:
    batch, manifest = one_ticket_each([[1.0, 0.0], [0.5, 10 * MAX_REWARD], [0.0, 1.0]])
    batch[0][1].logprobs_T[2] = np.nan
    sound, left_out = select_sound_rows(batch, manifest, vocab_size=3)
    assert [(row.episode, row.reward) for row in sound] == [(4, 0.0), (5, 1.0)]
    assert [(part.step, part.tickets) for part in left_out] == [(5, [10]), (5, [11])]
    assert left_out[0].reason.startswith("cell-0-000000.h5 row 1: expected finite log-prob")
    assert left_out[1].reason.startswith("cell-0-000000.h5 row 3: expected a finite 32-bit float")


def test_a_batch_of_which_nothing_is_left_can_be_described() -> None:
    assert build_rows([], NOW, FORKS, ObjectiveConfig()) == []
    assert {*summarize_tokens([], NOW, FORKS).values()} == {0}
    summary = summarize_tokens([row(0, [(None, 3)], reward=0.5)], NOW, FORKS)
    assert (summary["tokens/sampled"], summary["staleness/mean"]) == (0, 0.0)
