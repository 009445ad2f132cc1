"""Protects the names of files: parsing is the inverse of building, and nothing foreign is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import UsageError
from ckstore.format import layout
from ckstore.format.layout import ClaimName, ManifestName
from ckstore.ids import PackId

TOKEN = "0123456789abcdef" * 2
seqs = st.integers(0, layout.SEQ_MAX)


@given(seq=seqs, step=st.integers(0, layout.STEP_MAX), generation=st.integers(0, layout.GENERATION_MAX))
def test_manifest_names_come_back(seq, step, generation):
    name = ManifestName("main", seq, step, generation)
    assert layout.parse_manifest_file("main", name.file) == name
    assert name.path == f"manifests/main/{name.file}"


@given(seq=seqs)
def test_names_among_claims_come_back(seq):
    def last(name):
        return name.rsplit("/", 1)[1]

    assert layout.parse_claim_file(last(layout.claim_name("r", seq))) == ClaimName(seq, "claim")
    assert layout.parse_claim_file(last(layout.drop_mark_name("r", seq))) == ClaimName(seq, "dropped")
    assert layout.parse_claim_file(last(layout.intent_name("r", seq, TOKEN))) == ClaimName(seq, "intent", TOKEN)


@given(pack_id=st.binary(min_size=16, max_size=16).map(PackId))
def test_pack_names_come_back_and_lie_in_a_folder_made_by_init(pack_id):
    folder, file = layout.pack_name(pack_id).rsplit("/", 1)
    assert layout.parse_pack_file(file) == pack_id
    assert folder in layout.pack_folders()


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_foreign_but_never_an_error(text):
    for name in (layout.parse_manifest_file("main", text), layout.parse_claim_file(text)):
        assert name is None or isinstance(name, (ManifestName, ClaimName))
    assert layout.parse_pack_file(text) is None
    assert layout.parse_draft_file(text) is None


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
def test_a_name_that_would_not_be_built_again_is_foreign(file):
    assert layout.parse_manifest_file("main", file) is None


def test_claims_with_another_form_are_foreign():
    for file in ("1", "000000001", "00000001.dropped2", "00000001.intent-xyz", "00000001.intent-" + "A" * 32):
        assert layout.parse_claim_file(file) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "-a", ".a", "a b", "a\n", "a\0", "é", "a" * 129, 7])
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(UsageError):
        layout.check_name(name, "run")


@pytest.mark.parametrize("name", ["a", "A-1_x.y", "0", "a" * 128])
def test_ordinary_names_pass(name):
    assert layout.check_name(name, "run") == name


@pytest.mark.parametrize("name", ["latest", "41000"])
def test_a_tag_that_reads_as_another_reference_is_refused(name):
    assert layout.check_name(name, "run") == name
    with pytest.raises(UsageError):
        layout.check_name(name, "tag")


def test_builders_refuse_runs_that_leave_the_store():
    for build in (layout.manifests_folder, layout.claims_folder, layout.tags_folder, layout.lease_name):
        with pytest.raises(UsageError):
            build("../x")


def test_each_trash_folder_keeps_runs_apart():
    assert layout.trash_manifests_folder(TOKEN, "a") != layout.trash_manifests_folder(TOKEN, "b")
    assert layout.is_token(layout.trash_folder(TOKEN).rsplit("/", 1)[1])


def test_drafts_come_back_whatever_they_will_become():
    assert layout.parse_draft_file(layout.draft_name(TOKEN).rsplit("/", 1)[1]) == TOKEN
    assert layout.parse_draft_file(layout.draft_name(TOKEN, "lease").rsplit("/", 1)[1]) == TOKEN
