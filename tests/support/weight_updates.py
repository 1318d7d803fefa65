"""Checks of what came of an update of weights."""

from areal_hpc.weights.report import UpdateReport


def raise_if_failed(report: UpdateReport) -> None:
    """Raise the first of the errors that left replicas out, if any did."""
    for error in report.failed.values():
        raise error
