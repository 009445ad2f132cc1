"""Read one chunk back through the chain of its bases, frame by frame, and say which of them is damaged.

Invariants:
- What is returned has the identity that the last frame of the chain names, or the checksum that its reader took
  together with it, or an error is raised.
- At most one frame is in memory beside the plain bytes; a pack that was opened stays open until ``close``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from ckstore.codec import chunk_codec
from ckstore.codec.frame_decoder import Check, Expected, FrameDecoder, check_header
from ckstore.config import Limits
from ckstore.errors import ChecksumError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.manifest import FrameRef, PackRef
from ckstore.hashing import NO_BASE, ChunkId, PackId
from ckstore.io.backend import ReadFile, ReadResult
from ckstore.io.buffers import BufferPool, map_zeros
from ckstore.store.damage import checkpoints_with, shortened
from ckstore.store.pack_reader import open_pack, read_buffer_nbytes, read_frame
from ckstore.store.repository import Repository

Chain = Sequence[tuple[PackRef, FrameRef]]
"""A frame and the bases it needs, deepest base first, each with its pack."""


def chain_reader_nbytes(limits: Limits, *, has_pool: bool = False) -> int:
    """Return the memory that one reader may use beyond its decoder's, in bytes."""
    return limits.chunk_nbytes_max + (0 if has_pool else read_buffer_nbytes(limits))


class ChainReader:
    """Reads chunks whose frames need bases; belongs to one thread at a time, like its decoder.

    Args:
        repository: The store.
        decoder: What decodes the frames; its memory aside is used for roundings of roundings.
        pool: Read buffers to borrow one of at a time; None: it has its own.
        files: Packs that are open and stay so; others are opened here when they are needed.
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
        self._lent = {} if files is None else files
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
        """Let go of packs and memory; a later read opens and makes them again."""
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
            chain: The frame and what it needs.
            expected_nbytes: Plain bytes of the last frame.
            destination: Takes them.
            plain_xxh3: Their xxh3, where this process took it together with the identity; compared in its place.

        Raises:
            CorruptError: A frame is damaged; it names pack and offset of that one, the chain, and the checkpoints
                of the run that need it.
            MissingChunkError: A pack is missing.
            UnsupportedError: A frame needs a codec that this version does not have.
        """
        assert len(destination) == expected_nbytes, "the destination takes exactly the chunk"
        try:
            for _ in self._links(chain, destination, base_check="none", plain_xxh3=plain_xxh3):
                pass
        except (ChecksumError, MalformedError, UnsupportedError) as error:
            raise self.blame(chain, expected_nbytes, error) from error

    def blame(self, chain: Chain, expected_nbytes: int, error: CkstoreError) -> CkstoreError:
        """Read each frame of a chain again, judge it alone, and return the error of the one that is damaged.

        Writes over the decoder's memory aside.

        Args:
            chain: What could not be read.
            expected_nbytes: Plain bytes of its last frame.
            error: What was raised.
        """
        index, fault = self._find_fault(chain, expected_nbytes)
        if fault is None:
            index, fault = len(chain) - 1, error
            if isinstance(error, CorruptError):
                fault = type(error)(
                    f"{error.what}, although each frame of its chain is right when it is read again",
                    todo="test the memory and the disk of this machine",
                )
        return at_frame(fault, self._repository, chain, index)

    def _find_fault(self, chain: Chain, expected_nbytes: int) -> tuple[int, CkstoreError | None]:
        index = 0
        try:
            # First as they are stored: what is damaged there need not be what fails to decode.
            for index, (pack, frame) in enumerate(chain):
                self._check_stored(pack, frame, base_of(chain, index))
            index = 0
            for begun in self._links(chain, self._decoder.own_buffer(expected_nbytes), base_check="blake3"):
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

    def _links(
        self, chain: Chain, destination: memoryview, *, base_check: Check, plain_xxh3: int | None = None
    ) -> Iterator[int]:
        """Decode frame upon frame; yield the index of each before it is decoded."""
        plain: memoryview | None = None
        for index, (pack, frame) in enumerate(chain):
            yield index
            result = self._fetch(pack, frame)
            try:
                header = decode_frame_header(result.view[:FRAME_HEADER_NBYTES], limits=self._repository.limits)
                target = self._target(header, plain, destination)
                is_last = index == len(chain) - 1
                # The last one ends in the destination, and has its length, or it is not what is expected.
                nbytes = len(destination) if is_last else len(target)
                expected = Expected(frame.chunk_id, nbytes, base_of(chain, index), plain_xxh3 if is_last else None)
                check: Check = "blake3" if is_last else base_check
                self._decoder.decode(result.view, expected, target, base=plain, check=check)
            finally:
                result.release()
            plain = target

    def _target(self, header: FrameHeader, base: memoryview | None, destination: memoryview) -> memoryview:
        """Return where a frame of the chain is decoded to: onto its base if that is as long, else beside it."""
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
            # A rounding that is rounded again: at most half a chunk, and the destination at most a quarter of one.
            return self._decoder.own_buffer(chunk_nbytes_max)[chunk_nbytes_max - nbytes :]
        return self._spare[:nbytes]

    def _fetch(self, pack: PackRef, frame: FrameRef) -> ReadResult:
        file = self._lent.get(pack.pack_id) or self._files.get(pack.pack_id)
        if file is None:
            file = self._files[pack.pack_id] = open_pack(self._repository, pack)
        if self._pool is None:
            self._pool = BufferPool(read_buffer_nbytes(self._repository.limits), 1)
        return read_frame(self._repository.backend, file, frame.offset, frame.frame_nbytes, self._pool)


def base_of(chain: Chain, index: int) -> ChunkId:
    """Return the chunk that a frame of a chain needs as its base."""
    return chain[index - 1][1].chunk_id if index else NO_BASE


def at_frame(error: CkstoreError, repository: Repository, chain: Chain, index: int) -> CkstoreError:
    """Return the error with the place of a frame in it, the chain it belongs to, and the checkpoints that need it."""
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
