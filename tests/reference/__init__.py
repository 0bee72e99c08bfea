"""Ground truth of the project: forward passes in NumPy with a window per KV head.

Nothing here shares code with llama.cpp or with `hwkv_llamacpp`. Weights come dequantised from a GGUF, a whole
sequence is computed at once without any cache, and the only place that knows about windows is `visibility.py`.

    model = reference.load("model-f32.gguf")
    logits = model.logits(tokens, windows={3: (None, 64, 64, 16)}, n_sink=0, positions=[100, 101])

`windows` maps a layer to one window per KV head, in tokens; None is a full head, and layers not named are full. In
place
of windows a layer may have a function of its q, k, v and scale that gives them: so `calibration.py` looks inside.
"""

from .gemma3 import Gemma3
from .llama import Llama
from .qwen35 import Qwen35
from .weights import Weights

FAMILIES = {"llama": Llama, "gemma3": Gemma3, "qwen35": Qwen35}


def load(path):
    """The reference model for a GGUF, chosen by its `general.architecture`."""
    weights = Weights(path)
    return FAMILIES[weights.architecture](weights)
