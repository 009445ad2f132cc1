"""Write ``leaves/tree.bin``: a tree with every kind of leaf and key that has its own name in the format.

Run it by hand, once for each new kind: existing bytes are kept forever.
"""

import argparse
import datetime
from collections import OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from uuid import UUID

from ckstore.format.tree import encode_tree
from ckstore.state.capture import capture
from ckstore.state.named_types import StandIn

PLACE = Path(__file__).parent / "leaves" / "tree.bin"


def state():
    """Return the state whose tree is written."""
    marked = OrderedDict(a=1)
    marked.note = "x"
    utc = datetime.timezone.utc
    return {
        "keys": {(1, "a"): 1, 0.5: 2, True: 3, None: 4, b"x": 5, 1 << 70: 6, "text": 7, 8: 9},
        "marked": marked,
        "count": [list(range(5, 1_100)), tuple(range(1_024))],
        "sets": [{3, 1, 2}, frozenset({"b", "a"}), deque([1], 4), deque()],
        "spaces": [SimpleNamespace(a=1), argparse.Namespace(b=2.5)],
        "bytes": [bytearray(b"x"), UUID(int=5)],
        "cuts": [range(1, 9, 2), slice(None, 3)],
        "paths": [Path("/a"), PurePosixPath("b"), PureWindowsPath("c:/d")],
        "exact": [Fraction(-1, 3), Decimal("1.50"), Decimal("sNaN3")],
        "times": [
            datetime.date(2024, 2, 29),
            datetime.time(1, 2, 3, 4, utc, fold=1),
            datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.timezone(datetime.timedelta(hours=1), "x")),
            datetime.timedelta(-1, 2, 3),
        ],
        "named": [
            StandIn("enum", "m:Colour", {"name": "RED", "value": 1}),
            StandIn("namedtuple", "m:Point", {"x": 1, "y": 2}),
            StandIn("dataclass", "m.n:Outer.Options", {"rate": 0.5}),
        ],
    }


if __name__ == "__main__":
    assert not PLACE.exists(), "golden bytes are never replaced"
    PLACE.write_bytes(encode_tree(capture(state()).tree))
