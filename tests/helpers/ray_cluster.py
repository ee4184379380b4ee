"""A Ray cluster of several nodes on this machine, for tests of what runs on which node."""

from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

ATTEMPTS = 3  # a node may not come up in time beside other tests


def _started(start):
    for attempt in range(ATTEMPTS):
        try:
            return start()
        except Exception as error:  # Ray raises nothing more specific
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS - 1:
                raise


@contextmanager
def ray_nodes(num_nodes, num_cpus, **last):
    """Start nodes of `num_cpus` slots each, the last one with further arguments; yield the cluster's address and the
    nodes' ids, Ray's head first.
    """
    head = {"num_cpus": num_cpus, "include_dashboard": False}
    cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        nodes = [cluster.head_node]
        for further in [{}] * (num_nodes - 2) + [last]:
            nodes.append(_started(lambda further=further: cluster.add_node(num_cpus=num_cpus, **further)))
        yield cluster.address, [node.node_id for node in nodes]
    finally:
        cluster.shutdown()


@contextmanager
def ray_cluster(num_nodes, num_cpus):
    """Start nodes and connect this process to the first; yield their ids, Ray's head first."""
    with ray_nodes(num_nodes, num_cpus) as (address, nodes):
        try:
            ray.init(address=address, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
