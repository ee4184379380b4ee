"""Sends earlier answers from the rollout server to the engine processes of its replica, outside the engine's RPC.

There is one publisher (the server) and one subscriber per engine process (per data-parallel rank). A subscriber's
background thread adds answers to its history index; an engine step never waits for it. The transport is ZeroMQ XPUB/SUB
over a Unix socket or, for engines on other nodes, over encrypted TCP, which requires the publisher's key. A message
holds the answers of one prompt, with one frame per array. A subscriber's first message is a greeting, which proves at
the start that the connection works.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import tempfile
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Optional, TypeVar

import numpy as np
import zmq

from rhyme_verl.history.answers import AnswerBatch
from rhyme_verl.telemetry.logs import LogOnce

logger = logging.getLogger(__name__)

_PROMPT_KEY = struct.Struct("<Q")
_COLUMNS = (
    ("tokens", np.int32),
    ("lengths", np.int32),
    ("steps", np.int64),
    ("ids", np.uint64),
)
_GREETING = b"rhyme"
_POLL_MILLISECONDS = 200
_GREETING_SECONDS = 30.0
_ACCEPT_SECONDS = 0.01

OnAnswers = Callable[[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
T = TypeVar("T")


class FeedError(RuntimeError):
    """The publisher cannot be reached; the message names its endpoint."""


@dataclass(frozen=True)
class FeedAddress:
    """Where answers are published.

    Attributes:
        endpoint: ZeroMQ endpoint, `ipc://...` or `tcp://...`.
        key: the publisher's public key in Z85, required over TCP; None over a Unix socket.
    """

    endpoint: str
    key: Optional[str] = None  # noqa: UP045


class AnswerPublisher:
    """The server's end. Create it before the engine starts and close it with the server.

    Args:
        host: IP address at which other nodes reach this one; None: all subscribers are on this node.
    """

    def __init__(self, host: str | None = None) -> None:
        self._path: str | None = None
        self._log_once = LogOnce(logger)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_WELCOME_MSG, _GREETING)
        if host is None:
            self._path = _socket_path()
            self._socket.bind(f"ipc://{self._path}")
            os.chmod(self._path, 0o600)
            self.address = FeedAddress(f"ipc://{self._path}")
            return
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVER, True)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address = FeedAddress(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), public.decode())

    async def accept(self, subscribing: Awaitable[T]) -> T:
        """Greet subscribers until `subscribing`, which makes them subscribe, is done. Returns its result."""
        task = asyncio.ensure_future(subscribing)
        while not task.done():
            while self._socket.poll(0):  # ZeroMQ sends greetings during these calls
                self._socket.recv()
            await asyncio.wait([task], timeout=_ACCEPT_SECONDS)
        return task.result()

    def publish(self, batch: AnswerBatch) -> None:
        """Send answers of one prompt. The first failure is logged; the engine drafts without the lost answers."""
        columns = (np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in _COLUMNS)
        try:
            self._socket.send_multipart([_PROMPT_KEY.pack(batch.prompt_key), *(column.tobytes() for column in columns)])
        except zmq.ZMQError as error:
            self._log_once(logging.ERROR, "answers do not reach the engine, which drafts without them: %s", error)

    def close(self) -> None:
        self._socket.close()
        if self._path is not None and os.path.exists(self._path):
            os.remove(self._path)


def _socket_path() -> str:
    """Return a new path for a Unix socket, within the system's length limit."""
    name = f"rhyme-{uuid.uuid4().hex}.sock"
    path = os.path.join(tempfile.gettempdir(), name)
    return path if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN else f"/tmp/{name}"


class AnswerSubscriber:
    """The engine's end: calls `on_answers` in a daemon thread for each message.

    A message that cannot be read, or for which `on_answers` raises, is dropped; the first one is logged.

    Args:
        on_answers: receives prompt key, tokens (int32 [total]), lengths (int32 [answers]), steps (int64 [answers]) and
            ids (uint64 [answers]); the arrays are read-only and stay valid after the call.
        greeting_seconds: time limit for the publisher's greeting.

    Raises:
        FeedError: no greeting arrived in time.
    """

    def __init__(
        self, address: FeedAddress, on_answers: OnAnswers, greeting_seconds: float = _GREETING_SECONDS
    ) -> None:
        self._on_answers = on_answers
        self._stop = threading.Event()
        self._log_once = LogOnce(logger)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        if address.key is not None:
            self._socket.setsockopt(zmq.IPV6, "[" in address.endpoint)
            public, secret = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, address.key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(address.endpoint)
        if not self._socket.poll(1000 * greeting_seconds) or self._socket.recv_multipart() != [_GREETING]:
            self._socket.close()
            raise FeedError(
                f"the rollout server does not publish answers at {address.endpoint}, or does not accept this "
                "engine's key: is the port reachable from this node?"
            )
        self._thread: threading.Thread = threading.Thread(target=self._run, name="rhyme-history-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MILLISECONDS):
                continue
            frames = self._socket.recv_multipart()
            if frames == [_GREETING]:  # sent again after a reconnect
                continue
            try:
                self._take(frames)
            except Exception:
                message = "answers that cannot be indexed are dropped (logged once); drafting continues"
                self._log_once(logging.ERROR, message, exc_info=True)
        self._socket.close()

    def _take(self, frames: list[bytes]) -> None:
        key, *arrays = frames
        columns = [np.frombuffer(array, dtype) for array, (_, dtype) in zip(arrays, _COLUMNS, strict=True)]
        self._on_answers(_PROMPT_KEY.unpack(key)[0], *columns)
