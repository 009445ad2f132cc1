"""The on-disk format: bytes to dataclasses and back. Pure functions, without files, clock or network.

``docs/FORMAT.md`` is normative for every byte here. An encoder refuses to write what its decoder refuses to read.

Start reading here, from the outside in:

    name = parse_manifest_file(run, file)          # paths.py: every file name in a store
    manifest = decode_manifest(content, expect=name)   # manifest.py = header.py + logical.py + location.py
    header = decode_frame_header(content)          # frame.py: one stored chunk; pack.py: superheader, directory, tail

- ``logical``: what the checkpoint id covers, with the losses: ``tree`` (nested state), ``tensors``.
- ``location``: packs and frames, and how the commit chose bases.
- ``zstd``: compressed sections of manifests, and the frames of a codec.
- ``records``: file records (JSON) and inner records (MessagePack), format version. ``wire``: fields, lengths, seals.

Not here: opening files (``io``, ``store``), encoding of chunk payloads (``codec``), and live tensors (``state``).
"""

from __future__ import annotations
