"""Sends earlier answers from the rollout server to the engine processes of its replica, outside the engine's RPC.

There is one publisher (the server) and one subscriber per engine process (per data-parallel rank). A subscriber's
background thread adds answers to its history index; an engine step never waits for it. The transport is ZeroMQ XPUB/SUB
over a Unix socket, which nobody can connect to once the engines have, or, for engines on other nodes, over encrypted
TCP, where publisher and subscribers prove their keys (CURVE). Secret keys never leave their process. A message holds
the answers of one prompt, with one frame per array. A subscriber's first message is a greeting, which proves at the
start that the connection works.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Optional, TypeVar

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from rhyme_verl.history.answers import AnswerBatch
from rhyme_verl.telemetry.logs import LogOnce

logger = logging.getLogger(__name__)

MAX_QUEUED = 1024  # limit on the batches that wait at either end
HEARTBEAT_SECONDS = 5.0  # between two signs of life over TCP
SILENT_SECONDS = 15.0  # without a sign of life, after which a connection is closed
_DOMAIN = b"rhyme"  # of authentication
_PROMPT_KEY = struct.Struct("<Q")
_COLUMNS = (("tokens", np.int32), ("lengths", np.int32), ("rollouts", np.int64), ("ids", np.uint64))
_GREETING = b"rhyme"
_CONNECTED = b"\x01"  # ZeroMQ's notice of a subscription; that of its end is 0
_POLL_MILLISECONDS = 200
_GREETING_SECONDS = 30.0
_ACCEPT_SECONDS = 0.01

OnAnswers = Callable[[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
T = TypeVar("T")


class FeedError(RuntimeError):
    """The publisher cannot be reached; the message names its endpoint."""


@dataclass(frozen=True)
class FeedAddress:
    """Where answers are published."""

    endpoint: str  # of ZeroMQ, `ipc://...` or `tcp://...`
    key: Optional[str] = None  # noqa: UP045 - the publisher's public key in Z85; None over a Unix socket


@cache
def own_keys() -> tuple[bytes, bytes]:
    """Return the public and the secret key with which this process subscribes, in Z85."""
    return zmq.curve_keypair()


class AnswerPublisher:
    """The server's end.

    Its queue is bounded. What does not fit, or was on its way when a connection broke, is lost; `publish` and
    `has_lost_answers` tell, so that the caller can send it again. `host` is the IP address at which other nodes reach
    this one; None: all subscribers are on this node.
    """

    def __init__(self, host: str | None = None) -> None:
        self._log_once = LogOnce(logger)
        self._num_disconnected = 0
        self._folder: str | None = None
        self._allowed: set[bytes] = set()
        self._authenticator: ThreadAuthenticator | None = None
        # Authentication is for all sockets of a context.
        context: zmq.Context[Any] = zmq.Context.instance() if host is None else zmq.Context()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.XPUB_NODROP, True)  # a full queue is an error
        self._socket.setsockopt(zmq.XPUB_VERBOSER, True)  # every connection and disconnection can be received
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_WELCOME_MSG, _GREETING)
        if host is None:
            self._folder = _private_folder()
            self.address = FeedAddress(f"ipc://{self._folder}/feed.sock")
            self._socket.bind(self.address.endpoint)
            return
        self._authenticator = ThreadAuthenticator(context)
        judge = SimpleNamespace(callback=lambda domain, key: key in self._allowed)
        self._authenticator.configure_curve_callback(_DOMAIN.decode(), judge)
        self._authenticator.start()
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVER, True)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, True)  # without the authenticator nobody is let in
        _use_heartbeats(self._socket)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address = FeedAddress(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), public.decode())

    def allow(self, keys: Iterable[str]) -> None:
        """Let the owners of these public keys (`own_keys`) subscribe over TCP; nobody else can."""
        self._allowed.update(key.encode() for key in keys)

    async def accept(self, subscribing: Awaitable[T]) -> T:
        """Greet subscribers until `subscribing`, which makes all of them subscribe, is done. Returns its result.

        After that, the Unix socket has no path any more: its connections stay, and there can be no others.
        """
        task = asyncio.ensure_future(subscribing)
        try:
            while not task.done():
                self.has_lost_answers()  # ZeroMQ sends greetings during these calls
                await asyncio.wait([task], timeout=_ACCEPT_SECONDS)
            return task.result()
        finally:
            self._remove_path()

    def publish(self, batch: AnswerBatch) -> bool:
        """Send answers of one prompt, and return whether they are on their way. The first failure is logged."""
        columns = (np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in _COLUMNS)
        frames = [_PROMPT_KEY.pack(batch.prompt_key), *(column.tobytes() for column in columns)]
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            reason = f"{MAX_QUEUED} batches are waiting" if isinstance(error, zmq.Again) else error
            self._log_once(logging.ERROR, "answers do not reach the engine, which drafts without them: %s", reason)
            return False
        return True

    def has_lost_answers(self) -> bool:
        """Return whether answers may have been lost since the last call because a connection was interrupted."""
        has_lost = False
        while not self._socket.closed and self._socket.poll(0):
            has_connected = self._socket.recv() == _CONNECTED
            has_lost |= not has_connected or self._num_disconnected > 0
            self._num_disconnected = max(0, self._num_disconnected + (-1 if has_connected else 1))
        if has_lost:
            self._log_once(logging.WARNING, "an engine was disconnected; it gets the history of its prompts again")
        return has_lost

    def close(self) -> None:
        self._socket.close()
        self._remove_path()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator.context.term()

    def _remove_path(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    """Return a new folder for a Unix socket that only this user can enter, within the system's length limit."""
    longest = os.path.join(tempfile.gettempdir(), "rhyme-12345678", "feed.sock")
    return tempfile.mkdtemp(prefix="rhyme-", dir=None if len(os.fsencode(longest)) <= zmq.IPC_PATH_MAX_LEN else "/tmp")


def _use_heartbeats(socket: zmq.Socket[bytes]) -> None:
    """Close connections whose other end is silent; a subscriber then connects again."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * HEARTBEAT_SECONDS))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * SILENT_SECONDS))


class AnswerSubscriber:
    """The engine's end: calls `on_answers` in a daemon thread for each message.

    It gets the prompt key and the arrays of an `AnswerBatch`, which are read-only and stay valid after the call. A
    message that cannot be read, or for which it raises, is dropped; the first one is logged.

    Raises:
        FeedError: the publisher's greeting did not arrive in time.
    """

    def __init__(
        self, address: FeedAddress, on_answers: OnAnswers, greeting_seconds: float = _GREETING_SECONDS
    ) -> None:
        self._on_answers = on_answers
        self._stop = threading.Event()
        self._log_once = LogOnce(logger)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        if address.key is not None:
            self._socket.setsockopt(zmq.IPV6, "[" in address.endpoint)
            _use_heartbeats(self._socket)
            public, secret = own_keys()
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
                key, *arrays = frames
                columns = [np.frombuffer(array, dtype) for array, (_, dtype) in zip(arrays, _COLUMNS, strict=True)]
                self._on_answers(_PROMPT_KEY.unpack(key)[0], *columns)
            except Exception:
                message = "answers that cannot be indexed are dropped (logged once); drafting continues"
                self._log_once(logging.ERROR, message, exc_info=True)
        self._socket.close()
