"""What the rooms below gguf/ need to know of a model. gguf.geometry's Layer and ModelGeometry have it all."""

from collections.abc import Sequence
from typing import Any, Protocol

WindowRow = Sequence[int | None]  # windows of a layer's KV heads, in tokens; None is full


class LayerShape(Protocol):
    """One layer, as gguf.geometry.Layer says it."""

    @property
    def layer(self) -> int: ...

    @property
    def kind(self) -> str: ...

    @property
    def n_head_kv(self) -> int: ...

    @property
    def head_dim_k(self) -> int: ...

    @property
    def head_dim_v(self) -> int: ...

    @property
    def reason(self) -> str | None: ...


class ModelShape(Protocol):
    """A model, as gguf.geometry.ModelGeometry says it."""

    @property
    def architecture(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def n_layer(self) -> int: ...

    @property
    def n_ctx_train(self) -> int: ...

    @property
    def n_swa(self) -> int: ...

    @property
    def layers(self) -> Sequence[LayerShape]: ...

    @property
    def configurable(self) -> Sequence[LayerShape]: ...

    @property
    def refusal(self) -> str | None: ...

    def describe(self) -> dict[str, Any]: ...
