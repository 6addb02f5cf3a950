"""One connection between two hosts' mgraph: JSON messages, one a line, and silence noticed."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

GONE_S = 30.0
"""A host that has said nothing for so long is gone; each says something every ``ALIVE_S``."""
ALIVE_S = 2.0
FOLLOWER = "host-link"
"""The name of the threads that listen to other hosts."""
MOST_BYTES = 1 << 28
"""A line longer than this is no message of ours."""


class Closed(Exception):  # noqa: N818 (it says what happened)
    """The other end is gone: it closed the connection, was silent for too long, or speaks something else."""


class Link:
    """Sends and receives messages. ``send`` may be called from any thread, ``receive`` from one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._sending = threading.Lock()
        self._received = bytearray()

    @property
    def own_address(self) -> str:
        """The address of this host at which the other one talks to it."""
        return str(self._connection.getsockname()[0])

    @property
    def gone(self) -> bool:
        """Whether the other end has closed the connection, as far as can be told without waiting."""
        waited_s = self._connection.gettimeout()
        self._connection.setblocking(False)
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._connection.settimeout(waited_s)

    def send(self, message: Message) -> None:
        """Nothing happens where the other end is gone: whoever receives learns of it."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending, suppress(OSError):
            self._connection.sendall(line)

    def receive(self, silence_s: float = GONE_S) -> Message:
        """The next message, which must be whole in time. Raises Closed."""
        deadline = time.monotonic() + silence_s
        while (end := self._received.find(b"\n")) < 0:
            self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                part = self._connection.recv(1 << 16)
            except TimeoutError as error:
                raise Closed(f"has not been heard of for {silence_s:.0f} s") from error
            except OSError as error:
                raise Closed("closed its connection") from error
            if not part or len(self._received) > MOST_BYTES:
                raise Closed("closed its connection" if not part else "does not speak as mgraph does")
            self._received += part
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except ValueError as error:
            raise Closed("does not speak as mgraph does") from error
        if not isinstance(message, dict) or "kind" not in message:
            raise Closed("does not speak as mgraph does")
        return message

    def follow(self, told: Callable[[Message], None], ended: Callable[[str], None]) -> threading.Thread:
        """Hand every message to ``told``, and why there are no more to ``ended``, in a thread of its own."""

        def listen() -> None:
            try:
                while True:
                    told(self.receive())
            except Closed as error:
                ended(str(error))
            except Exception as error:  # without this thread nobody would notice that the other end is gone
                ended(f"says what this host does not understand ({type(error).__name__}: {error})")

        thread = threading.Thread(target=listen, name=FOLLOWER, daemon=True)
        thread.start()
        return thread

    def finish(self) -> None:
        """No more messages from here; what was sent still arrives."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()
