"""Read pickles without running them: `read_inert` for any pickle, stand-in classes for torch's own reader.

A normal unpickler imports and calls whatever the file names. `read_inert` replaces a class or function by a `Symbol`
and a call by a `Record`; the caller decides what they mean. torch's ``weights_only=True`` reader creates objects of
allowed classes only. `StandIns` creates an inert class under each name that is not allowed.

Invariants:
- Nothing that the file names is imported or called. Opcodes that need a running program are refused.
- `read_inert` takes memory in proportion to the file: an opcode makes at most one object, and parts are shared, not
copied.
"""

from __future__ import annotations

import io
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

from ckstore.errors import MalformedError, UnsupportedError

Stack = list[Any]


# Symbol and Record are neither dataclasses nor named tuples. `capture` stores those, but must refuse these.
class Symbol:
    """A class or function that the pickle names."""

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
    """A call that the pickle asks for.

    Attributes:
        kind: The class or function.
        arguments: The arguments of the call.
        state: The state to set on the result, or None.
        items: Items to append to the result.
        pairs: Keys and values to set in the result.
    """

    __slots__ = ("arguments", "items", "kind", "pairs", "state")

    def __init__(self, kind: Symbol, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def field(self, name: str) -> Any:
        """Return a field of the state, or None. The state of a class with slots is a tuple of two dicts."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return None


class _Mark:
    """Marks where a group of operands begins on the stack."""


_MARK = _Mark()


def read_inert(content: bytes, *, where: object = None) -> Any:
    """Return the object that a pickle describes, made of dicts, lists, tuples, plain values, symbols and records.

    Raises:
        MalformedError: It is not a pickle, or it contradicts itself.
        UnsupportedError: It needs a running program (persistent ids, extension codes).
    """
    reader = _Reader(where)
    try:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
            reader.do(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, EOFError, UnicodeDecodeError, OverflowError) as problem:
        raise MalformedError(f"not a valid pickle ({problem})"[:300], where=where) from None
    if len(reader.stack) != 1 or not reader.has_stopped or reader.stack[0] is _MARK:
        raise MalformedError("the pickle ends in the middle of an object", where=where)
    return reader.stack[0]


class _Reader:
    """The stack machine of a pickle. It calls nothing."""

    def __init__(self, where: object) -> None:
        self.stack: Stack = []
        self.has_stopped = False
        self._memo: dict[int, Any] = {}
        self._where = where

    def do(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
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
                f"the pickle contains the opcode {name}, which only a running program can execute", where=self._where,
                todo="save only tensors, dicts, lists and plain values",
            )  # fmt: skip

    def _last(self, count: int) -> Stack:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        found = self.stack[len(self.stack) - count :]
        if any(each is _MARK for each in found):
            raise ValueError("a mark is used as an object")
        return found

    def _since_mark(self) -> Stack:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                found = self.stack[index + 1 :]
                del self.stack[index:]
                return found
        raise IndexError("there is no mark on the stack")

    def stop(self, _: Any) -> None:
        """Note that the pickle is complete."""
        self.has_stopped = True

    def pop(self, _: Any) -> None:
        """Drop the top of the stack."""
        self.stack.pop()

    def pop_mark(self, _: Any) -> None:
        """Drop everything down to the mark."""
        self._since_mark()

    def duplicate(self, _: Any) -> None:
        """Push the top of the stack again."""
        self.stack.append(self.stack[-1])

    def put(self, index: int) -> None:
        """Save the top of the stack in the memo under a number."""
        self._memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        """Save the top of the stack in the memo under the next number."""
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        """Push an object from the memo."""
        self.stack.append(self._memo[index])

    def name(self, argument: str) -> None:
        """Push the symbol that the opcode names."""
        module, _, name = argument.partition(" ")
        # Protocols 0 to 2 use the Python 2 names of Python's own types.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.stack.append(Symbol(module, name))

    def name_on_stack(self, _: Any) -> None:
        """Replace a module and a name on the stack by their symbol."""
        module, name = self._last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name is not text")
        self.stack[len(self.stack) - 2 :] = [Symbol(module, name)]

    def call(self, _: Any) -> None:
        """Replace a function and its arguments by a record."""
        kind, arguments = self._last(2)
        self.stack[len(self.stack) - 2 :] = [_record(kind, arguments)]

    def call_with_names(self, _: Any) -> None:
        """Do the same with keyword arguments; they become the last positional argument."""
        kind, arguments, named = self._last(3)
        if not isinstance(arguments, tuple):
            raise TypeError("a call has no tuple of arguments")
        self.stack[len(self.stack) - 3 :] = [_record(kind, (*arguments, named) if named else arguments)]

    def build(self, _: Any) -> None:
        """Set the state of a record."""
        target, state = self._last(2)
        if not isinstance(target, Record):
            raise TypeError("only an object can take a state")
        if target.state is not None:
            raise TypeError("an object has two states")
        target.state = state
        self.stack.pop()

    def append(self, _: Any) -> None:
        """Append the top of the stack to a list."""
        target, item = self._last(2)
        self.stack.pop()
        _extend(target, [item])

    def extend(self, _: Any) -> None:
        """Append everything above the mark to a list, or add it to a set."""
        items = self._since_mark()
        _extend(self.stack[-1], items)

    def set_item(self, _: Any) -> None:
        """Set one item of a dict."""
        target, key, item = self._last(3)
        del self.stack[len(self.stack) - 2 :]
        _set_items(target, [key, item])

    def set_items(self, _: Any) -> None:
        """Set everything above the mark as items of a dict."""
        items = self._since_mark()
        _set_items(self.stack[-1], items)

    def gather_tuple(self, _: Any) -> None:
        """Make a tuple of everything above the mark."""
        self.stack.append(tuple(self._since_mark()))

    def gather_list(self, _: Any) -> None:
        """Make a list of everything above the mark."""
        self.stack.append(self._since_mark())

    def gather_frozenset(self, _: Any) -> None:
        """Make a frozenset of everything above the mark."""
        self.stack.append(frozenset(self._since_mark()))

    def gather_dict(self, _: Any) -> None:
        """Make a dict of everything above the mark."""
        found: dict[Any, Any] = {}
        _set_items(found, self._since_mark())
        self.stack.append(found)


def _record(kind: Any, arguments: Any) -> Record:
    if not isinstance(kind, Symbol) or not isinstance(arguments, tuple):
        raise TypeError("a call has no name, or no tuple of arguments")
    return Record(kind, arguments)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, Record):
        target.items.extend(items)
    elif isinstance(target, (list, set)):
        target.extend(items) if isinstance(target, list) else target.update(items)
    else:
        raise TypeError("only a list or a set can take items")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise ValueError("a key has no value")
    pairs = list(zip(items[::2], items[1::2], strict=True))
    if isinstance(target, Record):
        target.pairs.extend(pairs)
    elif isinstance(target, dict):
        # Records are compared by identity here. The caller checks whether two of them mean the same key.
        target.update(pairs)
    else:
        raise TypeError("only a dict can take pairs")


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


class StandIn:
    """An object of a class, or the result of a function, that torch's reader must not create.

    Attributes:
        kind: The name of the class or function, with its module.
        arguments: The arguments of the call.
        state: The state to set on the result, or None.
    """

    kind: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Any:
        """Keep the arguments; run nothing."""
        stand_in = super().__new__(cls)
        stand_in.arguments, stand_in.state = arguments, None
        return stand_in

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


class StandIns:
    """The stand-in classes for one file.

    Attributes:
        containers: ``id`` of a dict or list that replaces an object -> name of its class, arguments of its call, and
            the container itself. The reference to the container keeps its ``id`` from being reused.
    """

    def __init__(self) -> None:
        self.containers: dict[int, tuple[str, tuple[Any, ...], Any]] = {}
        self._classes: dict[str, type] = {}

    def __len__(self) -> int:
        return len(self._classes)

    @property
    def names(self) -> list[str]:
        """The names of the classes and functions, sorted."""
        return sorted(self._classes)

    @property
    def allowed(self) -> list[tuple[Any, str]]:
        """The argument for ``torch.serialization.safe_globals``."""
        return [(stand_in, name) for name, stand_in in self._classes.items()]

    def add(self, name: str) -> bool:
        """Create the stand-in for a class or function; return False if it exists already."""
        if name in self._classes:
            return False
        self._classes[name] = type(name, (StandIn,), {"kind": name})
        return True

    def replace_by_container(self, form: type[OrderedDict[Any, Any]] | type[list[Any]], name: str) -> bool:
        """Create real dicts or lists instead of stand-ins for this class, because the file adds items to its objects.

        Returns:
            False if there is no stand-in of this name, or if it creates containers already.
        """
        if not issubclass(self._classes.get(name, object), StandIn):
            return False

        def make(_: type, *arguments: Any) -> Any:
            # torch's reader adds items to exactly these types, not to their subclasses.
            container = form()
            self.containers[id(container)] = (name, arguments, container)
            return container

        self._classes[name] = type(name, (), {"__new__": make})
        return True
