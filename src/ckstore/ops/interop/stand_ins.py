"""Classes that stand in for those that a foreign file names: they keep what was to be made, and run nothing.

torch's reader for ``weights_only=True`` makes objects of allowed classes only. A class made here takes the place of one
that is not allowed, under its name; no module is imported for it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar


class StandIn:
    """What was to be made of a class, or by a function, that only code can run.

    Attributes:
        kind: Its name, with the module.
        arguments: With what it was to be made.
        state: What was to be put into it; None where nothing was.
    """

    kind: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Any:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


class StandIns:
    """The stand-ins of one file.

    Attributes:
        kind_of: By ``id``, what a dict or a list stands for, what that was to be made with, and itself, which keeps its
            ``id`` its own.
    """

    def __init__(self) -> None:
        self.kind_of: dict[int, tuple[str, tuple[Any, ...], Any]] = {}
        self._classes: dict[str, type] = {}

    def __len__(self) -> int:
        return len(self._classes)

    @property
    def names(self) -> list[str]:
        """Of what classes and functions there are some."""
        return sorted(self._classes)

    @property
    def allowed(self) -> list[tuple[Any, str]]:
        """What to give to ``torch.serialization.safe_globals``."""
        return [(made, name) for name, made in self._classes.items()]

    def add(self, name: str) -> bool:
        """Make one that stands for an object; False: there is one already."""
        if name in self._classes:
            return False
        self._classes[name] = type(name, (StandIn,), {"kind": name})
        return True

    def turn_into(self, form: type[OrderedDict[Any, Any]] | type[list[Any]], name: str) -> bool:
        """Let one stand for a class that takes items; False: there is none of this name, or it does already."""
        if not issubclass(self._classes.get(name, object), StandIn):
            return False

        def make(_: type, *arguments: Any) -> Any:
            # torch's reader gives items to exactly these types, and to no subclass of them.
            thing = form()
            self.kind_of[id(thing)] = (name, arguments, thing)
            return thing

        self._classes[name] = type(name, (), {"__new__": make})
        return True
