"""Names that clients choose do not fill the proxy's memory."""

import logging

import pytest

from areal_hpc.proxy.metrics import MAX_LOGGED_KINDS, ProxyMetrics


def test_parameters_beyond_the_bound_share_a_counter_and_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    metrics = ProxyMetrics()
    names = [f"hint{i}" for i in range(MAX_LOGGED_KINDS)]
    metrics.count_ignored_parameters("/messages", "client", [*names, "more", "much", "hint0"])
    lines = metrics.render().decode().splitlines()
    counted = [
        line for line in lines if line.startswith("areal_hpc_proxy_ignored_parameters_total")
    ]
    assert len(counted) == MAX_LOGGED_KINDS + 1
    label = 'areal_hpc_proxy_ignored_parameters_total{parameter="%s",route="/messages"} 2.0'
    assert {label % "others", label % "hint0"} <= {*counted}
    assert len(caplog.messages) == MAX_LOGGED_KINDS
    metrics.count_ignored_parameters("/messages", "another", ["hint0"])
    assert len(caplog.messages) == MAX_LOGGED_KINDS
