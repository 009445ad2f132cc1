"""Protects leaves and keys of every kind in existing stores: their bytes are read and written unchanged."""

from ckstore.format.tree import decode_tree, encode_tree
from ckstore.state.capture import capture
from ckstore.state.placement import prepare_restore
from golden.make_leaves import PLACE, state
from support.states import difference


def test_golden_leaves_round_trip():
    content = PLACE.read_bytes()
    assert difference(prepare_restore(decode_tree(content, tensor_count=0), [], []).finish(), state()) is None
    assert encode_tree(capture(state()).tree) == content
