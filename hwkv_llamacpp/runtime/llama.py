"""Llama: llama_cpp.Llama with one more argument, policy.

    >>> from hwkv_llamacpp import Llama
    >>> llm = Llama("model.gguf", policy="policy.json", n_ctx=32768)
    >>> llm.create_chat_completion([{"role": "user", "content": "Hello"}])

Everything else is llama_cpp.Llama's own, with one difference. A windowed cache may no longer hold the past, and then
refuses to go back. Stock code ignores that, because a full cache never refuses. Here the tokens are evaluated again.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy
from . import llama_log, native

native.load()  # first: it decides which libllama the import below loads
import llama_cpp  # noqa: E402

OVERRIDE = "hwkv.policy"
KNOWN_ARGUMENTS = {
    name
    for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if name != "self" and p.kind is not p.VAR_KEYWORD
}


class Llama(llama_cpp.Llama):
    """A llama_cpp.Llama whose KV cache follows a policy.

    policy is one of
      "auto"      the policy in the GGUF, if there is one (the default)
      "embedded"  the policy in the GGUF; HwkvError if there is none
      a path      of a policy JSON, or of a GGUF with an embedded policy
      a Policy
      None, "off" full KV, whatever the GGUF carries

    The other arguments are llama_cpp.Llama's; unknown ones are a TypeError. Unlike there, flash_attn is True by
    default: a windowed layer then allocates exactly its heads. Without it, V is padded to the widest layer of each
    window. HwkvError if the policy cannot be read, or does not fit the model.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        policy: Policy | str | os.PathLike[str] | None = "auto",
        **arguments: Any,
    ) -> None:
        for name in sorted(set(arguments) - KNOWN_ARGUMENTS):
            near = difflib.get_close_matches(name, KNOWN_ARGUMENTS | {"policy"}, 1)
            raise TypeError(
                f"Llama() got an unexpected keyword argument {name!r}{f'; did you mean {near[0]!r}?' if near else ''}"
            )
        overrides = arguments.pop("kv_overrides", None)
        if OVERRIDE in (overrides or {}):
            raise ValueError(f"give the policy as policy=..., not as kv_overrides[{OVERRIDE!r}]")
        arguments.setdefault("flash_attn", True)
        self._policy = policy
        self._own_kv_overrides = overrides
        arguments["kv_overrides"] = {**(overrides or {}), OVERRIDE: override_value(policy, model_path)}
        with llama_log.texts(echo=True) as logged:
            try:
                super().__init__(os.fspath(model_path), **arguments)
            except ValueError as error:
                # stock llama_cpp says only that loading failed; llama.cpp's log says why
                if re.search("hwkv|policy", reason := llama_log.reason(logged)):
                    raise HwkvError(reason) from error
                raise

    def hwkv_info(self) -> dict[str, Any]:
        """What the grouped KV cache holds: fingerprint, bytes, groups of windows.

        {"active": False} for full KV. RuntimeError when closed.
        """
        if self._ctx.ctx is None:
            raise RuntimeError("this Llama is closed")
        return native.info(self.ctx)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens after the first `n_tokens` of what was evaluated before.

        The cache must go back to them first. Where a window or a recurrent state cannot, they are evaluated again.
        Stock llama_cpp ignores the refusal, and would go on with a cache that holds the wrong past.
        """
        if self.n_tokens > 0 and not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            past = self.input_ids[: self.n_tokens].tolist()
            if self.verbose:
                print(
                    f"Llama.eval: the cache cannot go back to {len(past)} tokens, evaluating them again",
                    file=sys.stderr,
                )
            self._clear()
            super().eval(past)
        super().eval(tokens)

    def reset(self) -> None:
        """Forgets everything that was evaluated."""
        super().reset()
        self._clear()

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restores a saved state.

        RuntimeError if it does not fit, such as a state that was saved under another policy. The object then holds
        nothing, and the next call evaluates its whole prompt.
        """
        try:
            super().load_state(state)
        except Exception:
            self._clear()
            raise

    def close(self) -> None:
        """Frees the model and the context."""
        if hasattr(self, "_stack"):  # not where the arguments were refused: __del__ closes such an object, too
            super().close()

    def _clear(self) -> None:
        self.n_tokens = 0
        self._requires_eval = True
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kv_overrides": self._own_kv_overrides, "policy": self._policy}


def override_value(policy: Policy | str | os.PathLike[str] | None, model_path: str | os.PathLike[str]) -> str:
    """The value of the kv override hwkv.policy for a `policy` argument.

    A file is read and checked here: an override has no room for a long path. HwkvError if it cannot be read or does not
    fit the model; TypeError if it is none of what Llama() takes.
    """
    if policy is None:
        return "off"
    if isinstance(policy, str) and policy in ("auto", "off"):
        return policy.replace("auto", "embedded")  # llama.cpp's word for the model's own, if it has one
    if isinstance(policy, Policy):
        source, found = "policy", policy
    elif isinstance(policy, (str, os.PathLike)):
        path = model_path if policy == "embedded" else policy  # so that a model without a policy is refused
        source, found = os.fspath(path), Policy.load(path)
    else:
        raise TypeError(f'policy is {policy!r}, a path, a Policy, "auto", "embedded" or None expected')
    if os.path.exists(model_path):
        found.check(ModelGeometry.from_gguf(model_path), source)
    return native.register(found.to_json())
