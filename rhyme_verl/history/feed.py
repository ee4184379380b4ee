"""Carries answers of earlier rollouts from the rollout server to the engine processes of its replica, beside the
engine's RPC.

One publisher (the server), any number of subscribers (one engine process per data-parallel rank), each with a
background thread that files answers into its history index. A decode step never waits for it. Transport: ZeroMQ
PUB/SUB over a Unix socket; a message is the answers of one prompt, a frame for each array.
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

from rhyme_verl.history.answers import AnswerBatch

logger = logging.getLogger(__name__)

_PROMPT_KEY = struct.Struct("<Q")
_COLUMNS = (
    ("tokens", np.int32),
    ("lengths", np.int32),
    ("steps", np.int64),
    ("rewards", np.float32),
    ("ids", np.uint64),
)
_POLL_MILLISECONDS = 200

OnAnswers = Callable[[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


class AnswerPublisher:
    """The server's end. Bind it before the engine starts, close it with the server."""

    def __init__(self) -> None:
        self._path = os.path.join(tempfile.gettempdir(), f"rhyme-{uuid.uuid4().hex}.sock")
        self.endpoint = f"ipc://{self._path}"
        self._has_failed = False
        self._socket: zmq.Socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)

    def publish(self, batch: AnswerBatch) -> None:
        """Send answers of one prompt. What cannot be sent is not drafted from; that is logged once."""
        columns = (np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in _COLUMNS)
        try:
            self._socket.send_multipart([_PROMPT_KEY.pack(batch.prompt_key), *(column.tobytes() for column in columns)])
        except zmq.ZMQError as error:
            if not self._has_failed:
                logger.error("answers do not reach the engine, which drafts without them: %s", error)
            self._has_failed = True

    def close(self) -> None:
        self._socket.close()
        if os.path.exists(self._path):
            os.remove(self._path)


class AnswerSubscriber:
    """The engine's end: calls `on_answers` in a daemon thread for each message.

    Args:
        endpoint: the publisher's.
        on_answers: gets prompt key, tokens (int32 [total]), lengths (int32 [answers]), steps (int64 [answers]), rewards
            (float32 [answers], NaN: unknown) and ids (uint64 [answers]); the arrays are read-only and its own.
    """

    def __init__(self, endpoint: str, on_answers: OnAnswers) -> None:
        self._on_answers = on_answers
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
            key, *frames = self._socket.recv_multipart()
            columns = [np.frombuffer(frame, dtype) for frame, (_, dtype) in zip(frames, _COLUMNS, strict=True)]
            self._on_answers(_PROMPT_KEY.unpack(key)[0], *columns)
        self._socket.close(linger=0)
