"""Refuse a framework version whose methods differ from those that a door overrides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ckstore.errors import UnsupportedError


def check_signatures(
    owner: Any, expected: Mapping[str, Sequence[str]], *, library: str, version: str, tested: Sequence[str]
) -> None:
    """Check that a class or module has the functions that a door overrides or calls.

    Args:
        owner: The class or module.
        expected: Names of functions -> names of their parameters, in order.
        library: Name of the framework, for the message.
        version: Its installed version.
        tested: The versions that the door was tested with.

    Raises:
        UnsupportedError: A function is missing or has other parameters.
    """
    for name, parameters in expected.items():
        function = getattr(owner, name, None)
        found = None if function is None else tuple(inspect.signature(function).parameters)
        if found != tuple(parameters):
            now = "is missing" if found is None else f"has the parameters ({', '.join(found)})"
            raise UnsupportedError(
                f"{library} {version} cannot be used with this version of ckstore: "
                f"{getattr(owner, '__name__', owner)}.{name} {now}, not ({', '.join(parameters)})",
                todo=f"install {library} {' or '.join(tested)}, or a newer ckstore",
                library=library,
                version=version,
            )
