"""Judgments of measured steps. Pure.

Floors and bounds are assumptions from arithmetic and data sheets: no GPU has confirmed them.
"""

from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.gpu.report import TinyRun, Unmeasured
from areal_hpc.trainer.config import CollectiveRates

MIN_NVLINK_ALLREDUCE_BYTES_PER_S = 100e9
"""Of an all-reduce within a node whose GPUs NVLink joins. An A100 has 300 GB/s a direction, an H100
450; half of them would still be above."""
MIN_PCIE_ALLREDUCE_BYTES_PER_S = 5e9
"""Without NVLink: PCIe 4.0 has 32 GB/s a direction, shared by several GPUs."""
MIN_RDMA_BYTES_PER_S = 5e9
"""Between nodes with RDMA: half of one adapter of 100 Gbit/s."""
MIN_TCP_BYTES_PER_S = 0.5e9
"""Between nodes without: half of 10 Gbit/s."""
MAX_ENGINE_LOGPROB_GAP_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.03}
"""Mean difference between engine and trainer."""


def judge_rates(
    check_name: str, rates: CollectiveRates | Unmeasured, floor_bytes_per_s: float | None, hint: str
) -> CheckResult:
    """Whether collectives are right, and as fast as the links allow; no floor in a rehearsal."""
    if isinstance(rates, Unmeasured):
        return judge_unmeasured(check_name, rates)
    reduced, ring = rates.all_reduce_bytes_per_s / 1e9, rates.ring_bytes_per_s / 1e9
    found = (
        f"{rates.ranks} ranks over {rates.backend}, {rates.size_bytes >> 20} MiB: "
        f"all-reduce {reduced:.3g} GB/s, ring {ring:.3g} GB/s"
    )
    if rates.wrong_elements:
        return fail(
            check_name,
            f"{found}; {rates.wrong_elements} elements of the results are wrong",
            "nvidia-smi -q -d ECC; NCCL_P2P_DISABLE=1 tells whether direct copies are at fault",
        )
    if floor_bytes_per_s is not None and not rates.all_reduce_bytes_per_s >= floor_bytes_per_s:
        return fail(
            check_name, f"{found}; expected at least {floor_bytes_per_s / 1e9:g} GB/s", hint
        )
    return ok(check_name, found)


def judge_run(run: TinyRun | Unmeasured) -> CheckResult:
    """Whether a run goes through, and SGLang agrees with the trainer before and after an update."""
    name = "tiny run"
    if isinstance(run, Unmeasured) and not run.is_failure:
        return warn(name, f"not measured: {run.reason}", run.hint)
    if isinstance(run, Unmeasured):
        return judge_unmeasured(name, run)
    bound = MAX_ENGINE_LOGPROB_GAP_BY_DTYPE[run.dtype]
    gaps = ", ".join(f"{gap:.1e}" for gap in run.mean_gaps)
    found = (
        f"{len(run.mean_gaps)} steps with updates between them; log-probabilities of SGLang "
        f"({run.dtype}) and the trainer differ by {gaps} on average"
    )
    # Written so that what is not a number fails.
    if not all(gap <= bound for gap in run.mean_gaps):
        hint = "another inference.extra_args --attention-backend; attach --json FILE to an issue"
        return fail(name, f"{found}; {bound:g} is rounding", hint)
    if not all(norm > 0 for norm in run.gradient_norms):
        return fail(name, f"{found}; a step had no gradient", "attach --json FILE to an issue")
    return ok(name, found)


def judge_unmeasured(check_name: str, step: Unmeasured) -> CheckResult:
    if not step.is_failure:
        return ok(check_name, f"not measured: {step.reason}")
    return fail(check_name, step.reason, step.hint or "attach --json FILE to an issue")
