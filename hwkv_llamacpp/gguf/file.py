"""Reads the header of a GGUF file: keys, tensor infos, and where their bytes lie.

gguf.GGUFReader makes NumPy views of every token of the vocabulary, which takes
seconds. This reader walks the same bytes, decodes only the values it is asked for,
and remembers the byte range of every key, so that embed.py can copy keys unchanged.
Shards of a split model are one GGUFFile each; open_first_shard() finds the set.
"""

import mmap
import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from ..base.names import clip, show
from ..errors import HwkvError

MAGIC = b"GGUF"
SHARD_NAME = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
MAX_ARRAY_DEPTH = 4
MAX_FILE_BYTES = 2**63 - 1

# value type -> struct code of one element; strings and arrays are walked instead
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class Field:
    """One key of the header. Offsets are bytes from the start of the file."""

    key: str
    type: GGUFValueType
    item_type: GGUFValueType | None  # of arrays
    length: int  # items of an array, 1 otherwise
    start: int  # of the key's length field
    value: int  # of the first item
    end: int

    @property
    def is_array(self) -> bool:
        return self.type == GGUFValueType.ARRAY


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # ggml order: ne[0] first
    type: int
    offset: int  # bytes from the start of the tensor data

    @property
    def n_bytes(self) -> int:
        """Size of the data, or 0 for a tensor type that the installed gguf package does not know."""
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type)]
        except (ValueError, KeyError):
            return 0
        n = 1
        for ne in self.shape:
            n *= ne
        return n // block * size


class GGUFFile:
    """The header of one GGUF file. A context manager: the file is mapped until it is closed.

    Byte ranges: keys [kv_start, kv_end), tensor infos [kv_end, infos_end),
    tensor data [data_start, size), where data_start is infos_end padded to the alignment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise HwkvError(f"{self.path}: not a GGUF file: it is empty")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise HwkvError(f"{self.path}: cannot read: {reason}") from None
        try:
            self._read_header()
        except (struct.error, OverflowError, IndexError):  # a length that points outside of the file
            self.close()
            raise self._truncated("its header goes on past the end") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # reading values

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: int, float, bool, str, or a list of those."""
        field = self.fields.get(key)
        if field is None:
            return default
        if not field.is_array:
            return self._item(field.type, field.value)[0]
        if field.item_type in SCALARS:
            return list(struct.unpack_from(f"<{field.length}{SCALARS[field.item_type]}", self._map, field.value))
        items, pos = [], field.value
        for _ in range(field.length):
            item, pos = self._item(field.item_type, pos)
            items.append(item)
        return items

    def raw(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the header, unchanged."""
        return self._map[start:end]

    # walking the header

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise HwkvError(f"{self.path}: not a GGUF file: it starts with {self._map[:4]!r}, not {MAGIC!r}")
        (version,) = self._unpack("I", 4)
        if version & 0xFFFF == 0 and version != 0:
            raise HwkvError(f"{self.path}: big-endian GGUF found, little-endian expected: convert the file first")
        if sys.byteorder != "little":
            raise HwkvError("big-endian machines are not supported")
        if version not in (2, 3):
            raise HwkvError(f"{self.path}: GGUF version {version} found, 2 or 3 expected")
        self.version = version
        self.n_tensors, n_kv = self._unpack("QQ", 8)

        self.fields: dict[str, Field] = {}
        self.kv_start = pos = 24
        for _ in range(n_kv):
            field = self._read_field(pos)
            if field.key in self.fields:
                raise HwkvError(f"{self.path}: key '{clip(field.key)}' occurs twice")
            self.fields[field.key] = field
            pos = field.end
        self.kv_end = pos

        self.alignment = self._alignment()

        self.tensors = []
        for _ in range(self.n_tensors):
            info, pos = self._read_tensor_info(pos)
            self.tensors.append(info)
        if pos > self.size:
            raise struct.error
        self.infos_end = pos
        self.data_start = -(-pos // self.alignment) * self.alignment
        # a file that ends with its header carries metadata only: that is a choice, not a damage
        self.has_data = self.size > self.data_start
        if self.tensors:
            last = max(self.tensors, key=lambda info: info.offset + info.n_bytes)
            need = self.data_start + last.offset + last.n_bytes
            if need > MAX_FILE_BYTES:
                raise HwkvError(
                    f"{self.path}: tensor '{clip(last.name)}' ends at byte {need:,}, which no file can hold"
                )
            if self.has_data and need > self.size:
                raise self._truncated(f"its tensors need {need:,} bytes")

    def _alignment(self) -> int:
        """As llama.cpp takes it: any power of two, but in a u32."""
        field, value = self.fields.get("general.alignment"), self.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if field is not None and (field.type != GGUFValueType.UINT32 or value < 1 or value & (value - 1)):
            kind = "" if field.is_array else f" of type {field.type.name}"
            raise HwkvError(
                f"{self.path}: key 'general.alignment' is {show(value)}{kind}, a power of two of type UINT32 expected"
            )
        return value

    def _read_field(self, pos: int) -> Field:
        start = pos
        key, pos = self._string(pos)
        (code,) = self._unpack("I", pos)
        type_ = self._value_type(key, code)
        pos += 4
        if type_ != GGUFValueType.ARRAY:
            return Field(key, type_, None, 1, start, pos, self._skip(key, type_, pos))
        code, length = self._unpack("IQ", pos)
        item_type = self._value_type(key, code)
        return Field(key, type_, item_type, length, start, pos + 12, self._skip(key, type_, pos))

    def _skip(self, key: str, type_: GGUFValueType, pos: int, depth: int = 0) -> int:
        """The offset after the value at pos."""
        if type_ in SCALARS:
            return self._inside(pos + struct.calcsize("<" + SCALARS[type_]))
        if type_ == GGUFValueType.STRING:
            (length,) = self._unpack("Q", pos)
            return self._inside(pos + 8 + length)
        if depth == MAX_ARRAY_DEPTH:
            raise HwkvError(f"{self.path}: key '{clip(key)}' nests arrays more than {MAX_ARRAY_DEPTH} deep")
        code, length = self._unpack("IQ", pos)
        item_type = self._value_type(key, code)
        pos += 12
        if item_type in SCALARS:
            return self._inside(pos + length * struct.calcsize("<" + SCALARS[item_type]))
        if item_type == GGUFValueType.STRING:  # the vocabulary: a tight loop
            unpack, data = struct.Struct("<Q").unpack_from, self._map
            for _ in range(length):
                pos += 8 + unpack(data, pos)[0]
            return self._inside(pos)
        for _ in range(length):
            pos = self._skip(key, item_type, pos, depth + 1)
        return pos

    def _read_tensor_info(self, pos: int) -> tuple[TensorInfo, int]:
        name, pos = self._string(pos)
        (n_dims,) = self._unpack("I", pos)
        if n_dims > 8:
            raise HwkvError(f"{self.path}: tensor '{clip(name)}' has {n_dims} dimensions, at most 4 expected")
        shape = self._unpack(f"{n_dims}Q", pos + 4)
        pos += 4 + 8 * n_dims
        type_, offset = self._unpack("IQ", pos)
        return TensorInfo(name, shape, type_, offset), pos + 12

    def _item(self, type_: GGUFValueType | None, pos: int) -> tuple[Any, int]:
        """(value, offset after it) of one item."""
        if type_ == GGUFValueType.STRING:
            return self._string(pos)
        if type_ in SCALARS:
            code = "<" + SCALARS[type_]
            return struct.unpack_from(code, self._map, pos)[0], pos + struct.calcsize(code)
        raise HwkvError(f"{self.path}: nested arrays are not supported")

    def _string(self, pos: int) -> tuple[str, int]:
        (length,) = self._unpack("Q", pos)
        end = self._inside(pos + 8 + length)
        return self._map[pos + 8 : end].decode("utf-8", "replace"), end

    def _unpack(self, code: str, pos: int) -> tuple[Any, ...]:
        return struct.unpack_from("<" + code, self._map, pos)

    def _inside(self, pos: int) -> int:
        if pos > self.size:
            raise struct.error
        return pos

    def _value_type(self, key: str, code: int) -> GGUFValueType:
        try:
            return GGUFValueType(code)
        except ValueError:
            raise HwkvError(
                f"{self.path}: key '{clip(key)}' has value type {code}, which GGUF does not define"
            ) from None

    def _truncated(self, what: str) -> HwkvError:
        return HwkvError(f"{self.path}: truncated: {what}, the file has {self.size:,} bytes")


def shard_paths(file: GGUFFile) -> list[Path]:
    """Paths of all shards of the model that an open GGUFFile belongs to, in order; one for most models.

    llama.cpp's naming is required: PREFIX-00001-of-0000N.gguf.
    """
    count = file.get("split.count", 0)
    if type(count) is not int:
        raise HwkvError(f"{file.path}: key 'split.count' is {show(count)}, a number expected")
    if count < 2:
        return [file.path]
    match = SHARD_NAME.match(file.path.name)
    if not match or int(match["count"]) != count:
        raise HwkvError(f"{file.path}: one of {count} shards, but its name does not end in -0000N-of-{count:05d}.gguf")
    return [file.path.with_name(shard_name(match["prefix"], no, count)) for no in range(count)]


def shard_name(prefix: str, no: int, count: int) -> str:
    """llama.cpp's file name of shard `no` (from 0)."""
    return f"{prefix}-{no + 1:05d}-of-{count:05d}.gguf"


def open_first_shard(path: str | os.PathLike[str]) -> tuple[GGUFFile, list[Path]]:
    """(GGUFFile of the first shard, paths of all shards), given any shard."""
    file = GGUFFile(path)
    try:
        paths = shard_paths(file)
    except BaseException:
        file.close()
        raise
    if file.get("split.no", 0) == 0 or len(paths) == 1:
        return file, paths
    file.close()
    return GGUFFile(paths[0]), paths
