"""Protects the errors: class tree, codes and exit codes that programs rely on, and pickling.

Codes are append-only: lines here are added, never changed.
"""

from __future__ import annotations

import pickle

import pytest

from ckstore import errors
from ckstore.errors import BackendError, CkstoreError, LeafTypeError, MissingChunkError, NotFoundError

TREE = {
    "CkstoreError": ("Exception", "error", 1),
    "NotFoundError": ("CkstoreError", "not-found", 10),
    "ConflictError": ("CkstoreError", "conflict", 11),
    "LockHeldError": ("ConflictError", "lock-held", 11),
    "CorruptError": ("CkstoreError", "corrupt", 12),
    "ChecksumError": ("CorruptError", "checksum", 12),
    "MalformedError": ("CorruptError", "malformed", 12),
    "MissingChunkError": ("CorruptError", "missing-chunk", 12),
    "UnsupportedError": ("CkstoreError", "unsupported", 13),
    "CapacityError": ("CkstoreError", "capacity", 14),
    "BackendError": ("CkstoreError", "backend", 15),
    "UnreachableError": ("BackendError", "unreachable", 15),
    "BoundError": ("CkstoreError", "bound", 16),
    "SaverError": ("CkstoreError", "saver", 17),
    "RankError": ("CkstoreError", "rank", 18),
    "ReplayError": ("CkstoreError", "replay", 19),
    "UsageError": ("CkstoreError", "usage", 2),
    "LeafTypeError": ("UsageError", "leaf-type", 2),
}
KINDS = [getattr(errors, name) for name in TREE]


def test_tree_codes_and_exit_codes():
    found = {
        name: (kind.__bases__[0].__name__, kind.code, kind.exit_code)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, CkstoreError)
    }
    assert found == TREE


def test_only_wrong_calls_are_value_errors():
    assert {kind.__name__ for kind in KINDS if issubclass(kind, ValueError)} == {"UsageError", "LeafTypeError"}
    assert {kind.__name__ for kind in KINDS if issubclass(kind, LookupError)} == {"NotFoundError"}
    assert not any(issubclass(kind, OSError) for kind in KINDS)


def test_codes_are_unique():
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_message_has_what_where_and_advice(kind):
    error = kind("it broke", where="/store/packs/ab", todo="mend it", offset=64)
    assert str(error) == "it broke: /store/packs/ab. Mend it"
    assert (error.what, error.where, error.todo, error.offset) == ("it broke", "/store/packs/ab", "mend it", 64)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_message_without_place_and_advice_is_short(kind):
    assert str(kind("it broke")) == "it broke"


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_survive_pickling_by_others(kind, protocol):
    error = kind("it broke", where="/store", todo="mend it", pack_id="ab", offset=7, paths=(("a", 0),))
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.pack_id, again.offset, again.paths, again.todo) == ("ab", 7, (("a", 0),), "mend it")


def test_unknown_fact_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'offset'"):
        NotFoundError("it is gone").offset  # noqa: B018


def test_is_transient_survives_pickling():
    assert BackendError("it failed").is_transient is False
    error = pickle.loads(pickle.dumps(BackendError("it failed", is_transient=True)))
    assert error.is_transient is True


def test_leaf_type_error_carries_the_path():
    assert LeafTypeError("no", path=("a", 0)).path == ("a", 0)
    assert MissingChunkError("no", pack_id="ab").pack_id == "ab"


def test_copied_error_is_equal_and_has_no_traceback():
    try:
        try:
            raise OSError(28, "no room", "/a")
        except OSError as error:
            raise BackendError("it failed", where="here", todo="wait", is_transient=True, nbytes=7) from error
    except BackendError as error:
        old = error
    new = errors.copy_error(old)
    assert new is not old
    assert (str(new), new.is_transient, new.nbytes) == (str(old), True, 7)
    assert (new.__traceback__, new.__cause__.__traceback__) == (None, None)
    assert (type(new.__cause__), new.__cause__.filename) == (OSError, "/a")
    assert new.__suppress_context__
    assert old.__traceback__ is not None, "the raised error still has its traceback"


def test_error_that_cannot_be_copied_is_kept():
    class WithoutMessage(Exception):
        def __init__(self, name):
            super().__init__(f"reported by {name}")

    class Picky(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    for error in (WithoutMessage("a"), Picky(1, 2)):
        assert errors.copy_error(error) is error
