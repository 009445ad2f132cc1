"""Files of a place that the store's own backend cannot read: a folder, where the store itself lies in a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckstore.io.backend import Backend, Distant, Fetching, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool


class ElsewhereFile:
    """A file that another place has opened, whose ranges that place fetches.

    Args:
        place: What has opened it.
        file: The file.
    """

    def __init__(self, place: Backend, file: ReadFile) -> None:
        self.place = place
        self.file = file

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self.file.name

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self.file.nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; shorter only at the end."""
        return self.file.read_at(offset, nbytes)

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Read as ``read_at`` does."""
        return memoryview(self.file.read_at(offset, nbytes))

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges of this and other files of the same place, many at a time."""
        return self.place.read_ranges((replace(request, file=_opened(request.file)) for request in requests), pool)

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


def readable_from(home: Backend, place: Backend, file: ReadFile) -> ReadFile:
    """Return a file of a place in a form whose ranges ``store.packs.read_ranges`` fetches for this home."""
    if place is home or not isinstance(home, Distant) or isinstance(file, Fetching):
        return file
    return ElsewhereFile(place, file)


def fetcher_of(file: ReadFile) -> int:
    """Return what has to fetch ranges of a file: 0 the store's backend, 1 a file of its kind, else one place's."""
    if isinstance(file, ElsewhereFile):
        return id(file.place)
    return int(isinstance(file, Fetching))


def _opened(file: ReadFile) -> ReadFile:
    assert isinstance(file, ElsewhereFile), "requests are grouped by what fetches them"
    return file.file
