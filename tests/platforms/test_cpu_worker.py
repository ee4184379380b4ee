"""Where vLLM's CPU workers run."""

from rhyme_verl.platforms.cpu_worker import core_of_worker


def test_workers_take_cores_in_turn() -> None:
    cores = {6, 2, 4}
    assert [core_of_worker(cores, worker) for worker in range(5)] == [2, 4, 6, 2, 4]
