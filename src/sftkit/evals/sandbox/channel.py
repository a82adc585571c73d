"""Messages between two processes: eight bytes of length, then so many bytes."""

from __future__ import annotations

from os import read, write

MAX_BYTES = 64 * 2**20
"The most bytes of a message that is read: the other side may be a program that tries to fill the memory."


class Channel:
    """Two ends of pipes: one to write to, one to read from."""

    def __init__(self, to: int, of: int) -> None:
        self.to, self.of = to, of

    def send(self, message: bytes) -> None:
        """Write a message. BrokenPipeError: nobody will read it."""
        rest = memoryview(len(message).to_bytes(8, "big") + message)
        while rest:
            rest = rest[write(self.to, rest) :]

    def receive(self) -> bytes:
        """Read the next message. EOFError: there is none; ValueError: it is longer than MAX_BYTES."""
        size = int.from_bytes(read_exactly(self.of, 8), "big")
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes, more than {MAX_BYTES}")
        return read_exactly(self.of, size)


def read_exactly(of: int, size: int) -> bytes:
    """Read `size` bytes of a descriptor; EOFError if it has fewer."""
    parts = bytearray()
    while len(parts) < size:
        part = read(of, min(size - len(parts), 2**20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
