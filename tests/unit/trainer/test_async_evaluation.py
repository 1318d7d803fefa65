"""What the evaluation cell is given to judge, and when, while training goes on."""

from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.trainer.loop.live_run import AsyncEvaluationTracker
from areal_hpc.trainer.loop.schedule import EvaluationSetSchedule, Schedule
from areal_hpc.weights.discovery import DiscoveredReplicas, ReplicaKey
from areal_hpc.wire.replicas import ReplicaState, ReplicaView
from areal_hpc.wire.weight_version import WeightVersion

TOTAL = 12
SCHEDULE = Schedule(TOTAL, 1, 0, {"valid": EvaluationSetSchedule(5, 8)})
"""Steps 0, 5, 10 and 12 are judged."""
READY = ""


def cell(*versions: str) -> DiscoveredReplicas:
    """Its replicas, by the versions that they serve."""
    return [found(at, "serving" if one else "ready", one) for at, one in enumerate(versions)]


def found(index: int, state: ReplicaState, version: str = "") -> tuple[ReplicaKey, ReplicaView]:
    key = ReplicaKey("evaluation", index, 1, 1, "http://relay", 0.0)
    return key, ReplicaView(index, 1, state, "http://replica", version)


def at(step: int) -> WeightVersion:
    return WeightVersion(1, step)


def indices(keys: list[ReplicaKey]) -> list[int]:
    return [key.index for key in keys]


def judging(step: int, judged_step: int = -1) -> AsyncEvaluationTracker:
    beside = AsyncEvaluationTracker(SCHEDULE, judged_step)
    beside.begin_and_list_skipped_steps(at(step))
    return beside


def test_no_episode_is_granted_while_a_replica_serves_other_weights() -> None:
    beside = AsyncEvaluationTracker(SCHEDULE, judged_step=0)
    assert not beside.may_grant_episodes(cell("1.0", "1.5"), at(5))
    assert indices(beside.list_replicas_to_update_now(cell("1.0", "1.5"), at(5))) == [0]
    assert beside.may_grant_episodes(cell("1.5", "1.5"), at(5))
    assert beside.may_grant_episodes(cell("1.5", READY), at(5)), (
        "one that serves nothing plays nothing"
    )


def test_a_cell_whose_replicas_are_not_up_begins_nothing() -> None:
    beside = AsyncEvaluationTracker(SCHEDULE, judged_step=-1)
    for replicas in ([], [found(0, "starting")], [found(0, "failed")]):
        assert not beside.may_grant_episodes(replicas, at(0))
        assert beside.list_replicas_to_update_now(replicas, at(0)) == []
    assert beside.has_unjudged_up_to(0)


def test_a_replica_that_restarts_beside_others_waits_for_the_next_version() -> None:
    beside = judging(5)
    assert indices(beside.list_replicas_to_update_now(cell("1.5", READY), at(5))) == [1]
    assert beside.list_replicas_to_update_now(cell("1.5", READY), at(6)) == []
    assert not beside.may_grant_episodes(cell("1.5", READY), at(6))


def test_an_evaluation_whose_weights_are_lost_is_given_up_for_the_present_ones() -> None:
    beside = judging(5, judged_step=0)
    assert beside.list_replicas_to_update_now([], at(7)) == [], "a silent cell may still have them"
    assert not beside.may_grant_episodes([], at(7))
    assert not beside.may_grant_episodes([found(0, "starting")], at(7))
    assert beside.may_grant_episodes(cell(READY), at(7))
    assert beside.begin_and_list_skipped_steps(at(7)) == [5]
    assert beside.under_way == at(7)
    assert indices(beside.list_replicas_to_update_now(cell(READY), at(7))) == [0]
    assert not beside.may_grant_episodes(cell(READY), at(7)), "it has begun"


def test_of_several_that_became_due_the_newest_weights_are_judged_and_the_others_are_named() -> (
    None
):
    beside = judging(0)
    beside.mark_judged()
    assert beside.may_grant_episodes(cell("1.11"), at(11))
    assert beside.begin_and_list_skipped_steps(at(11)) == [5, 10]
    beside.mark_judged()
    assert beside.has_unjudged_up_to(TOTAL), "the last step is never left out"
    assert not beside.has_unjudged_up_to(TOTAL - 1)


def test_a_trainer_that_resumes_owes_what_its_metrics_lack() -> None:
    assert not AsyncEvaluationTracker(SCHEDULE, judged_step=5).has_unjudged_up_to(9)
    assert AsyncEvaluationTracker(SCHEDULE, judged_step=4).has_unjudged_up_to(9)
    assert AsyncEvaluationTracker(SCHEDULE, judged_step=-1).begin_and_list_skipped_steps(at(9)) == [
        0,
        5,
    ]


@given(st.lists(st.sampled_from(["train", "give", "lose", "finish"]), max_size=60))
def test_episodes_are_only_ever_played_on_the_version_of_their_evaluation(moves: list[str]) -> None:
    """A cell of one replica: whenever it serves, what is under way is what it serves."""
    beside, step, held, judged = AsyncEvaluationTracker(SCHEDULE, -1), 0, READY, list[int]()
    for move in [*moves, *["train"] * TOTAL, *["give", "finish"] * 3]:
        if move == "train" and step < TOTAL:
            step += 1
        if move == "lose":
            held = READY
        if move == "give" and beside.list_replicas_to_update_now(cell(held), at(step)):
            assert held != str(beside.under_way), "weights under evaluation were replaced"
            held = str(at(step))
        if beside.may_grant_episodes(cell(held), at(step)):
            beside.begin_and_list_skipped_steps(at(step))
        if move == "finish" and beside.under_way is not None and held:
            assert held == str(beside.under_way)
            judged.append(beside.under_way.step)
            beside.mark_judged()
    assert judged == sorted(set(judged)), "later labels are newer weights"
    assert judged[-1] == TOTAL
    assert not beside.has_unjudged_up_to(TOTAL)
