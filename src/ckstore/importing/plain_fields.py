"""Objects of a foreign file as the plain fields that were pickled of them; no class is imported, and no code is run.

A config of any class (argparse.Namespace, a dataclass, an Enum, a path) is a few plain values under names: a dict of
its fields says the same. An object that holds tensors, a model or an optimizer for example, is more than its fields. It
stays as it is: the caller refuses it, or leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from ckstore.importing.inert_pickle import Record, Symbol
from ckstore.tree import Path, place_of

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
# Of what may be in a field, these are stored as they are.
_STORED_TYPES = frozenset({("torch", "dtype"), ("torch", "device"), ("torch", "Size")})
_NUMPY_DTYPE = re.compile(r"[biufc][0-9]{1,2}")


class _NotPlainError(Exception):
    """An object holds what is no plain value."""


class PlainFields:
    """Replaces the objects of one state.

    Args:
        dicts: By ``id``, the name of what a dict or a list stands for; see ``stand_ins.StandIns.kind_of``.

    Attributes:
        notes: What was replaced, in whole sentences.
        leaf_count: Leaves that stood outside of all objects.
    """

    def __init__(self, dicts: Mapping[int, tuple[str, Any]]) -> None:
        from ckstore.adapters.stand_ins import StandIn

        self._stand_in = StandIn
        self._dicts = dicts
        self._open: set[int] = set()
        self.notes: list[str] = []
        self.leaf_count = 0

    def of(self, item: Any, path: Path = ()) -> Any:
        """Return a part of a state with every object replaced by its fields where these are plain."""
        name = self._name_of(item)
        if name is not None:
            return self._of_object(item, name, path)
        if not isinstance(item, (dict, list, tuple)):
            self.leaf_count += 1
            return item
        if id(item) in self._open:
            # A container that holds itself; a commit refuses it by its path.
            return item
        self._open.add(id(item))
        try:
            return self._of_container(item, path)
        finally:
            self._open.discard(id(item))

    def _of_container(self, item: Any, path: Path) -> Any:
        if isinstance(item, tuple):
            children = [self.of(child, (*path, index)) for index, child in enumerate(item)]
            is_same = all(one is other for one, other in zip(children, item, strict=True))
            return item if is_same else tuple(children)
        for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
            item[key] = self.of(child, (*path, key))
        return item

    def _of_object(self, item: Any, name: str, path: Path) -> Any:
        try:
            made = self._plain(item, may_hold_tensors=name in _NAMESPACES)
        except _NotPlainError:
            if id(item) not in self._dicts:
                return item
            # A container of a class of its own, such as a defaultdict of tensors.
            self.notes.append(
                f"{place_of(path)} is a {name}; it is stored as {'a list' if isinstance(item, list) else 'a dict'}."
            )
            return self._of_container(item, path)
        form = "a dict of its fields" if isinstance(made, dict) else "a plain value"
        self.notes.append(f"{place_of(path)} is an object of {name}; it is stored as {form}.")
        return made

    def _name_of(self, item: Any) -> str | None:
        """Return the name of the class of an object; None: it is none."""
        if isinstance(item, self._stand_in):
            # What copyreg made carries its own class as the first argument.
            first = item.arguments[0] if item.kind == "copyreg._reconstructor" and item.arguments else None
            return item.kind if first is None else self._name_of(first) or item.kind
        if isinstance(item, Record):
            first = item.arguments[0] if item.kind.name == "_reconstructor" and item.arguments else item.kind
            return f"{first.module}.{first.name}" if isinstance(first, Symbol) else item.kind.name
        if isinstance(item, Symbol):
            return f"{item.module}.{item.name}"
        if isinstance(item, type):
            return str(getattr(item, "kind", item.__name__))
        return self._dicts[id(item)][0] if id(item) in self._dicts else None

    def _plain(self, item: Any, *, may_hold_tensors: bool = False) -> Any:
        if isinstance(item, _SCALARS) or (type(item).__module__, type(item).__name__) in _STORED_TYPES:
            return item
        if isinstance(item, (Symbol, type)):
            return self._name_of(item)
        if id(item) in self._open:
            raise _NotPlainError
        self._open.add(id(item))
        try:
            return self._plain_thing(item, may_hold_tensors)
        finally:
            self._open.discard(id(item))

    def _plain_thing(self, item: Any, may_hold_tensors: bool) -> Any:
        def plain(child: Any) -> Any:
            return self._plain(child, may_hold_tensors=may_hold_tensors)

        if isinstance(item, dict):
            made = {self._key(key): plain(child) for key, child in item.items()}
            attributes = getattr(item, "__dict__", None)
            return made | {name: plain(child) for name, child in attributes.items()} if attributes else made
        if isinstance(item, (list, tuple)):
            return type(item)(plain(child) for child in item)
        if isinstance(item, (set, frozenset)):
            return sorted((plain(child) for child in item), key=repr)
        if isinstance(item, (self._stand_in, Record)):
            return self._fields(item, plain)
        is_scalar = type(item).__module__ == "numpy" and getattr(item, "shape", None) == ()
        if may_hold_tensors or is_scalar:
            return item
        raise _NotPlainError

    def _fields(self, item: Any, plain: Callable[[Any], Any]) -> Any:
        name = self._name_of(item) or ""
        arguments = item.arguments
        items = item.items if isinstance(item, Record) else []
        if name.endswith(("multiarray._reconstruct", "multiarray.scalar")):
            return _numpy_thing(item)
        if name.startswith("pathlib.") and all(isinstance(part, str) for part in arguments):
            return str(PurePosixPath(*arguments))
        if name == "_codecs.encode" and len(arguments) == 2 and arguments[1] == "latin1":
            return arguments[0].encode("latin1")
        states = item.state if isinstance(item.state, tuple) and len(item.state) == 2 else (item.state,)
        fields: dict[Any, Any] = {}
        for state in states:
            if state is not None and not isinstance(state, dict):
                raise _NotPlainError
            fields |= plain(state or {})
        if all(isinstance(each, tuple) and len(each) == 2 for each in items):
            fields = {self._key(key): plain(child) for key, child in items} | fields
        elif fields:
            raise _NotPlainError
        else:
            return [plain(child) for child in items]
        is_made_by_copyreg = "_reconstructor" in (item.kind.name if isinstance(item, Record) else item.kind)
        if fields or not arguments or is_made_by_copyreg:
            return fields
        made = [plain(argument) for argument in arguments]
        return made[0] if len(made) == 1 else made

    def _key(self, key: Any) -> Any:
        made = self._plain(key)
        if not isinstance(made, (str, int)):
            raise _NotPlainError
        return made


def _numpy_thing(item: Any) -> Any:
    """Return the array or the scalar that a pickle describes, of plain numbers."""
    import numpy as np

    try:
        if item.state is None:
            (dtype, content), shape, is_fortran = item.arguments, (), False
        else:
            _, shape, dtype, is_fortran, content = item.state
        if _NUMPY_DTYPE.fullmatch(dtype.arguments[0]) is None:
            raise _NotPlainError
        order = dtype.state[1] if dtype.state else "<"
        made: Any = np.frombuffer(content, np.dtype(dtype.arguments[0]).newbyteorder(order))
        made = made.reshape(shape, order="F" if is_fortran else "C").copy(order="K")
        return made if item.state is not None else made[()]
    except (TypeError, ValueError, IndexError, AttributeError):
        raise _NotPlainError from None
