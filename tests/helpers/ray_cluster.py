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
def ray_cluster(num_nodes, num_cpus):
    """Start nodes of `num_cpus` slots each and connect this process to the first; yield their ids, Ray's head first."""
    head = {"num_cpus": num_cpus, "include_dashboard": False}
    cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        others = [_started(lambda: cluster.add_node(num_cpus=num_cpus)) for _ in range(num_nodes - 1)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield [node.node_id for node in (cluster.head_node, *others)]
    finally:
        ray.shutdown()
        cluster.shutdown()
