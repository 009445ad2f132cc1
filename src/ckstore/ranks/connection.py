"""One connection between rank 0 and another rank: frames on a socket that never blocks.

A frame is the length of a message (u32, little-endian), and the message. The length is checked against the limit of the
message's kind before memory is allocated. Only the thread of the link uses a connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque

from ckstore.errors import MalformedError
from ckstore.ranks.messages import Message, check_length, decode_message, encode_message, kind_of

_LENGTH = struct.Struct("<I")
_HEAD_NBYTES = _LENGTH.size + 1
_READ_NBYTES = 1 << 20


class Connection:
    """Frames in both directions.

    Args:
        end: A connected socket. It belongs to the connection from now on.
        source: The other side, such as ``rank 3 (10.0.0.7)``, for error messages.
        kinds: Kinds of messages that may arrive.
        now: Monotonic time in seconds.
    """

    def __init__(self, end: socket.socket, source: str, kinds: tuple[type[Message], ...], now: float) -> None:
        end.setblocking(False)
        self.end = end
        self.source = source
        self.heard = now
        """When bytes arrived last."""
        self.sent = now
        """When bytes were sent last."""
        self.is_ended = False
        """Whether the other side has closed its direction."""
        self.early: list[Message] = []
        """Messages that arrived together with Welcome."""
        self.nonce = b""
        """That of Welcome."""
        self._kinds = kinds
        self._outgoing: deque[memoryview] = deque()
        self._head = bytearray()
        self._body: memoryview | None = None
        self._filled = 0

    @property
    def is_sending(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._outgoing)

    def queue(self, message: Message) -> None:
        """Add a message to those that will be sent."""
        packet = encode_message(message)
        self.queue_bytes(_LENGTH.pack(len(packet)))
        self.queue_bytes(packet)

    def queue_bytes(self, content: bytes) -> None:
        """Add bytes to those that will be sent."""
        self._outgoing.append(memoryview(content))

    def send(self, now: float) -> None:
        """Send what the socket takes now.

        Raises:
            OSError: The connection is broken.
        """
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                rest = self._outgoing[0]
                count = self.end.send(rest, socket.MSG_NOSIGNAL)
                self.sent = now
                if count == len(rest):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = rest[count:]

    def receive(self, now: float) -> list[Message]:
        """Return the messages that are complete now, and set ``is_ended`` at the end of the connection.

        Raises:
            MalformedError: A message is invalid.
            UnsupportedError: This version does not know a message.
            OSError: The connection is broken.
        """
        messages: list[Message] = []
        left = _READ_NBYTES
        while left > 0:
            target = self._target()
            try:
                count = self.end.recv_into(target[:left])
            except BlockingIOError:
                break
            if count == 0:
                self.is_ended = True
                break
            self.heard = now
            left -= count
            if (message := self._take(target[:count])) is not None:
                messages.append(message)
        return messages

    def _target(self) -> memoryview:
        """Return where the next bytes belong."""
        if self._body is not None:
            return self._body[self._filled :]
        return memoryview(bytearray(_HEAD_NBYTES - len(self._head)))

    def _take(self, received: memoryview) -> Message | None:
        if self._body is None:
            self._head += received
            if len(self._head) < _HEAD_NBYTES:
                return None
            self._begin_body()
        else:
            self._filled += len(received)
        assert self._body is not None
        if self._filled < len(self._body):
            return None
        body, self._body = self._body, None
        self._head.clear()
        return decode_message(body, self._kinds, source=self.source)

    def _begin_body(self) -> None:
        (nbytes,) = _LENGTH.unpack_from(self._head)
        if nbytes == 0:
            raise MalformedError(f"{self.source} sent an empty message", todo="report this")
        kind = kind_of(self._head[-1], self._kinds, source=self.source)
        check_length(kind, nbytes, source=self.source)
        self._body = memoryview(bytearray(nbytes))
        self._body[0] = self._head[-1]
        self._filled = 1


def prepare(end: socket.socket) -> None:
    """Set the options of a connection between ranks."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
