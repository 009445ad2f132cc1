"""Protects the table of losses: a wrong table is neither written nor accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckstore.config import Limits
from ckstore.errors import MalformedError
from ckstore.format.logical import check_losses, decode_logical, decode_losses, encode_logical, encode_losses
from ckstore.format.manifest import decode_manifest, encode_manifest
from ckstore.format.records import READABLE_VERSIONS, encode_inner
from ckstore.hashing import digest_of
from support.format_samples import sample_loss, sample_manifest

SAMPLE = sample_manifest()
LOSS = sample_loss()


def test_losses_round_trip():
    losses = (LOSS, replace(LOSS, storage=7, role="first", method="ternary", spike=1.5, numbers={}))
    assert decode_losses(memoryview(encode_losses(losses))) == losses
    assert decode_manifest(encode_manifest(SAMPLE)).losses == (LOSS,)


def test_exact_manifest_has_no_losses_and_its_old_id():
    exact = replace(SAMPLE.logical, losses=())
    section = encode_logical(b"", exact)
    assert encode_logical(b"", SAMPLE.logical) == section + encode_losses([LOSS])
    for version in READABLE_VERSIONS:
        assert decode_logical(memoryview(section), limits=Limits(), version=version)[1].losses == ()


@pytest.mark.parametrize("version", [1, 2])
def test_old_versions_refuse_losses(version):
    section = memoryview(encode_logical(b"", SAMPLE.logical))
    with pytest.raises(MalformedError, match="trailing"):
        decode_logical(section, limits=Limits(), version=version)


WRONG = {
    "no storage": {"storage": 3},
    "an empty storage": {"storage": 1},
    "a storage of integers": {"storage": 2},
    "an unknown role": {"role": "third"},
    "a method that is no word": {"method": "Grid 2"},
    "no number": {"max_abs": float("nan")},
    "infinite bits": {"bits": float("inf")},
    "a negative error": {"rms_error": -1.0},
    "an RMS above the maximum": {"rms_error": 0.2},
    "more than all kept": {"kept": 1.5},
    "no hop": {"hops": 0},
    "a negative spike": {"spike": -0.5},
    "too many numbers": {"numbers": {f"n{number}": 0.0 for number in range(17)}},
    "a number that is not finite": {"numbers": {"step": float("nan")}},
    "a nameless number": {"numbers": {"": 1.0}},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_invalid_losses_are_refused(changes):
    wrong = replace(LOSS, **changes)
    with pytest.raises(MalformedError):
        check_losses([wrong], SAMPLE.storages, None)
    with pytest.raises(MalformedError):
        encode_manifest(replace(SAMPLE, losses=(wrong,)))


def test_storage_has_one_loss_row():
    with pytest.raises(MalformedError, match="twice"):
        check_losses([LOSS, LOSS], SAMPLE.storages, None)


def test_empty_table_and_wrong_rows_are_refused():
    for rows in ([], [[1, 2]], {"storage": 0}, [[0, "weight", "grid", 1, 1.0, 1.0, 1.0, 1.0, 1, None]]):
        with pytest.raises(MalformedError):
            decode_losses(memoryview(encode_inner(rows)))


@pytest.mark.parametrize(("fidelity", "losses"), [("exact", (LOSS,)), ("near", ()), ("", (LOSS,)), ("Near!", (LOSS,))])
def test_header_that_contradicts_the_losses_is_refused(fidelity, losses):
    manifest = replace(SAMPLE, header=replace(SAMPLE.header, fidelity=fidelity), losses=losses)
    with pytest.raises(MalformedError):
        # The id is made to fit, so that only the contradiction can be refused.
        encode_manifest(with_right_id(manifest))
    assert decode_manifest(encode_manifest(with_right_id(SAMPLE))).losses == (LOSS,)


def with_right_id(manifest):
    from ckstore.format.manifest import logical_record

    section = encode_logical(logical_record(manifest.header), manifest.logical)
    return replace(manifest, header=replace(manifest.header, checkpoint_id=digest_of(section)))


def test_errors_are_relative_to_the_values():
    assert LOSS.rel_rms == 0.0625 / 1.5
    assert replace(LOSS, rms_error=0.0, rms_value=0.0).rel_rms == 0
    assert replace(LOSS, rms_value=0.0).rel_rms == float("inf")
