"""Every file name in a store, built and parsed here and nowhere else.

Names are relative POSIX paths. Parsing is the exact inverse of building: a name that would not be built again
letter for letter is foreign, and ``parse_*`` returns None for it.
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
"""Made when it is first needed, and nobody's loss when it is removed."""
RESERVE_FOLDER = "reserve"
"""Room for making room; see ``store.reserve``."""

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
ClaimKind = Literal["claim", "dropped", "intent", "published"]
_PACK = re.compile(r"([0-9a-f]{32})\.pack", re.ASCII)
_MANIFEST = re.compile(r"([0-9]{8,18})-([0-9]{12,18})\.([0-9]{1,9})\.ckm", re.ASCII)
_CLAIM = re.compile(r"([0-9]{8,18})(?:\.(dropped|published)|\.intent-([0-9a-f]{32}))?", re.ASCII)
_DRAFT = re.compile(r"([0-9a-f]{32})\.[a-z0-9]{1,16}", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{32}", re.ASCII)


def pack_folder(pack_id: PackId) -> str:
    """Return the folder that holds a pack."""
    return f"{PACKS_FOLDER}/{pack_id[:1].hex()}"


def pack_folders() -> list[str]:
    """Return all 256 folders that hold packs."""
    return [f"{PACKS_FOLDER}/{first:02x}" for first in range(256)]


def pack_file(pack_id: PackId) -> str:
    """Return the last part of a pack's name."""
    assert len(pack_id) == PACK_ID_NBYTES, "a pack id has 16 bytes"
    return f"{pack_id.hex()}.pack"


def pack_name(pack_id: PackId) -> str:
    """Return the name of a pack."""
    return f"{pack_folder(pack_id)}/{pack_file(pack_id)}"


def parse_pack_file(file: str) -> PackId | None:
    """Return the pack that the last part of a name stands for."""
    found = _PACK.fullmatch(file)
    return PackId(bytes.fromhex(found[1])) if found else None


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """What the name of a manifest says; orders by run, seq, step, generation."""

    run: str
    seq: int
    step: int
    generation: int = 0

    @property
    def file(self) -> str:
        """The last part of the name."""
        return f"{self.seq:08d}-{self.step:012d}.{self.generation}.ckm"

    @property
    def path(self) -> str:
        """The name."""
        return f"{manifests_folder(self.run)}/{self.file}"


def manifests_folder(run: str) -> str:
    """Return the folder of a run's manifests."""
    return f"{MANIFESTS_FOLDER}/{check_name(run, 'run')}"


def parse_manifest_file(run: str, file: str) -> ManifestName | None:
    """Return what the last part of a manifest's name says."""
    found = _MANIFEST.fullmatch(file)
    if found is None:
        return None
    name = ManifestName(run, int(found[1]), int(found[2]), int(found[3]))
    return name if name.file == file else None


@dataclass(frozen=True, slots=True)
class ClaimName:
    """What the name of a file among the claims says; ``token`` is the intent's."""

    seq: int
    kind: ClaimKind
    token: str = ""


def claims_folder(run: str) -> str:
    """Return the folder of a run's claims, drop marks and intents."""
    return f"{CLAIMS_FOLDER}/{check_name(run, 'run')}"


def claim_name(run: str, seq: int) -> str:
    """Return the name of the claim that makes a seq exclusive."""
    return f"{claims_folder(run)}/{seq:08d}"


def drop_mark_name(run: str, seq: int) -> str:
    """Return the name of the mark that every generation of a seq is to go."""
    return f"{claims_folder(run)}/{seq:08d}.dropped"


def published_mark_name(run: str, seq: int) -> str:
    """Return the name of the mark that a seq was published, by which the loss of its manifest shows."""
    return f"{claims_folder(run)}/{seq:08d}.published"


def intent_name(run: str, seq: int, token: str) -> str:
    """Return the name of an intent to drop or demote a seq."""
    assert _TOKEN.fullmatch(token), "a token is 32 hex digits"
    return f"{claims_folder(run)}/{seq:08d}.intent-{token}"


def parse_claim_file(file: str) -> ClaimName | None:
    """Return what the last part of a name among the claims says."""
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
    """Return the name of a manifest, or of a file of another kind, that is not in place yet."""
    name = f"{token}.{kind}"
    assert parse_draft_file(name) == token, "a draft is 32 hex digits and a short kind"
    return f"{TMP_FOLDER}/{name}"


def parse_draft_file(file: str) -> str | None:
    """Return the token in the last part of a draft's name."""
    found = _DRAFT.fullmatch(file)
    return found[1] if found else None


def is_token(file: str) -> bool:
    """Say whether a name is a fresh random one, as trash folders have."""
    return _TOKEN.fullmatch(file) is not None


def trash_folder(gc_id: str) -> str:
    """Return the folder of one collection or drop; its id is never used again."""
    assert _TOKEN.fullmatch(gc_id), "a gc id is 32 hex digits"
    return f"{TRASH_FOLDER}/{gc_id}"


def trash_packs_folder(gc_id: str) -> str:
    """Return the folder of the packs that one collection moved away."""
    return f"{trash_folder(gc_id)}/packs"


def trash_manifests_folder(gc_id: str, run: str) -> str:
    """Return the folder of the manifests of a run that one collection or drop moved away."""
    return f"{trash_folder(gc_id)}/manifests/{check_name(run, 'run')}"


def quarantine_packs_folder() -> str:
    """Return the folder of damaged packs."""
    return f"{QUARANTINE_FOLDER}/packs"


def quarantine_manifests_folder(run: str) -> str:
    """Return the folder of the damaged manifests of a run."""
    return f"{QUARANTINE_FOLDER}/manifests/{check_name(run, 'run')}"
