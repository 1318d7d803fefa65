"""Slurm's states and reasons, as its commands print them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.slurm.states import STATE_BY_NAME, JobPhase, explain_reason, parse_state
from tests.support.environments import CHECKOUT

WORDS = (CHECKOUT / "tests" / "golden" / "slurm" / "words.txt").read_text().splitlines()
"""Kind, word, and the first and last release of 22.05 to 26.05 whose sources have it."""


def words(kind: str) -> list[str]:
    return [word for found, word, *_ in map(str.split, WORDS) if found == kind]


def test_every_state_of_slurms_sources_is_known() -> None:
    assert sorted(STATE_BY_NAME) == sorted(words("state"))


def test_every_reason_for_waiting_of_slurms_sources_is_explained() -> None:
    never_given = {"BlockFreeAction", "BlockMaxError"}  # of BlueGene, whose code is gone
    unknown = {one for one in words("reason") if explain_reason(one).meaning.endswith(one)}
    assert unknown == never_given


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("RUNNING", "RUNNING"),
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"),
        ("PENDING,REQUEUED", "PENDING"),
        (" node_fail ", "NODE_FAIL"),
    ],
)
def test_what_commands_add_to_a_state_is_understood(printed: str, name: str) -> None:
    assert parse_state(printed).name == name


@pytest.mark.parametrize("printed", ["", "BREWING", "C+", "RE+", "+"])
def test_a_state_that_nobody_knows_is_of_no_known_phase(printed: str) -> None:
    state = parse_state(printed)
    assert state.phase is JobPhase.UNKNOWN
    assert not state.is_over_without_success
    assert "not known" in state.meaning


def test_only_what_is_over_without_success_is_a_failure() -> None:
    failures = {name for name, state in STATE_BY_NAME.items() if state.is_over_without_success}
    assert {"CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "NODE_FAIL"} <= failures
    alive = {name for name, state in STATE_BY_NAME.items() if state.phase is not JobPhase.OVER}
    assert failures.isdisjoint({"COMPLETED", *alive})


@pytest.mark.parametrize(
    ("printed", "begins"),
    [
        ("Resources", "waiting for free nodes"),
        ("(Priority)", "jobs of higher priority are ahead"),
        ("JobHeldUser", "its user holds it"),
        ("launch failed requeued held", "its last start failed on a node"),
        ("launch_failed_requeued_held", "its last start failed on a node"),
        ("ReqNodeNotAvail, UnavailableNodes:n07", "nodes that it needs are down"),
        ("Nodes required for job are DOWN, DRAINED or reserved", "nodes that it needs are down"),
        ("QOSMaxJobsPerUserLimit", "it would exceed a limit"),
        ("QOSMaxCpuPerUserLimit", "it would exceed a limit"),
        ("MaxMemPerLimit", "it asks for more, or less, than"),
        ("QOSMaxWallDurationPerJobLimit", "it asks for more, or less, than"),
        ("AssocMaxNodePerJobLimit", "it asks for more, or less, than"),
        ("QOSMaxGRESPerNode", "it asks for more, or less, than"),
        ("QOSMinGRES", "it asks for more, or less, than"),
        ("QOSGrpGRES", "your group uses all"),
        ("AssocGrpCpuLimit", "your group uses all"),
        ("MoonIsFull", "Slurm's reason is MoonIsFull"),
        ("", "Slurm's reason is not given"),
    ],
)
def test_reasons_are_said_in_words(printed: str, begins: str) -> None:
    assert explain_reason(printed).meaning.startswith(begins)


def test_what_follows_a_reason_is_kept_and_what_needs_somebody_is_marked() -> None:
    assert "UnavailableNodes:n07" in explain_reason("ReqNodeNotAvail, UnavailableNodes:n07").meaning
    needs_action = {
        "JobHeldUser": True,
        "Priority": False,
        "QOSMaxWallDurationPerJobLimit": True,
        "MaxMemPerLimit": True,
        "QOSMaxJobsPerUserLimit": False,
        "AssocGrpNodeLimit": False,
    }
    assert {name: explain_reason(name).needs_action for name in needs_action} == needs_action


@given(st.text(max_size=60))
def test_no_text_is_too_strange_to_be_a_state_or_a_reason(text: str) -> None:
    assert parse_state(text).name
    assert explain_reason(text).meaning
