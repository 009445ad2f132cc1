"""Read one chunk through the chain of its bases, frame by frame, and find the frame that is damaged.

Invariants:
- The returned bytes have the chunk id of the last frame, or the checksum that this process computed with that chunk
  id; otherwise an error is raised.
- Besides the plain bytes, at most one frame is in memory. A pack stays open until ``close``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from ckstore.codec import chunk_codec
from ckstore.codec.frame_decoder import Check, Expected, FrameDecoder, check_header
from ckstore.errors import ChecksumError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.manifest import FrameRef, PackRef
from ckstore.hashing import NO_BASE, ChunkId, PackId
from ckstore.io.backend import ReadFile, ReadResult
from ckstore.io.buffers import BufferPool, map_zeros
from ckstore.store.damage import checkpoints_with, shortened
from ckstore.store.memory_budget import read_buffer_nbytes
from ckstore.store.pack_reader import open_pack, read_frame
from ckstore.store.repository import Repository

Chain = Sequence[tuple[PackRef, FrameRef]]
"""A frame and all its bases, each with its pack; the deepest base comes first."""


class ChainReader:
    """Reads chunks whose frames need bases. Used by one thread at a time, like its decoder.

    Args:
        repository: The store.
        decoder: Decodes the frames. Its own buffer is used for roundings of roundings.
        pool: Read buffers, of which one is used at a time; None for a buffer of its own.
        files: Packs that the caller has opened and will close. Other packs are opened when they are needed.
    """

    def __init__(
        self,
        repository: Repository,
        decoder: FrameDecoder,
        *,
        pool: BufferPool | None = None,
        files: Mapping[PackId, ReadFile] | None = None,
    ) -> None:
        self._repository = repository
        self._decoder = decoder
        self._pool = pool
        self._open_files = {} if files is None else files
        self._has_own_pool = pool is None
        self._spare: memoryview | None = None
        self._files: dict[PackId, ReadFile] = {}

    def __enter__(self) -> ChainReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the packs that were opened here and free the memory. A later read opens them again."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._spare = None
        if self._has_own_pool and self._pool is not None:
            self._pool.close()
            self._pool = None

    def read(
        self, chain: Chain, expected_nbytes: int, destination: memoryview, *, plain_xxh3: int | None = None
    ) -> None:
        """Write the chunk of the last frame into ``destination``, which is ``expected_nbytes`` long.

        Args:
            chain: The frame and its bases.
            expected_nbytes: Plain bytes of the last frame.
            destination: Receives the plain bytes.
            plain_xxh3: Their xxh3, if this process computed it together with the chunk id; compared instead of that.

        Raises:
            CorruptError: A frame is damaged. The error names its pack and offset, the chain, and the checkpoints of
                the run that need it.
            MissingChunkError: A pack is missing.
            UnsupportedError: A frame needs a codec that this version does not have.
        """
        assert len(destination) == expected_nbytes, "the destination must be as long as the chunk"
        try:
            for _ in self._decode_chain(chain, destination, base_check="none", plain_xxh3=plain_xxh3):
                pass
        except (ChecksumError, MalformedError, UnsupportedError) as error:
            raise self.blame(chain, expected_nbytes, error) from error

    def blame(self, chain: Chain, expected_nbytes: int, error: CkstoreError) -> CkstoreError:
        """Read each frame of a chain again, check it by itself, and return the error of the damaged one.

        Overwrites the decoder's own buffer.

        Args:
            chain: The chain that could not be read.
            expected_nbytes: Plain bytes of its last frame.
            error: The error of the failed read.
        """
        index, fault = self._find_fault(chain, expected_nbytes)
        if fault is None:
            index, fault = len(chain) - 1, error
            if isinstance(error, CorruptError):
                fault = type(error)(
                    f"{error.what}, although every frame of its chain was intact when it was read again",
                    todo="test the memory and the disk of this machine",
                )
        return locate_error(fault, self._repository, chain, index)

    def _find_fault(self, chain: Chain, expected_nbytes: int) -> tuple[int, CkstoreError | None]:
        index = 0
        try:
            # First the stored bytes: the frame that fails to decode may be intact and only its base damaged.
            for index, (pack, frame) in enumerate(chain):
                self._check_stored(pack, frame, base_of(chain, index))
            index = 0
            for begun in self._decode_chain(chain, self._decoder.own_buffer(expected_nbytes), base_check="blake3"):
                index = begun
        except (CorruptError, UnsupportedError) as fault:
            return index, fault
        return index, None

    def _check_stored(self, pack: PackRef, frame: FrameRef, base_id: ChunkId) -> None:
        result = self._fetch(pack, frame)
        try:
            header = decode_frame_header(result.view[:FRAME_HEADER_NBYTES], limits=self._repository.limits)
            payload = result.view[FRAME_HEADER_NBYTES:]
            check_header(header, Expected(frame.chunk_id, header.plain_nbytes, base_id), len(payload))
            check_payload(header, payload)
        finally:
            result.release()

    def _decode_chain(
        self, chain: Chain, destination: memoryview, *, base_check: Check, plain_xxh3: int | None = None
    ) -> Iterator[int]:
        """Decode the frames one after another. Yield the index of each frame before it is decoded."""
        plain: memoryview | None = None
        for index, (pack, frame) in enumerate(chain):
            yield index
            result = self._fetch(pack, frame)
            try:
                header = decode_frame_header(result.view[:FRAME_HEADER_NBYTES], limits=self._repository.limits)
                target = self._target(header, plain, destination)
                is_last = index == len(chain) - 1
                # The last frame must have the length of the destination.
                nbytes = len(destination) if is_last else len(target)
                expected = Expected(frame.chunk_id, nbytes, base_of(chain, index), plain_xxh3 if is_last else None)
                check: Check = "blake3" if is_last else base_check
                self._decoder.decode(result.view, expected, target, base=plain, check=check)
            finally:
                result.release()
            plain = target

    def _target(self, header: FrameHeader, base: memoryview | None, destination: memoryview) -> memoryview:
        """Return the memory that a frame is decoded to: its base's if that is as long, else other memory."""
        nbytes = header.plain_nbytes
        if chunk_codec.base_nbytes(header.steps, nbytes) != (0 if base is None else len(base)):
            raise MalformedError("a frame's base is missing, superfluous or of another length")
        if base is not None and len(base) == nbytes:
            return base
        if nbytes == len(destination):
            return destination
        chunk_nbytes_max = self._repository.limits.chunk_nbytes_max
        if self._spare is None:
            self._spare = map_zeros(chunk_nbytes_max)
        if base is not None and base.obj is self._spare.obj:
            # A rounding of a rounding: its base has at most half a chunk, and the destination at most a quarter.
            return self._decoder.own_buffer(chunk_nbytes_max)[chunk_nbytes_max - nbytes :]
        return self._spare[:nbytes]

    def _fetch(self, pack: PackRef, frame: FrameRef) -> ReadResult:
        file = self._open_files.get(pack.pack_id) or self._files.get(pack.pack_id)
        if file is None:
            file = self._files[pack.pack_id] = open_pack(self._repository, pack)
        if self._pool is None:
            self._pool = BufferPool(read_buffer_nbytes(self._repository.limits), 1)
        return read_frame(self._repository.backend, file, frame.offset, frame.frame_nbytes, self._pool)


def base_of(chain: Chain, index: int) -> ChunkId:
    """Return the chunk id of the base of one frame of a chain."""
    return chain[index - 1][1].chunk_id if index else NO_BASE


def locate_error(error: CkstoreError, repository: Repository, chain: Chain, index: int) -> CkstoreError:
    """Return the error with the frame's pack and offset, its chain, and the checkpoints that need it."""
    pack, frame = chain[index]
    names = [link.chunk_id.hex() for _, link in reversed(chain)]
    checkpoints = checkpoints_with(repository, pack.pack_id, frame)
    places = [f"pack {pack.pack_id.hex()}, offset {frame.offset}, chunk {frame.chunk_id.hex()[:16]}"]
    if len(chain) > 1:
        places.append("of the chain chunk " + " -> base ".join(name[:16] for name in names))
    if checkpoints:
        places.append("needed by " + shortened(checkpoints))
    facts = {
        **error.facts,
        "pack_id": pack.pack_id.hex(),
        "offset": frame.offset,
        "chunk_id": frame.chunk_id.hex(),
        "chain": tuple(names),
        "checkpoints": checkpoints,
    }
    return type(error)(error.what, where=", ".join(places), todo=error.todo, **facts)
