"""The files of a memory backend: list them, copy them, and damage them as a failing disk would.

Everything here uses the public methods of ``MemoryBackend``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckstore.io.memory import MemoryBackend

OLD_NS = 1
"""The time of files that were there long before a test began: no span of grace protects them."""


def names_of(backend: MemoryBackend, prefix: str | tuple[str, ...] = "") -> list[str]:
    """Return the names of the files that begin with a prefix, sorted."""
    return list(files_of(backend, prefix))


def files_of(backend: MemoryBackend, prefix: str | tuple[str, ...] = "") -> dict[str, bytes]:
    """Return the contents of the files whose names begin with a prefix, by name, sorted."""
    return {name: content for name, content in backend.files().items() if name.startswith(prefix)}


def first_of(backend: MemoryBackend, prefix: str) -> str:
    """Return the first name that begins with a prefix."""
    return names_of(backend, prefix)[0]


def copy_of(backend: MemoryBackend, changes: Mapping[str, bytes | None] | None = None) -> MemoryBackend:
    """Return a copy in which all files are old and some are changed; None removes one, a new name adds one."""
    made = backend.clone(modified_ns=OLD_NS)
    for name, content in (changes or {}).items():
        if content is None:
            made.unlink(name)
        elif made.stat(name) is None:
            add(made, name, content)
        else:
            made.overwrite(name, content)
    return made


def add(backend: MemoryBackend, name: str, content: bytes, *, modified_ns: int = OLD_NS) -> None:
    """Make a file, and its folder if it has none."""
    backend.make_folder(name.rpartition("/")[0])
    backend.create(name, content, sync=True)
    backend.overwrite(name, content, modified_ns=modified_ns)


@contextmanager
def edited(backend: MemoryBackend, name: str) -> Iterator[bytearray]:
    """Give the bytes of a file to change; they are written in place when the block ends."""
    content = bytearray(backend.files()[name])
    yield content
    backend.overwrite(name, bytes(content))


def flip(backend: MemoryBackend, name: str, offset: int, mask: int = 1) -> None:
    """Flip bits of one byte of a file."""
    with edited(backend, name) as content:
        content[offset] ^= mask


def truncate(backend: MemoryBackend, name: str, nbytes: int) -> None:
    """Cut a file behind its first bytes; a negative number cuts so many from its end."""
    with edited(backend, name) as content:
        del content[nbytes:]


def swap(backend: MemoryBackend, one: str, other: str) -> None:
    """Exchange the contents of two files."""
    files = backend.files()
    backend.overwrite(one, files[other])
    backend.overwrite(other, files[one])


def remove_empty_folders(backend: MemoryBackend) -> None:
    """Remove the folders that hold nothing: listing a folder of this backend visits all names."""
    for name in sorted(backend.folders() - {""}, reverse=True):
        if not backend.list_names(name):
            backend.remove_folder(name)
