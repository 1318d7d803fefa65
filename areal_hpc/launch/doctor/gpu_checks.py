"""Checks of GPU nodes (`doctor --gpu`): judgments of what one examination found."""

from collections.abc import Iterator

from areal_hpc.launch.doctor.checks import CheckResult, warn
from areal_hpc.launch.doctor.gpu.fact_judgments import (
    judge_differences_between_nodes,
    judge_facts,
    prefix_findings_with_host,
)
from areal_hpc.launch.doctor.gpu.node_isolation import judge_isolation
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, GpuReport
from areal_hpc.launch.doctor.gpu.step_judgments import (
    MIN_NVLINK_ALLREDUCE_BYTES_PER_S,
    MIN_PCIE_ALLREDUCE_BYTES_PER_S,
    MIN_RDMA_BYTES_PER_S,
    MIN_TCP_BYTES_PER_S,
    judge_rates,
    judge_run,
)
from areal_hpc.launch.doctor.subject import DoctorSubject

NODE_LINK_HINT = "nvidia-smi topo -m; is P2P disabled (NCCL_P2P_DISABLE, ACS in the BIOS)?"
NETWORK_HINT = "NCCL_DEBUG=INFO says which adapters it takes; cluster.slurm.network names others"


def check_gpu_nodes(doctor_subject: DoctorSubject) -> Iterator[CheckResult]:
    assert doctor_subject.gpu_examination is not None
    plan, report = doctor_subject.gpu_examination.plan, doctor_subject.gpu_examination.report
    if plan.nodes:  # without a job they are this machine, whose isolation has a check of its own
        for facts in report.nodes:
            isolation = [*map(judge_isolation, facts.isolation)]
            yield from prefix_findings_with_host(isolation, facts.host)
    yield from _judge_facts_of_nodes(report, plan)
    yield from _judge_collectives(report)
    yield judge_run(report.run)


def _judge_facts_of_nodes(report: GpuReport, plan: GpuCheckPlan) -> Iterator[CheckResult]:
    nodes = report.nodes
    if report.device == "cpu":
        hosts = ", ".join(one.host for one in nodes)
        found = f"on processors of {hosts}: it says nothing about any GPU"
        yield warn("rehearsal", found, "leave --device cpu out on a node with GPUs")
        return
    for facts in nodes:
        results = list(judge_facts(facts, plan.hca, is_one_of_several=len(nodes) > 1))
        yield from prefix_findings_with_host(results, facts.host) if len(nodes) > 1 else results
    yield from judge_differences_between_nodes(nodes)


def _judge_collectives(report: GpuReport) -> Iterator[CheckResult]:
    nodes, is_rehearsal = report.nodes, report.device == "cpu"
    has_nvlink = nodes[0].has_nvlink
    floor = MIN_NVLINK_ALLREDUCE_BYTES_PER_S if has_nvlink else MIN_PCIE_ALLREDUCE_BYTES_PER_S
    expected = None if is_rehearsal else floor
    yield judge_rates("all-reduce", report.node_rates, expected, NODE_LINK_HINT)
    if report.cluster_rates is not None:
        has_rdma = all(one.rdma_devices and one.has_ibverbs for one in nodes)
        floor = MIN_RDMA_BYTES_PER_S if has_rdma else MIN_TCP_BYTES_PER_S
        expected = None if is_rehearsal else floor
        yield judge_rates(f"{len(nodes)} nodes", report.cluster_rates, expected, NETWORK_HINT)
