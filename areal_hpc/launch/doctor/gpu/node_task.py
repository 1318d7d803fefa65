"""One node of an examination by a Slurm job: `python -m ...node_task ORDER`, a task on each node.

Nodes meet in the order's folder, on shared storage: each leaves its facts there, ranks find one
another, and the first node leaves the report.
"""

import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node.topology import TaskPosition, detect_task_position, find_own_address
from areal_hpc.jobs.processes.process_setup import set_up_logging
from areal_hpc.launch.doctor.gpu.collectives import (
    RankPlace,
    list_rank_gpus,
    measure_collectives,
)
from areal_hpc.launch.doctor.gpu.examination import (
    NOT_MEASURED_WITHOUT_GPU,
    measure_or_explain_failure,
    measure_steps_on_node,
)
from areal_hpc.launch.doctor.gpu.node_facts import gather_node_facts
from areal_hpc.launch.doctor.gpu.report import NodeFacts, Unmeasured
from areal_hpc.launch.doctor.gpu.slurm_job import (
    NodeTaskRequest,
    get_node_failure_path,
    get_report_path,
)
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.trainer.config import CollectiveRates

FACTS_TIMEOUT_S = 300.0
"""For all nodes to import torch, and for their files to be seen here."""
POLL_S = 0.5


def main() -> None:
    """Examine this node, and the network to the others; the first one reports."""
    set_up_logging()
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=NodeTaskRequest)
    task = detect_task_position(os.environ)
    facts = gather_node_facts(order.plan)
    write_atomic(_get_facts_path(order, task.rank), msgspec.json.encode(facts))
    all_facts = _await_facts(order, task.num_tasks)
    rates = measure_or_explain_failure(lambda: _measure_network(order, task, all_facts))
    if not task.is_first:
        if isinstance(rates, Unmeasured) and rates.is_failure:
            trouble = f"{socket.gethostname()}: {rates.reason}"
            write_atomic(get_node_failure_path(Path(order.folder), task.rank), trouble.encode())
        return
    report = measure_steps_on_node(order.plan, facts, Path(order.folder, "first_node"), print)
    report = msgspec.structs.replace(
        report, nodes=tuple(all_facts), cluster_rates=rates if task.num_tasks > 1 else None
    )
    write_atomic(get_report_path(Path(order.folder)), msgspec.json.encode(report))


def _measure_network(
    node_request: NodeTaskRequest, task: TaskPosition, all_facts: list[NodeFacts]
) -> CollectiveRates | Unmeasured:
    gpus = [list_rank_gpus(node_request.plan, facts.visible_gpus) for facts in all_facts]
    if not all(gpus):
        return NOT_MEASURED_WITHOUT_GPU
    place = RankPlace(
        node=task.rank,
        first_rank=sum(map(len, gpus[: task.rank])),
        world_size=sum(map(len, gpus)),
        node_address=find_own_address(node_request.plan.interface, os.environ),
    )
    return measure_collectives(
        node_request.plan, gpus[task.rank], Path(node_request.folder, "network"), place
    )


def _get_facts_path(node_request: NodeTaskRequest, node: int) -> Path:
    return Path(node_request.folder, f"facts.{node}.json")


def _await_facts(node_request: NodeTaskRequest, nodes: int) -> list[NodeFacts]:
    """Facts of every node, in their order.

    Raises:
        ClusterError: Some did not come in time.
    """
    give_up_at = time.monotonic() + FACTS_TIMEOUT_S
    paths = [_get_facts_path(node_request, node) for node in range(nodes)]
    while missing := [path for path in paths if not path.exists()]:
        if time.monotonic() > give_up_at:
            raise ClusterError(
                f"{len(missing)} of {nodes} nodes left no facts in {node_request.folder} within "
                f"{FACTS_TIMEOUT_S:.0f} s"
            )
        time.sleep(POLL_S)
    return [msgspec.json.decode(path.read_bytes(), type=NodeFacts) for path in paths]


if __name__ == "__main__":
    main()
