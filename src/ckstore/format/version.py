"""Format version and feature flags: who may read, who may write.

The format version is not the package version. A mandatory flag changes what bytes mean, so a reader that does
not know it must refuse; an optional flag may be ignored.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckstore.errors import UnsupportedError

FORMAT_VERSION = 3
"""What is written. Version 2 added bases: delta and rounded frames, and the choices of a manifest. Version 3 added
loss: frames of codes, and what a manifest says of them."""

READABLE_VERSIONS = (1, 2, 3)

MANDATORY_FEATURES: dict[str, int] = {}
"""Names in ``store.json`` and bits in packs and manifests; none is defined yet."""

OPTIONAL_FEATURES: dict[str, int] = {}
"""Features that a reader may ignore; none is defined yet."""

_TODO = "upgrade ckstore; do not let this version change the store"
_KNOWN_BITS = sum(MANDATORY_FEATURES.values())


def check_readable(version: int, mandatory_flags: int = 0, *, where: object = None) -> None:
    """Refuse what this reader cannot understand.

    Raises:
        UnsupportedError: The version or a mandatory flag is unknown.
    """
    if version not in READABLE_VERSIONS:
        raise UnsupportedError(f"format version {version} is unknown here", where=where, todo=_TODO, version=version)
    unknown = mandatory_flags & ~_KNOWN_BITS
    if unknown:
        raise UnsupportedError(f"mandatory flags {unknown:#x} are unknown here", where=where, todo=_TODO, flags=unknown)


def check_features(names: Iterable[str], *, where: object = None) -> None:
    """Refuse a mandatory feature, by name, that this reader does not know.

    Raises:
        UnsupportedError: A feature is unknown.
    """
    for name in names:
        if name not in MANDATORY_FEATURES:
            raise UnsupportedError(f"mandatory feature {name!r} is unknown here", where=where, todo=_TODO, feature=name)
