"""Protects file names: parsing is the inverse of building, and foreign names are ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.config import STEP_MAX, check_name
from ckstore.errors import UsageError
from ckstore.format import paths
from ckstore.format.paths import ClaimName, ManifestName, SegmentName
from ckstore.hashing import PackId

TOKEN = "0123456789abcdef" * 2
seqs = st.integers(0, paths.SEQ_MAX)


@given(seq=seqs, step=st.integers(0, STEP_MAX), generation=st.integers(0, paths.GENERATION_MAX))
def test_manifest_names_come_back(seq, step, generation):
    name = ManifestName("main", seq, step, generation)
    assert paths.parse_manifest_file("main", name.file) == name
    assert name.path == f"manifests/main/{name.file}"


@given(order=st.integers(0, paths.ORDER_MAX), token=st.binary(min_size=16, max_size=16))
def test_segment_names_come_back(order, token):
    name = SegmentName("main", order, token)
    assert paths.parse_segment_file("main", name.file) == name
    assert name.path == f"journals/main/{name.file}"


def test_segments_with_another_form_are_foreign():
    for file in (
        f"1.{TOKEN}.ckj",
        f"000000001.{TOKEN}.ckj",
        f"00000001.{TOKEN[:-2]}.ckj",
        f"00000001.{TOKEN.upper()}.ckj",
        f"00000001.{TOKEN}.ckm",
        f"00000001.{TOKEN}.ckj\n",
        f"00000001-{TOKEN}.ckj",
    ):
        assert paths.parse_segment_file("main", file) is None


@given(seq=seqs)
def test_names_among_claims_come_back(seq):
    def last(name):
        return name.rsplit("/", 1)[1]

    assert paths.parse_claim_file(last(paths.claim_name("r", seq))) == ClaimName(seq, "claim")
    assert paths.parse_claim_file(last(paths.drop_mark_name("r", seq))) == ClaimName(seq, "dropped")
    assert paths.parse_claim_file(last(paths.intent_name("r", seq, TOKEN))) == ClaimName(seq, "intent", TOKEN)


@given(pack_id=st.binary(min_size=16, max_size=16).map(PackId))
def test_pack_names_come_back_in_an_existing_folder(pack_id):
    folder, file = paths.pack_name(pack_id).rsplit("/", 1)
    assert paths.parse_pack_file(file) == pack_id
    assert folder in paths.pack_folders()


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_foreign(text):
    for name in (paths.parse_manifest_file("main", text), paths.parse_claim_file(text)):
        assert name is None or isinstance(name, (ManifestName, ClaimName))
    assert paths.parse_pack_file(text) is None
    assert paths.parse_draft_file(text) is None
    assert paths.parse_segment_file("main", text) is None


@pytest.mark.parametrize(
    "file",
    [
        "00000001-000000000001.0.ckm\n",
        "00000001-000000000001.00.ckm",
        "000000001-000000000001.0.ckm",
        "00000001-0000000000001.0.ckm",
        "1-1.0.ckm",
        "00000001-000000000001.ckm",
        "00000001-000000000001.0.ckm.tmp",
        "٠٠٠٠٠٠٠١-000000000001.0.ckm",  # noqa: RUF001 - Arabic digits are digits to int()
    ],
)
def test_name_in_another_form_is_foreign(file):
    assert paths.parse_manifest_file("main", file) is None


def test_claims_with_another_form_are_foreign():
    for file in ("1", "000000001", "00000001.dropped2", "00000001.intent-xyz", "00000001.intent-" + "A" * 32):
        assert paths.parse_claim_file(file) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "-a", ".a", "a b", "a\n", "a\0", "é", "a" * 129, 7])
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(UsageError):
        check_name(name, "run")


@pytest.mark.parametrize("name", ["a", "A-1_x.y", "0", "a" * 128])
def test_ordinary_names_pass(name):
    assert check_name(name, "run") == name


@pytest.mark.parametrize("name", ["latest", "41000"])
def test_tag_that_looks_like_a_reference_is_refused(name):
    assert check_name(name, "run") == name
    with pytest.raises(UsageError):
        check_name(name, "tag")


def test_builders_refuse_runs_that_leave_the_store():
    for build in (paths.manifests_folder, paths.claims_folder, paths.tags_folder, paths.lease_name):
        with pytest.raises(UsageError):
            build("../x")


def test_trash_folders_separate_runs():
    assert paths.trash_manifests_folder(TOKEN, "a") != paths.trash_manifests_folder(TOKEN, "b")
    assert paths.is_token(paths.trash_folder(TOKEN).rsplit("/", 1)[1])


def test_draft_names_come_back():
    assert paths.parse_draft_file(paths.draft_name(TOKEN).rsplit("/", 1)[1]) == TOKEN
    assert paths.parse_draft_file(paths.draft_name(TOKEN, "lease").rsplit("/", 1)[1]) == TOKEN
