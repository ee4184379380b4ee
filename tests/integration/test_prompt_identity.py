"""A prompt is the same in every epoch, however verl holds it."""

import numpy as np
import pytest

from rhyme_verl.integration.prompt_identity import digest_of

Image = pytest.importorskip("PIL.Image")


def test_a_prompt_is_the_same_prompt_in_every_epoch_however_it_is_held():
    messages = [{"role": "user", "content": "How many?"}]
    assert digest_of(messages) == digest_of(np.array([{"content": "How many?", "role": "user"}], dtype=object))
    assert digest_of(messages) != digest_of([{"role": "user", "content": "How much?"}])


def test_images_are_known_by_what_they_show():
    def asked(colour):
        content = [
            {"type": "image", "image": Image.new("RGB", (4, 4), colour)},
            {"type": "text", "text": "What is it?"},
        ]
        return [{"role": "user", "content": content}]

    assert digest_of(asked("red")) == digest_of(asked("red")) != digest_of(asked("blue"))
