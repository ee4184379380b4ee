"""Where rhyme_verl's actors run in a Ray cluster of three nodes whose CPU slots verl has reserved, all of them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rhyme_verl
from rhyme_verl.config import HistoryConfig
from rhyme_verl.history.client import HistoryClient
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.integration.preflight import ROUTER_FILE
from rhyme_verl.telemetry.step_metrics import ACTOR as METRICS
from rhyme_verl.telemetry.step_metrics import MetricsReporter
from tests.helpers.ray_cluster import ray_cluster
from tests.helpers.waiting import wait_for

NODES, CPUS = 3, 2
VOCABULARY = Vocabulary(size=1000, fingerprint="0123456789abcdef")


@pytest.fixture(scope="module")
def nodes():
    with ray_cluster(NODES, CPUS) as ids:
        reserved = placement_group([{"CPU": CPUS}] * NODES, strategy="STRICT_SPREAD")
        ray.get(reserved.ready())
        wait_for(lambda: ray.available_resources().get("CPU", 0) == 0)  # what the head knows is a moment old
        yield ids


def node_of(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()), timeout=300)


@ray.remote(num_cpus=0)
class TaskRunner:
    """Creates the router as verl's trainer does."""

    def create(self, path):
        from verl.workers.rollout.router import get_router_handle

        self._router = get_router_handle({}, path)
        return self._router


@pytest.mark.slow
def test_the_router_runs_where_verls_trainer_runs(nodes):
    path = str(Path(rhyme_verl.__file__).parent / ROUTER_FILE)
    for node in nodes:
        pinned = TaskRunner.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        assert node_of(ray.get(pinned.create.remote(path), timeout=300)) == node


@ray.remote(num_cpus=0)
class Server:
    def start(self):
        self._metrics = MetricsReporter()
        self._metrics.start()


@pytest.mark.slow
def test_the_metrics_are_collected_where_the_first_server_runs(nodes):
    for node in nodes:
        server = Server.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        ray.get(server.start.remote(), timeout=300)
        assert node_of(ray.get_actor(METRICS)) == node
        ray.kill(server)
        wait_for(lambda: METRICS not in ray.util.list_named_actors())


@pytest.mark.parametrize("shards", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_the_shards_of_the_history_are_spread_evenly_and_the_head_comes_last(nodes, shards):
    client = HistoryClient(HistoryConfig(shards=shards), VOCABULARY)

    async def fill():
        for index in range(shards):
            client.add(index << 32, 1, 1, np.arange(3, dtype=np.int32))
        await client.drain(60)
        return (await client.counters()).answers

    assert asyncio.run(fill()) == shards
    name = f"rhyme_history_{VOCABULARY.fingerprint}_{VOCABULARY.size}_{{}}_of_{shards}"
    found = [node_of(ray.get_actor(name.format(index))) for index in range(shards)]
    head, *others = nodes
    assert sorted(found) == {2: sorted(others), 6: sorted([head, head, *others, *others])}[shards]
