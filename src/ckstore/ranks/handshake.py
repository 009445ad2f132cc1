"""How a rank joins a job: both sides prove that they know the job's token, and the token itself is never sent.

The bytes are the same in all versions of the protocol, so that a rank of another version can be named:

- rank 0: magic (8 bytes), version (u16), release (32 bytes of text, zeros at the end), nonce (32 bytes).
- the rank: the same, then its rank and its world (u32 each), and its proof (32 bytes).
- rank 0: its proof (32 bytes), then ordinary messages: Welcome or Refused.

Numbers are little-endian. A proof is the HMAC-SHA256 with the token over a name of the side and everything that both
sides sent before. Each side has a nonce in it, so a proof cannot be used twice. What follows is neither signed nor
encrypted, as in torch's own process groups.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import NamedTuple

from ckstore.ranks.messages import PROTOCOL_VERSION

MAGIC = b"CKSRANKS"
_GREETING = struct.Struct("<8sH32s32s")
_NUMBERS = struct.Struct("<II")
PROOF_NBYTES = 32
GREETING_NBYTES = _GREETING.size
CLAIM_NBYTES = GREETING_NBYTES + _NUMBERS.size + PROOF_NBYTES


class Greeting(NamedTuple):
    """What both sides send first."""

    version: int
    release: str
    nonce: bytes


class Claim(NamedTuple):
    """What a rank sends: who it is."""

    version: int
    release: str
    rank: int
    world: int


def new_greeting(release: str, *, version: int = PROTOCOL_VERSION) -> bytes:
    """Return a greeting with a new nonce."""
    return _GREETING.pack(MAGIC, version, release.encode()[:32], os.urandom(32))


def parse_greeting(content: bytes) -> Greeting | None:
    """Return what a greeting says. None: these bytes are no greeting."""
    if len(content) != GREETING_NBYTES:
        return None
    magic, version, release, nonce = _GREETING.unpack(content)
    if magic != MAGIC:
        return None
    return Greeting(version, release.rstrip(b"\0").decode("utf-8", "replace"), nonce)


def new_claim(token: bytes, theirs: bytes, ours: bytes, rank: int, world: int) -> bytes:
    """Return a rank's claim.

    Args:
        token: The job's secret.
        theirs: The greeting of rank 0.
        ours: The rank's own greeting.
        rank: The rank.
        world: The number of ranks that it expects.
    """
    said = ours + _NUMBERS.pack(rank, world)
    return said + _proof(token, b"rank", theirs, said)


def check_claim(token: bytes, ours: bytes, content: bytes) -> Claim | None:
    """Return what a claim says. None: the sender does not know the token.

    Args:
        token: The job's secret.
        ours: The greeting of rank 0.
        content: ``CLAIM_NBYTES`` bytes.
    """
    said, proof = content[:-PROOF_NBYTES], content[-PROOF_NBYTES:]
    greeting = parse_greeting(said[:GREETING_NBYTES])
    if greeting is None or not hmac.compare_digest(proof, _proof(token, b"rank", ours, said)):
        return None
    rank, world = _NUMBERS.unpack(said[GREETING_NBYTES:])
    return Claim(greeting.version, greeting.release, rank, world)


def answer_to(token: bytes, ours: bytes, claim: bytes) -> bytes:
    """Return rank 0's proof for a claim that it has checked."""
    return _proof(token, b"rank 0", ours, claim)


def is_answer(token: bytes, theirs: bytes, claim: bytes, proof: bytes) -> bool:
    """Whether the other side, with this greeting, knows the token."""
    return hmac.compare_digest(proof, _proof(token, b"rank 0", theirs, claim))


def _proof(token: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, b"ckstore " + side + b"\0" + first + second, hashlib.sha256).digest()
