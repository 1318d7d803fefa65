"""Judgments of measured steps. Pure.

Floors and bounds are assumptions from arithmetic and data sheets: no GPU has confirmed them.
"""

from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.gpu.report import Unmeasured
from areal_hpc.trainer.self_test.messages import (
    CollectiveRates,
    EngineComparison,
    StepComparison,
)

MIN_NVLINK_ALLREDUCE_BYTES_PER_S = 100e9
"""Of an all-reduce within a node whose GPUs NVLink joins. An A100 has 300 GB/s a direction, an H100
450; half of them would still be above."""
MIN_PCIE_ALLREDUCE_BYTES_PER_S = 5e9
"""Without NVLink: PCIe 4.0 has 32 GB/s a direction, shared by several GPUs."""
MIN_RDMA_BYTES_PER_S = 5e9
"""Between nodes with RDMA: half of one adapter of 100 Gbit/s."""
MIN_TCP_BYTES_PER_S = 0.5e9
"""Between nodes without: half of 10 Gbit/s."""
MAX_EXACT_LOGPROB_GAP = 1e-4
"""Float32 on two devices: sums in another order."""
MAX_EXACT_GRADIENT_NORM_GAP = 1e-4
ROUNDING_MARGIN = 2.0
"""In 16 bits the trainer may be so many times as far from float32 as transformers is."""
MAX_ENGINE_LOGPROB_GAP_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.03}
"""Mean difference between engine and trainer."""
MIN_CHANGE_OVER_GAP = 3.0
"""A step must change log-probabilities by so many gaps, or a missed update would not be noticed."""


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


def judge_step(step: StepComparison | Unmeasured) -> CheckResult:
    """Whether the trainer computes here what transformers computes on the CPU."""
    name = "trainer step"
    if isinstance(step, Unmeasured):
        return judge_unmeasured(name, step)
    logprob_bound = max(MAX_EXACT_LOGPROB_GAP, ROUNDING_MARGIN * step.reference_logprob_gap)
    norm_bound = max(
        MAX_EXACT_GRADIENT_NORM_GAP, ROUNDING_MARGIN * step.reference_gradient_norm_gap
    )
    found = (
        f"{step.dtype}, {step.tokens} tokens: log-probabilities off by {step.logprob_gap:.1e}, "
        f"the gradient's norm by {step.gradient_norm_gap:.1e}"
    )
    hint = "attach --json FILE to an issue: this should never be"
    # Written so that what is not a number fails.
    if not (step.logprob_gap <= logprob_bound and step.gradient_norm_gap <= norm_bound):
        return fail(
            name, f"{found}; at most {logprob_bound:.1e} and {norm_bound:.1e} are rounding", hint
        )
    if not step.rise > 0:
        return fail(name, f"{found}; but the step made what was rewarded no likelier", hint)
    return ok(name, found)


def judge_engine(engine: EngineComparison | Unmeasured) -> list[CheckResult]:
    """Whether SGLang starts, agrees with the trainer, and takes new weights."""
    if isinstance(engine, Unmeasured):
        return [judge_unmeasured("SGLang", engine)]
    bound = MAX_ENGINE_LOGPROB_GAP_BY_DTYPE[engine.dtype]
    results = [ok("SGLang", f"ready after {engine.start_s:.0f} s with the recipe's flags")]
    found = f"{engine.tokens} tokens, {engine.dtype}: {engine.mean_gap:.1e} on average"
    hint = "another inference.extra_args --attention-backend; attach --json FILE to an issue"
    if engine.mean_gap <= bound:
        results.append(ok("engine, trainer", f"{found}, {engine.max_gap:.1e} at most"))
    else:
        results.append(fail("engine, trainer", f"{found}; {bound:g} is rounding", hint))
    return [*results, judge_update(engine)]


def judge_update(engine: EngineComparison) -> CheckResult:
    """Whether the replica has the weights that were sent, by checksum and by what it samples."""
    name, bound = "weight update", MAX_ENGINE_LOGPROB_GAP_BY_DTYPE[engine.dtype]
    if engine.update_error:
        hint = "the lines of NCCL that NCCL_DEBUG=INFO writes; docs/gpus.md has known causes"
        return fail(name, engine.update_error, hint)
    seconds = sum(engine.update_s.values())
    found = (
        f"{engine.sent_bytes / 1e6:.1f} MB by {engine.transport} in {seconds:.2f} s, checksum "
        f"equal; then {engine.updated_mean_gap:.1e} on average"
    )
    if not engine.updated_mean_gap <= bound:
        hint = "attach --json FILE to an issue: a checksum should have noticed"
        return fail(name, f"{found}; {bound:g} is rounding", hint)
    if engine.change < MIN_CHANGE_OVER_GAP * engine.updated_mean_gap:
        change = f"the step changed only {engine.change:.1e}, so this proves little"
        return warn(name, f"{found}; {change}", "nothing: the checksum was equal")
    if engine.transport == "disk":
        return warn(
            name,
            f"{found}; the broadcast was not tried: NCCL takes no GPU twice",
            "show it one GPU more than the replica's, or use weights.transport=disk",
        )
    return ok(name, found)


def judge_unmeasured(check_name: str, step: Unmeasured) -> CheckResult:
    if not step.is_failure:
        return ok(check_name, f"not measured: {step.reason}")
    return fail(check_name, step.reason, step.hint or "attach --json FILE to an issue")
