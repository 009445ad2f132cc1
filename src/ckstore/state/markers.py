"""Marks that a user puts on parts of a state of many ranks, and what a restore gives for values that differ by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ckstore.errors import UsageError
from ckstore.format.tree import BUILT_IN

OPEN_WITH_RANKS = "open the store with ckstore.open(..., ranks=ckstore.Ranks.of_torch())"
"""What to do when one rank commits a part of a state of many ranks."""

DECLARED = f"{BUILT_IN}declared:"
"""Prefix of the names of marks in the tree of a capture. They are never stored."""

if TYPE_CHECKING:
    from typing_extensions import Self

Value = TypeVar("Value")

ChooseRank = Callable[[int, int, int], int]
"""Returns the saved rank whose value a rank gets: called with rank, world and saved world."""

OnNewWorld = Literal["own", "nearest"] | ChooseRank
"""What ranks get in another world. ``"own"``: each its own value, and a rank that has none an error. ``"nearest"``:
such a rank gets the value of rank modulo the saved world. A function chooses for every rank."""


def check_on_new_world(policy: object) -> None:
    """Refuse what is not a policy.

    Raises:
        UsageError: It is not one.
    """
    if not (policy in ("own", "nearest") or callable(policy)):
        raise UsageError(
            "not a policy for values of each rank",
            where=repr(policy),
            todo="use 'own', 'nearest', or a function of rank, world and saved world that returns a saved rank",
        )


class _Mark(Generic[Value]):
    """A marked part."""

    value: Value

    def with_value(self, value: Value) -> Self:
        """Take over another value of the part; return the mark."""
        self.value = value
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class PerRank(_Mark[Value]):
    """Marks a part of a state that belongs to its rank, such as the state of a data loader.

    Args:
        value: The part: any state that can be committed.
        on_new_world: Which rank's value is restored by a job with another number of ranks, as ``Ranks(per_rank=)``;
            None: as ``ckstore.Ranks`` says.
    """

    def __init__(self, value: Value, on_new_world: OnNewWorld | None = None) -> None:
        if on_new_world is not None:
            check_on_new_world(on_new_world)
        self.value = value
        self.on_new_world = on_new_world


class Replicated(_Mark[Value]):
    """Marks a part of a state that is equal on all ranks that have it. Only a sample of it is compared.

    Args:
        value: The part: any state that can be committed.
        check: The share of the bytes that is compared at each commit, from 0 to 1.
    """

    def __init__(self, value: Value, check: float = 1 / 64) -> None:
        if not 0 <= check <= 1:
            raise UsageError("not a share", where=repr(check), todo="use a number from 0 to 1")
        self.value = value
        self.check = float(check)


class PerRankValues(dict[int, Any]):
    """The values of all ranks, by rank: what a restore without ``into`` gives for a value that differs between ranks.

    Committing it stores these values again.
    """
