"""A small reader of GGUF files: metadata parsed at once, tensors mapped and left where they are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import enum
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MAGIC: Final = b"GGUF"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_NESTING: Final = 8

_SCALARS: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_SCALAR_FORMATS: Final[dict[int, struct.Struct]] = {
    kind: struct.Struct(code)
    for kind, code in {
        0: "<B",
        1: "<b",
        2: "<H",
        3: "<h",
        4: "<I",
        5: "<i",
        6: "<f",
        7: "<?",
        10: "<Q",
        11: "<q",
        12: "<d",
    }.items()
}


class GGUFError(ValueError):
    """The file is not a GGUF file that this reader understands; the message says where it fails."""


class GGMLType(enum.IntEnum):
    """How a tensor's elements are stored; the numbers are the format's own."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    BF16 = 30


BLOCK_SIZES: Final[dict[GGMLType, tuple[int, int]]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.BF16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
}
"""Elements in a block and bytes of a block, for each type."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file.

    ``shape`` is in row-major order (rows first), the reverse of how the file lists dimensions. ``data`` is a read-only
    view of the mapped file, uint8, ``[rows, bytes of a row]``, where rows are all dimensions but the last.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class _Cursor:
    """Reads little-endian values one after another, refusing to run past the end."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.offset = 0

    def take(self, count: int) -> memoryview:
        end = self.offset + count
        if count < 0 or end > len(self.buffer):
            raise GGUFError(f"truncated: {count} bytes wanted at offset {self.offset} of {len(self.buffer)}")
        piece = self.buffer[self.offset : end]
        self.offset = end
        return piece

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return str(self.take(self.u64()), "utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """An array of strings. Vocabularies hold 50,000 and more of them, so this loop is kept tight."""
        buffer, offset, size = self.buffer, self.offset, len(self.buffer)
        result: list[str] = []
        append, unpack = result.append, _SCALAR_FORMATS[10].unpack_from
        for _ in range(count):
            if offset + 8 > size:
                raise GGUFError(f"truncated: a string's length wanted at offset {offset} of {size}")
            start = offset + 8
            offset = start + unpack(buffer, offset)[0]
            if offset > size:
                raise GGUFError(f"truncated: a string ends at offset {offset} of {size}")
            append(str(buffer[start:offset], "utf-8", "surrogateescape"))
        self.offset = offset
        return result

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth >= _MAX_NESTING:
                raise GGUFError(f"arrays nested deeper than {_MAX_NESTING} at offset {self.offset}")
            element, count = self.u32(), self.u64()
            if element == _STRING:
                return self.strings(count)
            if element == _ARRAY:
                return [self.value(_ARRAY, depth + 1) for _ in range(count)]
            dtype = np.dtype(self._scalar(element))
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        self._scalar(kind)
        unpacker = _SCALAR_FORMATS[kind]
        return unpacker.unpack(self.take(unpacker.size))[0]

    def _scalar(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise GGUFError(f"unknown metadata type {kind} at offset {self.offset}") from None


class GGUFFile:
    """An opened GGUF file. Stays mapped while the object or any tensor's ``data`` lives.

    ``metadata`` holds Python values (arrays as lists); ``tensors`` maps names to places. Raises ``GGUFError`` for a
    file that is no GGUF, is cut short or uses a tensor type that is not known, and ``OSError`` if it can't be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise GGUFError(f"{self.path}: the file is empty") from None
        try:
            self._parse(memoryview(mapped))
        except GGUFError as error:
            raise GGUFError(f"{self.path}: {error}") from None

    def _parse(self, buffer: memoryview) -> None:
        cursor = _Cursor(buffer)
        if bytes(cursor.take(4)) != _MAGIC:
            raise GGUFError("not a GGUF file (the first four bytes are not 'GGUF')")
        self.version = cursor.u32()
        if self.version not in (2, 3):
            raise GGUFError(f"version {self.version} is not supported (2 and 3 are; big-endian files are not)")
        tensor_count, metadata_count = cursor.u64(), cursor.u64()
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.u32())

        places: list[tuple[str, GGMLType, tuple[int, ...], int]] = []
        for _ in range(tensor_count):
            name = cursor.string()
            dimensions = cursor.u32()
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise GGUFError(f"tensor {name!r} has {dimensions} dimensions")
            shape = tuple(reversed([cursor.u64() for _ in range(dimensions)]))
            if not all(shape):
                raise GGUFError(f"tensor {name!r} is empty: its shape is {shape}")
            number = cursor.u32()
            try:
                kind = GGMLType(number)
            except ValueError:
                raise GGUFError(f"tensor {name!r} has the unknown type {number}") from None
            places.append((name, kind, shape, cursor.u64()))

        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise GGUFError("general.alignment is no number of bytes")
        start = -(-cursor.offset // alignment) * alignment
        data = np.frombuffer(buffer, np.uint8)
        self.tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in places:
            elements, size = BLOCK_SIZES[kind]
            if shape[-1] % elements:
                raise GGUFError(f"tensor {name!r}: rows of {shape[-1]} do not divide into blocks of {elements}")
            rows, row_bytes = math.prod(shape[:-1]), shape[-1] // elements * size
            begin, end = start + offset, start + offset + rows * row_bytes
            if end > len(data):
                raise GGUFError(f"truncated: tensor {name!r} ends at byte {end} of {len(data)}")
            self.tensors[name] = GGUFTensor(name, kind, shape, data[begin:end].reshape(rows, row_bytes))
