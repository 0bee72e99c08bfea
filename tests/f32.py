"""Models without quantised weights, in build/models."""

import fcntl
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from hwkv_llamacpp.gguf.testmodels import FOLDER


def f32_copy(source):
    """Path of the same model with every tensor as F32; made once.

    Without quantised weights two ways to split a prompt into batches give nearly the same logits, so a small fault
    shows.
    """
    target = FOLDER / f"{Path(source).stem}.F32.gguf"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "f32.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for parallel test processes
        if not target.exists():
            partial = target.with_suffix(".partial")
            _write(GGUFReader(source), partial)
            partial.rename(target)
    return target


def _write(model, path):
    writer = GGUFWriter(path, model.fields["general.architecture"].contents())
    for field in model.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            value = 0 if field.name == "general.file_type" else field.contents()  # 0: all F32
            writer.add_key_value(
                field.name, value, field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            )
    for tensor in model.tensors:
        writer.add_tensor(
            tensor.name, dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
