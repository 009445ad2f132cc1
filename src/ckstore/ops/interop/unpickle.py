"""Read what a pickle says without doing it: names of classes and functions stay names, and nothing is called.

Foreign checkpoints hold small pickles that describe where their tensors lie. An unpickler would import and call
whatever they name; here a call becomes a ``Record`` of what was to be called with what, for the caller to look at.

Invariants:
- Nothing is imported or called that the content names; opcodes that only a running program could honour are refused.
- Memory is bounded by the content: an opcode makes at most one object, and parts are shared, never copied.
"""

from __future__ import annotations

import io
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from typing import Any

from ckstore.errors import MalformedError, UnsupportedError

Stack = list[Any]


# A capture stores dataclasses and named tuples. What nothing has made plain values of is to be refused there.
class Symbol:
    """A class or function that the content names, as a name."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"


class Record:
    """What a call would have made.

    Attributes:
        kind: What was to be called.
        arguments: With what.
        state: What was to be put into the result; None where nothing was.
        items: What was to be appended to it.
        pairs: Keys and values that were to be set in it.
    """

    __slots__ = ("arguments", "items", "kind", "pairs", "state")

    def __init__(self, kind: Symbol, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def field(self, name: str) -> Any:
        """Return a field of its state, or None; of a state that is a tuple of two dicts too (slots)."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return None


class _Mark:
    """Where a group of operands begins."""


_MARK = _Mark()


def read_inert(content: bytes, *, where: object = None) -> Any:
    """Return the object that a pickle describes, of dicts, lists, tuples, plain values, symbols and records.

    Raises:
        MalformedError: It is no pickle, or it contradicts itself.
        UnsupportedError: It needs a running program: persistent ids, extension codes.
    """
    reader = _Reader(where)
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
            reader.do(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, EOFError, UnicodeDecodeError, OverflowError) as problem:
        raise MalformedError(f"this is no sound pickle ({problem})"[:300], where=where) from None
    if len(reader.stack) != 1 or not reader.has_stopped or reader.stack[0] is _MARK:
        raise MalformedError("a pickle does not end as it should", where=where)
    return reader.stack[0]


class _Reader:
    """The stack machine of a pickle, which calls nothing."""

    def __init__(self, where: object) -> None:
        self.stack: Stack = []
        self.has_stopped = False
        self._memo: dict[int, Any] = {}
        self._where = where

    def do(self, name: str, argument: Any) -> None:
        """Do what one opcode says."""
        if name in _PUSHES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.stack[len(self.stack) - count :] = [tuple(self._last(count))]
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise UnsupportedError(
                f"a pickle has the opcode {name}, which needs a running program", where=self._where,
                todo="save plain tensors, dicts and lists",
            )  # fmt: skip

    def _last(self, count: int) -> Stack:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        found = self.stack[len(self.stack) - count :]
        if any(each is _MARK for each in found):
            raise ValueError("a mark is taken for an object")
        return found

    def _since_mark(self) -> Stack:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                found = self.stack[index + 1 :]
                del self.stack[index:]
                return found
        raise IndexError("a mark is missing")

    def stop(self, _: Any) -> None:
        """Take what lies on the stack as the result."""
        self.has_stopped = True

    def pop(self, _: Any) -> None:
        """Forget the top."""
        self.stack.pop()

    def pop_mark(self, _: Any) -> None:
        """Forget everything down to the mark."""
        self._since_mark()

    def duplicate(self, _: Any) -> None:
        """Put the top on the stack again."""
        self.stack.append(self.stack[-1])

    def put(self, index: int) -> None:
        """Remember the top under a number."""
        self._memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        """Remember the top under the next number."""
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        """Put what was remembered on the stack."""
        self.stack.append(self._memo[index])

    def name(self, argument: str) -> None:
        """Push a symbol that the opcode itself names."""
        module, _, name = argument.partition(" ")
        # Pickles of the protocols 0 to 2 have the names that Python 2 had for its own types.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.stack.append(Symbol(module, name))

    def name_on_stack(self, _: Any) -> None:
        """Push a symbol that the stack names."""
        module, name = self._last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name is no text")
        self.stack[len(self.stack) - 2 :] = [Symbol(module, name)]

    def call(self, _: Any) -> None:
        """Replace a function and its arguments by the record of a call."""
        kind, arguments = self._last(2)
        self.stack[len(self.stack) - 2 :] = [_record(kind, arguments)]

    def call_with_names(self, _: Any) -> None:
        """Do as ``call``, with keyword arguments, which are the last of the arguments."""
        kind, arguments, named = self._last(3)
        if not isinstance(arguments, tuple):
            raise TypeError("what is called has no arguments")
        self.stack[len(self.stack) - 3 :] = [_record(kind, (*arguments, named) if named else arguments)]

    def build(self, _: Any) -> None:
        """Put a state into a record."""
        target, state = self._last(2)
        if not isinstance(target, Record):
            raise TypeError("only a record takes a state")
        if target.state is not None:
            raise TypeError("an object has two states")
        target.state = state
        self.stack.pop()

    def append(self, _: Any) -> None:
        """Append the top to a list."""
        target, item = self._last(2)
        self.stack.pop()
        _extend(target, [item])

    def extend(self, _: Any) -> None:
        """Append everything since the mark to a list, or add it to a set."""
        items = self._since_mark()
        _extend(self.stack[-1], items)

    def set_item(self, _: Any) -> None:
        """Set one item of a dict."""
        target, key, item = self._last(3)
        del self.stack[len(self.stack) - 2 :]
        _set_items(target, [key, item])

    def set_items(self, _: Any) -> None:
        """Set everything since the mark as items of a dict."""
        items = self._since_mark()
        _set_items(self.stack[-1], items)

    def gather_tuple(self, _: Any) -> None:
        """Make a tuple of everything since the mark."""
        self.stack.append(tuple(self._since_mark()))

    def gather_list(self, _: Any) -> None:
        """Make a list of everything since the mark."""
        self.stack.append(self._since_mark())

    def gather_frozenset(self, _: Any) -> None:
        """Make a frozenset of everything since the mark."""
        self.stack.append(frozenset(self._since_mark()))

    def gather_dict(self, _: Any) -> None:
        """Make a dict of everything since the mark."""
        found: dict[Any, Any] = {}
        _set_items(found, self._since_mark())
        self.stack.append(found)


def _record(kind: Any, arguments: Any) -> Record:
    if not isinstance(kind, Symbol) or not isinstance(arguments, tuple):
        raise TypeError("what is called has no name, or no arguments")
    return Record(kind, arguments)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, Record):
        target.items.extend(items)
    elif isinstance(target, (list, set)):
        target.extend(items) if isinstance(target, list) else target.update(items)
    else:
        raise TypeError("only a list takes items")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if isinstance(target, Record):
        target.pairs.extend(pairs)
    elif isinstance(target, dict):
        # Records as keys are told apart by which one they are: what they say is looked at by the caller.
        target.update(pairs)
    else:
        raise TypeError("only a dict takes pairs")


_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_PUSHES = frozenset((*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"))
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ACTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    "STOP": _Reader.stop,
    "POP": _Reader.pop,
    "POP_MARK": _Reader.pop_mark,
    "DUP": _Reader.duplicate,
    "PUT": _Reader.put,
    "BINPUT": _Reader.put,
    "LONG_BINPUT": _Reader.put,
    "MEMOIZE": _Reader.memoize,
    "GET": _Reader.get,
    "BINGET": _Reader.get,
    "LONG_BINGET": _Reader.get,
    "GLOBAL": _Reader.name,
    "STACK_GLOBAL": _Reader.name_on_stack,
    "REDUCE": _Reader.call,
    "NEWOBJ": _Reader.call,
    "NEWOBJ_EX": _Reader.call_with_names,
    "BUILD": _Reader.build,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.extend,
    "ADDITEMS": _Reader.extend,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "TUPLE": _Reader.gather_tuple,
    "LIST": _Reader.gather_list,
    "DICT": _Reader.gather_dict,
    "FROZENSET": _Reader.gather_frozenset,
}
