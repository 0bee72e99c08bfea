"""Metadata and dequantised float32 tensors of one GGUF.

The file is read here and not by gguf.GGUFReader, which takes 17 seconds for a vocabulary of 262,144 tokens.
"""

import struct

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize, quant_shape_to_byte_shape

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


class Weights:
    """Hyperparameters and tensors by name. Tensors have NumPy's shape order: a matrix is [out, in]."""

    def __init__(self, path):
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r")
        with open(path, "rb") as file:
            self._read_header(file)
        self._ready = {}
        self.architecture = self.metadata["general.architecture"]

    def _read_header(self, file):
        magic, _, n_tensors, n_keys = take(file, "4sIQQ")
        if magic != b"GGUF":
            raise ValueError(f"{self.path} is no GGUF")
        self.metadata = {take_text(file): take_value(file, *take(file, "I")) for _ in range(n_keys)}
        self._tensors = {}
        for _ in range(n_tensors):
            name, (n_dims,) = take_text(file), take(file, "I")
            self._tensors[name] = (take(file, f"{n_dims}Q")[::-1], *take(file, "IQ"))  # shape, type, offset
        alignment = self.metadata.get("general.alignment", 32)
        self._data_start = -(-file.tell() // alignment) * alignment

    def value(self, key, default=None):
        """Metadata value `<architecture>.<key>`; without a default, a missing key is a KeyError."""
        key = f"{self.architecture}.{key}"
        return self.metadata[key] if default is None else self.metadata.get(key, default)

    def __contains__(self, name):
        return name in self._tensors

    def __getitem__(self, name):
        """Tensor as float32. F32 tensors stay views of the file; others are dequantised once and kept."""
        if name not in self._ready:
            shape, kind, offset = self._tensors[name]
            byte_shape = quant_shape_to_byte_shape(shape, GGMLQuantizationType(kind))
            start = self._data_start + offset
            data = self._bytes[start : start + int(np.prod(byte_shape))].reshape(byte_shape)
            if kind == GGMLQuantizationType.F32:
                self._ready[name] = data.view(np.float32)
            else:
                self._ready[name] = dequantize(data, GGMLQuantizationType(kind)).astype(np.float32, copy=False)
        return self._ready[name]

    def layer(self, index):
        """Function that returns a tensor of one layer by its short name, such as `attn_q.weight`."""
        return lambda name: self[f"blk.{index}.{name}"]

    def output(self):
        """Matrix [n_vocab, n_embd] of the output projection; tied to the embedding when the file has none."""
        return self["output.weight" if "output.weight" in self else "token_embd.weight"]


def take(file, layout):
    """The next little-endian values of a file, as struct names them."""
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def take_text(file):
    return file.read(*take(file, "Q")).decode()


def take_value(file, kind):
    if kind == GGUFValueType.STRING:
        return take_text(file)
    if kind == GGUFValueType.ARRAY:
        item, count = take(file, "IQ")
        return (
            [take_text(file) for _ in range(count)]
            if item == GGUFValueType.STRING
            else take(file, f"{count}{SCALARS[item]}")
        )
    return take(file, SCALARS[kind])[0]
