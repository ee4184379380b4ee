"""What the dispatch module makes of verl's own objects; the whole of it runs in test_end_to_end."""

import numpy as np
import pytest
from PIL import Image
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

from rhyme_verl.dispatch import _digest, _up_to_last_generated

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("mask", "known"),
    [([1, 1, 1], [5, 6, 7]), ([1, 0, 1], [5, 6, 7]), ([1, 1, 0], [5, 6]), ([0, 0, 0], [])],
)
def test_a_reward_is_for_the_text_up_to_the_policys_last_word(mask, known):
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[5, 6, 7], response_mask=mask, num_turns=2, metrics=AgentLoopMetrics()
    )
    assert _up_to_last_generated(output).tolist() == known


def test_a_prompt_is_the_same_prompt_in_every_epoch_however_it_is_held():
    messages = [{"role": "user", "content": "How many?"}]
    assert _digest(messages) == _digest(np.array([{"content": "How many?", "role": "user"}], dtype=object))
    assert _digest(messages) != _digest([{"role": "user", "content": "How much?"}])


def test_images_are_known_by_what_they_show():
    def asked(colour):
        content = [
            {"type": "image", "image": Image.new("RGB", (4, 4), colour)},
            {"type": "text", "text": "What is it?"},
        ]
        return [{"role": "user", "content": content}]

    assert _digest(asked("red")) == _digest(asked("red")) != _digest(asked("blue"))
