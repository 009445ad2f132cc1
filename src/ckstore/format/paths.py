"""Build and parse every file name in a store; no other module does.

Names are relative POSIX paths. Parsing is the exact inverse of building: ``parse_*`` returns None for any name that
these functions would not build.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ckstore.config import check_name
from ckstore.hashing import PACK_ID_NBYTES, PackId

STORE_FILE = "store.json"
CONFIG_FILE = "config.json"
GC_LOCK_FILE = "gc.lock"
CONFIG_LOCK_FILE = "config.lock"
HOME_FILE = "home.json"
OWNER_FILE = "owner.json"
TOP_FILES = (STORE_FILE, CONFIG_FILE, GC_LOCK_FILE, CONFIG_LOCK_FILE, HOME_FILE, OWNER_FILE)
PACKS_FOLDER = "packs"
MANIFESTS_FOLDER = "manifests"
CLAIMS_FOLDER = "claims"
TAGS_FOLDER = "tags"
LEASES_FOLDER = "leases"
TRASH_FOLDER = "trash"
QUARANTINE_FOLDER = "quarantine"
TMP_FOLDER = "tmp"
CACHE_FOLDER = "cache"
"""Created when first needed; may be removed at any time."""
RESERVE_FOLDER = "reserve"
"""Files whose removal gives a full disk space for gc; see ``store.reserve``."""
JOURNALS_FOLDER = "journals"
"""Created with the first journal of a run; see ``store.journals``."""

TOP_FOLDERS = (
    PACKS_FOLDER,
    MANIFESTS_FOLDER,
    CLAIMS_FOLDER,
    TAGS_FOLDER,
    LEASES_FOLDER,
    TRASH_FOLDER,
    QUARANTINE_FOLDER,
    TMP_FOLDER,
)

SEQ_MAX = 10**18 - 1
GENERATION_MAX = 10**9 - 1
ORDER_MAX = 10**18 - 1
ClaimKind = Literal["claim", "dropped", "intent", "published"]
_PACK = re.compile(r"([0-9a-f]{32})\.pack", re.ASCII)
_MANIFEST = re.compile(r"([0-9]{8,18})-([0-9]{12,18})\.([0-9]{1,9})\.ckm", re.ASCII)
_CLAIM = re.compile(r"([0-9]{8,18})(?:\.(dropped|published)|\.intent-([0-9a-f]{32}))?", re.ASCII)
_DRAFT = re.compile(r"([0-9a-f]{32})\.[a-z0-9]{1,16}", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SEGMENT = re.compile(r"([0-9]{8,18})\.([0-9a-f]{32})\.ckj", re.ASCII)


def pack_folder(pack_id: PackId) -> str:
    """Return the folder of a pack."""
    return f"{PACKS_FOLDER}/{pack_id[:1].hex()}"


def pack_folders() -> list[str]:
    """Return all 256 folders of packs."""
    return [f"{PACKS_FOLDER}/{first:02x}" for first in range(256)]


def pack_file(pack_id: PackId) -> str:
    """Return the file name of a pack, without its folder."""
    assert len(pack_id) == PACK_ID_NBYTES, "a pack id has 16 bytes"
    return f"{pack_id.hex()}.pack"


def pack_name(pack_id: PackId) -> str:
    """Return the name of a pack."""
    return f"{pack_folder(pack_id)}/{pack_file(pack_id)}"


def parse_pack_file(file: str) -> PackId | None:
    """Return the pack id in the file name of a pack."""
    found = _PACK.fullmatch(file)
    return PackId(bytes.fromhex(found[1])) if found else None


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """The parts of a manifest's name; ordered by run, seq, step, generation."""

    run: str
    seq: int
    step: int
    generation: int = 0

    @property
    def file(self) -> str:
        """The file name, without its folder."""
        return f"{self.seq:08d}-{self.step:012d}.{self.generation}.ckm"

    @property
    def path(self) -> str:
        """The name, including its folder."""
        return f"{manifests_folder(self.run)}/{self.file}"


def manifests_folder(run: str) -> str:
    """Return the folder of a run's manifests."""
    return f"{MANIFESTS_FOLDER}/{check_name(run, 'run')}"


def parse_manifest_file(run: str, file: str) -> ManifestName | None:
    """Return the parts of a manifest's file name."""
    found = _MANIFEST.fullmatch(file)
    if found is None:
        return None
    name = ManifestName(run, int(found[1]), int(found[2]), int(found[3]))
    return name if name.file == file else None


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """The parts of the name of a journal's segment; ordered by run, order, token."""

    run: str
    order: int
    token: bytes

    @property
    def file(self) -> str:
        """The file name, without its folder."""
        return f"{self.order:08d}.{self.token.hex()}.ckj"

    @property
    def path(self) -> str:
        """The name, including its folder."""
        return f"{journal_folder(self.run)}/{self.file}"


def journal_folder(run: str) -> str:
    """Return the folder of the segments of a run's journal."""
    return f"{JOURNALS_FOLDER}/{check_name(run, 'run')}"


def parse_segment_file(run: str, file: str) -> SegmentName | None:
    """Return the parts of a segment's file name."""
    found = _SEGMENT.fullmatch(file)
    if found is None:
        return None
    name = SegmentName(run, int(found[1]), bytes.fromhex(found[2]))
    return name if name.file == file else None


@dataclass(frozen=True, slots=True)
class ClaimName:
    """The parts of a file name in a folder of claims; ``token`` is that of an intent."""

    seq: int
    kind: ClaimKind
    token: str = ""


def claims_folder(run: str) -> str:
    """Return the folder of a run's claims, drop marks and intents."""
    return f"{CLAIMS_FOLDER}/{check_name(run, 'run')}"


def claim_name(run: str, seq: int) -> str:
    """Return the name of the claim that reserves a seq."""
    return f"{claims_folder(run)}/{seq:08d}"


def drop_mark_name(run: str, seq: int) -> str:
    """Return the name of the mark that drops all generations of a seq."""
    return f"{claims_folder(run)}/{seq:08d}.dropped"


def published_mark_name(run: str, seq: int) -> str:
    """Return the name of the mark that a seq was published, which makes the loss of its manifest detectable."""
    return f"{claims_folder(run)}/{seq:08d}.published"


def intent_name(run: str, seq: int, token: str) -> str:
    """Return the name of an intent to drop or demote a seq."""
    assert _TOKEN.fullmatch(token), "a token is 32 hex digits"
    return f"{claims_folder(run)}/{seq:08d}.intent-{token}"


def parse_claim_file(file: str) -> ClaimName | None:
    """Return the parts of a file name in a folder of claims."""
    found = _CLAIM.fullmatch(file)
    if found is None or f"{int(found[1]):08d}" != found[1]:
        return None
    if found[2]:
        return ClaimName(int(found[1]), "dropped" if found[2] == "dropped" else "published")
    if found[3]:
        return ClaimName(int(found[1]), "intent", found[3])
    return ClaimName(int(found[1]), "claim")


def tags_folder(run: str) -> str:
    """Return the folder of a run's tags."""
    return f"{TAGS_FOLDER}/{check_name(run, 'run')}"


def tag_name(run: str, tag: str) -> str:
    """Return the name of a tag."""
    return f"{tags_folder(run)}/{check_name(tag, 'tag')}"


def lease_name(run: str) -> str:
    """Return the name of a run's lease."""
    return f"{LEASES_FOLDER}/{check_name(run, 'run')}"


def draft_name(token: str, kind: str = "ckm") -> str:
    """Return the name of a manifest, or of another kind of file, before it is published."""
    name = f"{token}.{kind}"
    assert parse_draft_file(name) == token, "a draft is 32 hex digits and a short kind"
    return f"{TMP_FOLDER}/{name}"


def parse_draft_file(file: str) -> str | None:
    """Return the token in a draft's file name."""
    found = _DRAFT.fullmatch(file)
    return found[1] if found else None


def is_token(file: str) -> bool:
    """Say whether a name is a random token, like the names of trash folders."""
    return _TOKEN.fullmatch(file) is not None


def trash_folder(gc_id: str) -> str:
    """Return the trash folder of one collection or drop; ids are never reused."""
    assert _TOKEN.fullmatch(gc_id), "a gc id is 32 hex digits"
    return f"{TRASH_FOLDER}/{gc_id}"


def trash_packs_folder(gc_id: str) -> str:
    """Return the trash folder of the packs of one collection."""
    return f"{trash_folder(gc_id)}/packs"


def trash_manifests_folder(gc_id: str, run: str) -> str:
    """Return the trash folder of a run's manifests of one collection or drop."""
    return f"{trash_folder(gc_id)}/manifests/{check_name(run, 'run')}"


def trash_journal_folder(gc_id: str, run: str) -> str:
    """Return the trash folder of the segments of a run's journal of one collection."""
    return f"{trash_folder(gc_id)}/journals/{check_name(run, 'run')}"


def quarantine_packs_folder() -> str:
    """Return the folder of damaged packs."""
    return f"{QUARANTINE_FOLDER}/packs"


def quarantine_journal_folder(run: str) -> str:
    """Return the folder of the damaged segments of a run's journal."""
    return f"{QUARANTINE_FOLDER}/journals/{check_name(run, 'run')}"


def quarantine_manifests_folder(run: str) -> str:
    """Return the folder of the damaged manifests of a run."""
    return f"{QUARANTINE_FOLDER}/manifests/{check_name(run, 'run')}"
