"""A file of settlements on this host's disk, owned by one process through a lock that ends with it.

The first line names the format. Each further line is a settlement: its CRC-32, and its MessagePack in base64. A line
that a crash tore was never called safe and is left out; so is a damaged one, and then the file is kept.
"""

from __future__ import annotations

import fcntl
import os
from base64 import b64decode, b64encode
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

import msgspec

from gateway.ids import uuid7

SUFFIX = ".spool"
HEADER = b"penstock spool 1\n"
"""Its number is raised when keys or arguments of the settle script change. A file of another number is left alone."""

_encoder = msgspec.msgpack.Encoder()


class UnknownFormat(Exception):
    """Another release wrote the file."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One call of the settle script."""

    request_id: UUID
    shard: str
    keys: list[str]
    arguments: list[Any]
    """bytes, str and int; each comes back as it went."""


_decoder = msgspec.msgpack.Decoder(Record)


def encode_line(record: Record) -> bytes:
    body = b64encode(_encoder.encode(record))
    return b"%08x %b\n" % (crc32(body), body)


def decode_line(line: bytes) -> Record | None:
    """None: torn or damaged."""
    checksum, _, body = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % crc32(body):
        return None
    try:
        return _decoder.decode(b64decode(body, validate=True))
    except ValueError:  # msgspec's and base64's errors are such
        return None


@dataclass
class Reading:
    """What was read of a file so far."""

    torn: int = 0
    """Lines at the end that are no settlements."""
    damaged: int = 0
    """Such lines with settlements after them: something other than a crash has been at the file."""


class SpoolFile:
    """An open, locked file. Everything here blocks and raises OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = os.fstat(descriptor).st_size

    @classmethod
    def create(cls, folder: Path) -> SpoolFile:
        """A new file of this process; the folder is made if need be."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            path = folder / f"{uuid7()}{SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if not _lock(descriptor, path):  # another process took the new file for an orphan
                    os.close(descriptor)
                    continue
                file = cls(path, descriptor)
                file.append(HEADER)
                _sync_folder(folder)
            except BaseException:
                os.close(descriptor)
                path.unlink(missing_ok=True)
                raise
            return file

    @classmethod
    def adopt(cls, path: Path) -> SpoolFile | None:
        """The file of a process that ended; None if it lives, or another has adopted the file."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        if not _lock(descriptor, path):
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    @property
    def size(self) -> int:
        return self._end

    @property
    def linked(self) -> bool:
        """False: somebody deleted the file, and what is written to it is lost."""
        return os.fstat(self._descriptor).st_nlink > 0

    def append(self, data: bytes) -> None:
        """Write and sync. After an error nothing of ``data`` counts, and the next call overwrites it."""
        view, at = memoryview(data), self._end
        try:
            while view:
                written = os.pwrite(self._descriptor, view, at)
                view, at = view[written:], at + written
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end = at

    def batches(self, size: int, reading: Reading) -> Generator[list[Record], None, None]:
        """All settlements, ``size`` at a time. Raises UnknownFormat."""
        with os.fdopen(os.dup(self._descriptor), "rb") as source:
            source.seek(0)
            header = source.readline()
            if header != HEADER:
                if HEADER.startswith(header):  # torn while the file was made
                    return
                raise UnknownFormat(str(self.path))
            batch: list[Record] = []
            for line in source:
                record = decode_line(line)
                if record is None:
                    reading.torn += 1
                    continue
                reading.damaged, reading.torn = reading.damaged + reading.torn, 0
                batch.append(record)
                if len(batch) == size:
                    yield batch
                    batch = []
            if batch:
                yield batch

    def close(self) -> None:
        """Let go of the file: from now on it is an orphan."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the file and close it."""
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def set_aside(self) -> Path:
        """Close the file and give it a name that nobody adopts."""
        aside = self.path.with_suffix(".damaged")
        self.path.rename(aside)
        self.close()
        return aside


def orphans(folder: Path) -> list[Path]:
    """Files in the folder, oldest first: of living processes and of dead ones."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except FileNotFoundError:
        return []


def _lock(descriptor: int, path: Path) -> bool:
    """Whether this descriptor now owns the file that the path names."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
