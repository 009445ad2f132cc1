"""Errors as plain records, so that they cross processes and machines without pickle.

An error of ckstore keeps its class, its three sentences and its facts; an OSError keeps its class and number. Texts and
facts are cut to a limit. Any other exception arrives as a class that the caller names, with the original class in its
text.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import NamedTuple

from ckstore import errors
from ckstore.errors import CkstoreError
from ckstore.format.records import ShortText

Scalar = None | bool | int | float | str
Fact = Scalar | list[str]

TEXT_NBYTES_MAX = 8 << 10
"""Limit for one text of an error. Longer text is cut."""

_FACTS_MAX, _FACT_NBYTES_MAX = 16, 1024
_ITEMS_MAX, _ITEM_NBYTES_MAX = 16, 128
_RESERVED = {"what", "where", "todo"}


class ErrorRecord(NamedTuple):
    """An error: name of its class, its sentences and its facts."""

    kind: ShortText
    what: str
    where: str | None
    todo: str | None
    facts: dict[str, Fact]


def record_of(error: BaseException, *, memory_text: str = "out of memory") -> ErrorRecord:
    """Return the record of an error.

    Args:
        error: The error.
        memory_text: The text for a MemoryError that has none.
    """
    kind = type(error).__name__
    if not isinstance(error, CkstoreError):
        number, text = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if isinstance(error, MemoryError):
            text = text or memory_text
        return ErrorRecord(kind, cut_text(text), None, None, _plain_facts({"errno": number}))
    todo, where = error.todo, error.where
    return ErrorRecord(
        kind,
        cut_text(error.what),
        None if where is None else cut_text(where),
        None if todo is None else cut_text(todo),
        _plain_facts(error.facts),
    )


def restored_error(record: ErrorRecord, *, source: str, other: type[CkstoreError]) -> Exception:
    """Return the error of a record, with its own class if that is a class of ckstore, an OSError or a MemoryError.

    Args:
        record: The record.
        source: What failed, such as ``the saver``.
        other: Class for all other errors.
    """
    kind = getattr(errors, record.kind, None)
    if isinstance(kind, type) and issubclass(kind, CkstoreError):
        return kind(record.what, where=record.where, todo=record.todo, **record.facts)
    if record.kind == "MemoryError":
        return MemoryError(record.what)
    builtin = getattr(builtins, record.kind, None)
    number = record.facts.get("errno")
    if isinstance(builtin, type) and issubclass(builtin, OSError) and isinstance(number, int):
        return OSError(number, record.what)
    return other(
        f"{source} failed with {record.kind}: {record.what}", todo="see the log, and report this", kind=record.kind
    )


def cut_text(text: str, nbytes_max: int = TEXT_NBYTES_MAX) -> str:
    """Return a text of at most so many bytes of UTF-8. Surrogates are replaced."""
    # Text from the operating system may contain surrogates, which UTF-8 cannot encode.
    content = text.encode("utf-8", "replace")
    if len(content) <= nbytes_max:
        return content.decode()
    return content[: nbytes_max - 3].decode("utf-8", "ignore") + "..."


def _plain_facts(facts: Mapping[str, object]) -> dict[str, Fact]:
    present = [(name, value) for name, value in facts.items() if value is not None and name not in _RESERVED]
    return {cut_text(name, _ITEM_NBYTES_MAX): _plain_fact(value) for name, value in present[:_FACTS_MAX]}


def _plain_fact(value: object) -> Fact:
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else f"{value:#x}"[:_FACT_NBYTES_MAX]
    if isinstance(value, (list, tuple)):
        return [cut_text(str(item), _ITEM_NBYTES_MAX) for item in value[:_ITEMS_MAX]]
    return cut_text(str(value), _FACT_NBYTES_MAX)
