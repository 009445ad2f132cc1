"""Write the golden bytes of the current format version to ``tests/golden/v<version>/format``.

Run it by hand, once for each format version, never from a test: ``python tests/golden/make_golden.py``. An existing
file is never replaced. When the bytes of a structure change, the format version changes too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ckstore.format.manifest import encode_manifest
from ckstore.format.records import FORMAT_VERSION, encode_record
from ckstore.hashing import digest_of
from support.format_samples import (
    sample_manifest,
    sample_pack,
    sample_records,
    sample_replay_manifest,
    sample_tag_on_point,
)
from support.journal_samples import sample_segment
from support.rank_parts import sample_ranks_manifest


def golden_files() -> dict[str, bytes]:
    """Return the bytes of every kind of file, by name."""
    files = {"sample.pack": sample_pack(), "sample.ckm": encode_manifest(sample_manifest())}
    files["ranks.ckm"] = sample_ranks_manifest()
    files["replay.ckm"] = encode_manifest(sample_replay_manifest())
    files["journal.ckj"] = sample_segment()
    files["tag_on_point.json"] = encode_record(sample_tag_on_point())
    for record in sample_records():
        files[f"{record.kind}.json"] = encode_record(record)
    return files


def main() -> int:
    """Write the missing files."""
    folder = Path(__file__).parent / f"v{FORMAT_VERSION}" / "format"
    folder.mkdir(parents=True, exist_ok=True)
    files = golden_files()
    listed = folder / "digests.json"
    digests = json.loads(listed.read_text()) if listed.exists() else {}
    # Existing entries stay as they are, like the files; only new ones are added.
    digests = {name: digest_of(content).hex() for name, content in files.items()} | digests
    for name, content in files.items():
        if (folder / name).exists():
            print(f"{name} exists and stays as it is")
        else:
            (folder / name).write_bytes(content)
    listed.write_bytes(json.dumps(digests, indent=2, sort_keys=True).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
