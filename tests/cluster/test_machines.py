"""rhyme_verl over a Ray cluster of machines with addresses of their own: what crosses the network, what a cut costs."""

import time
from functools import partial

import pytest

from rhyme_verl.history.client import CALL_SECONDS, DRAIN_SECONDS, STEP_SECONDS
from tests.cluster.programs import KEYS
from tests.helpers.machines import ELSEWHERE, REPOSITORY, SHARED, address, machines, obstacle

OBSTACLE = obstacle()
pytestmark = [pytest.mark.machines, pytest.mark.skipif(OBSTACLE is not None, reason=f"no machines: {OBSTACLE}")]

SLACK_SECONDS = 10.0  # of this machine, beyond the limits of the calls
DELAY_SECONDS, LOSS = 0.05, 0.01  # of a slow network, in each direction
# Ids of answers by index of the prompt, after one and after two steps.
HELD = {str(key >> 32): [(key >> 32) + 100] for key in KEYS}
BOTH = {str(key >> 32): [(key >> 32) + 100, (key >> 32) + 200] for key in KEYS}


def start(made, *options, num_cpus=4, of_others=None, **environment):
    """Start a Ray node on each machine and wait until all are part of the cluster.

    `of_others`: more of the environment on all machines but the first.
    """
    nodes = [made[0].start_node(num_cpus, *options, **environment)]
    assert made[0].call("nodes", 1) == [address(0)]
    others = environment | (of_others or {})
    nodes += [machine.start_node(num_cpus, *options, **others) for machine in list(made)[1:]]
    assert made[0].call("nodes", len(nodes)) == [machine.address for machine in made]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two machines; on the second, rhyme_verl is installed at another path."""
    with machines(2, tmp_path_factory.mktemp("pair"), elsewhere=(1,)) as made:
        start(made)
        yield made


@pytest.fixture
def own_pair(tmp_path):
    """Two machines of one test, which may destroy them."""
    with machines(2, tmp_path) as made:
        start(made)
        yield made


def check_history(made):
    found = made[0].call("share_history")
    assert sorted(found["shards"]) == [address(0), address(1)]
    assert found["held"] == HELD
    return found["identities"]


def check_feed(made):
    endpoint, received = made[0].call("feed")
    assert endpoint.startswith(f"tcp://{address(0)}:")
    assert received == [[key >> 32, [0, 1, 2]] for key in KEYS]


def check_router(made):
    found = made[0].call("route")
    assert found["router"] == address(0)
    assert found["good"] == [[True] * 16] * 2
    assert sum(found["answered"]) == 32 and min(found["answered"]) > 0


def test_history_written_on_one_machine_is_read_on_the_other(pair):
    assert check_history(pair) == [
        {"package": str(REPOSITORY / "rhyme_verl"), "address": address(0)},
        {"package": str(ELSEWHERE / "rhyme_verl"), "address": address(1)},
    ]


def test_a_subscriber_on_another_machine_receives_all_answers_in_order(pair):
    check_feed(pair)


def test_a_router_serves_workers_and_replicas_on_both_machines(pair):
    check_router(pair)


def test_with_a_slow_network_everything_arrives_and_nothing_waits_for_it(own_pair, record_property):
    own_pair.slow(1, DELAY_SECONDS, LOSS)
    check_history(own_pair)
    check_feed(own_pair)
    check_router(own_pair)
    found = own_pair[0].call("call_for", 20)
    assert found["held"] == BOTH
    assert found["longest"]["changes"] > 2 * DELAY_SECONDS, "the network is not slow"
    assert found["longest"]["changes"] < CALL_SECONDS
    assert found["longest"]["finish_step"] < DRAIN_SECONDS + STEP_SECONDS
    assert found["longest"]["stall"] < 1.0
    record_property("longest calls, s", found["longest"])


def test_clocks_that_differ_by_an_hour_change_nothing_and_the_doctor_notes_it(tmp_path):
    path = f"{REPOSITORY / 'tests/helpers/shifted_clock'}:{REPOSITORY}"
    with machines(2, tmp_path) as made:
        start(made, of_others={"PYTHONPATH": path, "SHIFTED_CLOCK_SECONDS": "3600"})
        check_history(made)
        check_feed(made)
        check_router(made)
        notes = [text for verdict, text in made[0].call("doctor", str(SHARED)) if verdict == "note"]
        assert any("clock" in text for text in notes), notes


def test_the_doctor_finds_a_folder_that_the_machines_do_not_share_and_another_installation(pair):
    found = pair[0].call("doctor", str(SHARED), "/tmp/home")
    texts = {verdict: [text for one, text in found if one == verdict] for verdict in ("ok", "note", "fault")}
    assert [text.partition(": ")[0] for text in texts["fault"]] == ["/tmp/home is not the same"] * 2
    (folders,) = texts["note"]
    assert (
        folders.startswith("the folder of rhyme_verl differs: ")
        and f"{ELSEWHERE}/rhyme_verl on {address(1)} " in folders
    )
    assert texts["ok"][0].startswith("2 nodes answer: ")
    assert f"{SHARED} is shared and writable on all nodes" in texts["ok"]
    assert texts["ok"][-1].startswith("each node reaches ports")


@pytest.fixture
def lose(record_property):
    """Return a function that runs `lose_a_shard` (see `lose_a_machine`) and records the longest calls."""
    return partial(lose_a_machine, record_property)


def lose_a_machine(record_property, made, name, leave, returns=False, rejoin=None):
    """Run `lose_a_shard` on machine 0, and let machine 1 leave when its shard holds answers; later it may rejoin."""
    process = made[0].begin("lose_a_shard", name, returns, rejoin is not None)
    wait_for(made.shared / f"{name}.ready", process, made[0])
    leave()
    if rejoin is not None:
        wait_for(made.shared / f"{name}.lost", process, made[0])
        rejoin()
    found = made[0].result(process, "lose_a_shard")
    record_property("longest calls, s", found["longest"])
    record_property("seconds until the shard held what came meanwhile", found["seconds"])
    assert found["was"] == [address(1)]
    assert found["before"] == HELD
    assert found["after"] == BOTH
    assert found["longest"]["changes"] < CALL_SECONDS + SLACK_SECONDS
    assert found["longest"]["finish_step"] < DRAIN_SECONDS + STEP_SECONDS + SLACK_SECONDS
    assert found["longest"]["counters"] < STEP_SECONDS + SLACK_SECONDS
    assert found["longest"]["stall"] < SLACK_SECONDS
    return found


def wait_for(path, process, machine):
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, machine.log("lose_a_shard")[-3000:]
        time.sleep(0.1)


def test_a_machine_that_is_cut_off_for_5_s_keeps_its_shard_and_gets_what_was_written_meanwhile(pair, lose):
    def leave():
        pair.cut(1)
        (pair.shared / "short.gone").touch()
        time.sleep(5)
        pair.join(1)
        (pair.shared / "short.back").touch()

    assert lose(pair, "short", leave, returns=True)["is"] == [address(1)]


def test_a_machine_that_is_cut_off_for_good_leaves_its_shard_to_another_and_may_come_back(own_pair, lose):
    def leave():
        own_pair.cut(1)
        (own_pair.shared / "long.gone").touch()

    # Its node of Ray ends, because it counts as dead, and is started again.
    assert lose(own_pair, "long", leave, rejoin=lambda: own_pair.join(1))["is"] == [address(0)]


def test_a_machine_that_dies_leaves_its_shard_to_another(own_pair, lose):
    def leave():
        own_pair[1].close()
        (own_pair.shared / "dead.gone").touch()

    assert lose(own_pair, "dead", leave)["is"] == [address(0)]
