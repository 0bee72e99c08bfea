"""Metadata and dequantised float32 tensors of one GGUF."""

import gguf
import numpy as np


class Weights:
    """Hyperparameters and tensors by name. Tensors have NumPy's shape order: a matrix is [out, in]."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.metadata = {key: field.contents() for key, field in reader.fields.items()
                         if not key.startswith("tokenizer.")}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._ready = {}
        self.architecture = self.metadata["general.architecture"]

    def value(self, key, default=None):
        """Metadata value `<architecture>.<key>`; without a default, a missing key is a KeyError."""
        key = f"{self.architecture}.{key}"
        return self.metadata[key] if default is None else self.metadata.get(key, default)

    def __contains__(self, name):
        return name in self._tensors

    def __getitem__(self, name):
        """Tensor as float32. F32 tensors stay views of the file; others are dequantised once and kept."""
        if name not in self._ready:
            tensor = self._tensors[name]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            self._ready[name] = values.astype(np.float32, copy=False)
        return self._ready[name]

    def layer(self, index):
        """Function that returns a tensor of one layer by its short name, such as `attn_q.weight`."""
        return lambda name: self[f"blk.{index}.{name}"]

    def output(self):
        """Matrix [n_vocab, n_embd] of the output projection; tied to the embedding when the file has none."""
        return self["output.weight" if "output.weight" in self else "token_embd.weight"]
