"""What is exchanged with the accelerator is read when it has come and kept until it is read (strict_device)."""

import pytest
import torch

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import device_buffers
from rhyme_verl.histospec.device_buffers import STEPS_IN_FLIGHT, DeviceBuffers, HostTokens
from tests.helpers import strict_device
from tests.helpers.engine import engine, generate, proposer_of, quickstart_prompts, remember, stats
from tests.helpers.strict_device import GARBAGE, Event, MemoryFault, Stream

pytestmark = pytest.mark.engine

ANSWER = {"temperature": 0.0, "max_tokens": 100}
DRAFT_ALWAYS = {"spec": {"policy": "fixed", "min_acceptance": 0.1}}
OVERWRITTEN = "overwrites one that nobody has waited for"


@pytest.fixture
def device():
    with strict_device.installed() as device:
        yield device


def tokens(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def new_buffers():
    return DeviceBuffers(4, 3, torch.device("cpu"))


def test_tokens_come_when_an_event_behind_them_is_waited_for(device):
    buffers = new_buffers()
    first = buffers.receive(tokens([1, -1], [2, 3]))
    behind = Event()
    behind.record()
    second = buffers.receive(tokens([4], [5]))
    assert not first.have_come()
    assert first._host.flatten().tolist() == [*GARBAGE, *GARBAGE]
    behind.synchronize()
    assert first.have_come() and not second.have_come()
    assert first._host.tolist() == [[1, -1], [2, 3]]
    assert second._host.flatten().tolist() == [*GARBAGE]
    assert second.wait().tolist() == [[4], [5]]
    assert (device.to_host, device.to_device) == (2, 0)


def test_an_event_before_a_copy_says_nothing_about_it(device):
    before = Event()
    before.record()
    received = new_buffers().receive(tokens([1, 2]))
    before.synchronize()
    assert before.query() and not received.have_come()
    assert received._host.tolist() == [[*GARBAGE]]


def test_a_copy_on_a_stream_that_has_not_waited_for_the_tokens_is_garbage(device):
    memory = torch.empty(2, dtype=torch.int32).as_subclass(strict_device.HostMemory)
    stream, event = Stream(), Event()
    for waits in (True, False):
        source = tokens(7, 8)
        with torch.cuda.stream(stream):
            if waits:
                stream.wait_stream(device.computing)
            memory.copy_(source, non_blocking=True)
            event.record()
        event.synchronize()
        assert memory.tolist() == ([7, 8] if waits else [*GARBAGE])


def test_tokens_that_the_device_has_freed_or_overwritten_do_not_come(device):
    memory = torch.empty(2, dtype=torch.int32).as_subclass(strict_device.HostMemory)
    memory.copy_(tokens(7, 8), non_blocking=True)
    Stream().synchronize()
    assert memory.tolist() == [*GARBAGE]
    source = tokens(7, 8)
    memory.copy_(source, non_blocking=True)
    source.zero_()
    Stream().synchronize()
    assert memory.tolist() == [*GARBAGE]


def test_a_ring_of_buffers_holds_the_steps_in_flight_and_no_more():
    with pytest.raises(MemoryFault, match=f"1 times, first: .*{OVERWRITTEN}"):
        with strict_device.installed() as device:
            buffers = new_buffers()
            received = [buffers.receive(tokens([step])) for step in range(STEPS_IN_FLIGHT)]
            assert not device.faults
            assert [one.wait().tolist() for one in received] == [[[step]] for step in range(STEPS_IN_FLIGHT)]
            for step in range(STEPS_IN_FLIGHT + 1):
                buffers.receive(tokens([step]))


def test_drafts_are_kept_until_a_later_step_has_been_waited_for():
    with pytest.raises(MemoryFault, match="1 times, first: the source of a copy to the device was overwritten"):
        with strict_device.installed() as device:
            buffers = new_buffers()
            for draft in (3, 4):
                buffers.drafts_on_host[0] = draft
                buffers.send_drafts(1)
                buffers.receive(tokens([1])).wait()
            assert buffers.drafts[0].tolist() == [4, 4, 4]
            assert device.to_device == 2
            assert not device.faults
            buffers.send_drafts(1)
            buffers.drafts_on_host[0] = 5
            buffers.receive(tokens([1])).wait()


@pytest.fixture(scope="module")
def prompts():
    return quickstart_prompts(8)


@pytest.fixture(scope="module")
def greedy(prompts):
    with engine(SHIPPED_POLICY) as llm:
        return [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)]


def run(prompts, greedy):
    """Draft with a history that holds the answers; returns the counters. The answers are the same in any case."""
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, 8, asynchronous=True) as llm:
        for prompt, answer in zip(prompts, greedy, strict=True):
            remember(llm, prompt, answer)
        for _ in range(2):
            assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy
        return stats(llm)


def test_the_engine_drafts_on_the_strict_device(prompts, greedy):
    counts = run(prompts, greedy)
    assert counts["drafting_off"] == 0
    assert counts["num_accepted_tokens"] > 1.5 * sum(map(len, greedy))
    assert strict_device.device.to_host > strict_device.device.to_device > 20


def test_tokens_that_are_read_before_they_have_come_end_drafting(prompts, greedy, monkeypatch):
    monkeypatch.setattr(HostTokens, "wait", lambda self: self._host.numpy())
    counts = run(prompts, greedy)
    assert counts["drafting_off"] == 1
    assert counts["num_accepted_tokens"] < 0.1 * sum(map(len, greedy))


def test_a_buffer_for_tokens_that_is_used_again_too_soon_is_noticed(prompts, greedy, monkeypatch):
    monkeypatch.setattr(device_buffers, "STEPS_IN_FLIGHT", 1)
    with pytest.raises(MemoryFault, match=OVERWRITTEN):
        run(prompts, greedy)


def test_drafts_that_are_overwritten_too_soon_are_noticed(prompts, greedy, monkeypatch):
    send = DeviceBuffers.send_drafts

    def send_and_clear(self, num_rows):
        send(self, num_rows)
        self.drafts_on_host.fill(0)

    monkeypatch.setattr(DeviceBuffers, "send_drafts", send_and_clear)
    with pytest.raises(MemoryFault, match="source of a copy to the device was overwritten"):
        run(prompts, greedy)


def test_tokens_are_taken_in_before_their_buffer_is_used_again(prompts, greedy, monkeypatch):
    """vLLM has waited for copies of its own by then; that ours have come as well is likely, but not certain."""
    monkeypatch.setattr(Event, "query", lambda self: False)
    with engine(SHIPPED_POLICY, DRAFT_ALWAYS, 8, asynchronous=True) as llm:
        assert [list(output.token_ids) for output in generate(llm, prompts, **ANSWER)] == greedy
        assert len(proposer_of(llm)._sampled) <= STEPS_IN_FLIGHT
        assert stats(llm)["num_generated_tokens"] > 0.9 * sum(map(len, greedy))
