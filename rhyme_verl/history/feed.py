"""Carries finished answers from the rollout server to the engine processes of its replica, beside the engine's RPC.

One publisher (the server, which knows when an answer is finished), any number of subscribers (one engine process per
data-parallel rank), each with a background thread that files answers into its history index. A decode step never
waits for it. Transport: ZeroMQ PUB/SUB over a Unix socket; a message is a fixed header and the token ids.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import threading
import uuid
from collections.abc import Callable

import numpy as np
import zmq

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<Qq")  # prompt key, rollout step
_POLL_MILLISECONDS = 200

OnAnswer = Callable[[int, np.ndarray, int], None]


class AnswerPublisher:
    """The server's end. Bind it before the engine starts, close it with the server."""

    def __init__(self) -> None:
        self._path = os.path.join(tempfile.gettempdir(), f"rhyme-{uuid.uuid4().hex}.sock")
        self.endpoint = f"ipc://{self._path}"
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)

    def publish(self, prompt_key: int, answer: np.ndarray, step: int) -> None:
        """Send one finished answer: token ids as an int32 array of shape [answer_tokens]."""
        self._socket.send_multipart((_HEADER.pack(prompt_key, step), np.ascontiguousarray(answer, np.int32).data))

    def close(self) -> None:
        self._socket.close()
        if os.path.exists(self._path):
            os.remove(self._path)


class AnswerSubscriber:
    """The engine's end: calls `on_answer(prompt_key, answer, step)` in a daemon thread for each answer."""

    def __init__(self, endpoint: str, on_answer: OnAnswer) -> None:
        self._on_answer = on_answer
        self._stop = threading.Event()
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._thread = threading.Thread(target=self._run, name="rhyme-history-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MILLISECONDS):
                continue
            header, tokens = self._socket.recv_multipart()
            prompt_key, step = _HEADER.unpack(header)
            self._on_answer(prompt_key, np.frombuffer(tokens, dtype=np.int32), step)
        self._socket.close(linger=0)
