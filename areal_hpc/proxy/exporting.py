"""A session -> what `/export_trajectories` answers."""

from __future__ import annotations

from areal_hpc.errors import RewardRefused
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.session.credit import assign_credit, retry_orphans
from areal_hpc.session.export import batch_of_one, plan_everything
from areal_hpc.session.tree import InteractionTree
from areal_hpc.wire.proxy import ExportedInteraction, ExportRequest


def exported_interactions(
    tree: InteractionTree, request: ExportRequest
) -> dict[str, ExportedInteraction]:
    """Rows by the id of the interaction they end with.

    Raises:
        RequestRefused: The discount is no finite number.
    """
    orphans = retry_orphans(tree) if request.drop_retry_orphans else frozenset()
    try:
        earned = assign_credit(tree, request.discount, request.credit, orphans)
    except RewardRefused as error:
        raise RequestRefused(400, str(error), key="discount") from error
    rewards = {name: earnings.total for name, earnings in earned.items()}
    rows = {}
    for plan in plan_everything(tree, request.style, rewards):
        name = plan.path[-1].interaction_id
        batch = {key: array.tolist() for key, array in batch_of_one(plan).items()}
        rows[name] = ExportedInteraction(name, rewards[name], batch)
    return rows
