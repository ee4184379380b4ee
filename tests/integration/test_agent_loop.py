"""What the agent-loop manager makes of verl's own objects; the whole of it runs in tests/jobs."""

import numpy as np
import pytest
from PIL import Image

from rhyme_verl.integration.agent_loop import _digest

pytestmark = pytest.mark.engine


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
