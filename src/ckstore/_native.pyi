"""Native twins of ckstore.kernels.on_numpy; every loop runs without the GIL."""

from collections.abc import Sequence

from typing_extensions import Buffer

def split_planes(source: Buffer, planes_out: Buffer, width: int, rotate: bool) -> None:
    """Write the byte planes of ``source`` one after another into ``planes_out``."""

def merge_planes(planes: Sequence[Buffer], destination: Buffer, width: int, rotate: bool) -> None:
    """Write the elements whose byte planes are ``planes``; the inverse of ``split_planes``."""

def planes_equal(planes: Sequence[Buffer], source: Buffer, width: int, rotate: bool) -> bool:
    """Return whether merging ``planes`` gives the bytes of ``source``; nothing is written."""

def copy_bytes(source: Buffer, destination: Buffer) -> None:
    """Copy all bytes."""

def equal_bytes(a: Buffer, b: Buffer) -> bool:
    """Return whether both hold the same bytes; False when their lengths differ."""

def is_constant(source: Buffer) -> bool:
    """Return whether every byte equals the first; True for no bytes."""

def histogram(source: Buffer, counts_out: Buffer) -> None:
    """Write how often each byte value occurs into 256 aligned uint32 of native byte order, modulo 2**32."""
