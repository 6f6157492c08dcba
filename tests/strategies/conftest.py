"""One Ray cluster for all tests that need no other: starting Ray is most of what they would cost."""

from __future__ import annotations

import os

import pytest

# a node that is gone is noticed after two seconds instead of twelve
_SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(scope="session")
def ray_cluster():
    """Four CPUs, and whatever nodes a test adds; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "_system_config": _SOON})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
