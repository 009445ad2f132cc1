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

def plane_bound(nbytes: int) -> int:
    """Return the room that ``encode_plane`` wants for a plane of so many bytes."""

def encode_plane(plane: Buffer, out: Buffer) -> int:
    """Code a plane into ``out``, which has ``plane_bound`` bytes, and return how many of them count."""

def decode_plane(payload: Buffer, plane: Buffer) -> bool:
    """Decode exactly ``plane``; return whether the payload held it. Whatever the payload, nothing else is written."""

def encode_plane_portably(plane: Buffer, out: Buffer) -> int:
    """Do as ``encode_plane`` with the loops of processors without AVX-512; for tests."""

def decode_plane_portably(payload: Buffer, plane: Buffer) -> bool:
    """Do as ``decode_plane`` with the loops of processors without AVX-512; for tests."""

def coder_variant() -> str:
    """Return which loops code planes on this processor: ``"avx512"`` or ``"portable"``."""
