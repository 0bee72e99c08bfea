"""Llama: llama_cpp.Llama with one more argument, policy.

    >>> from hwkv_llamacpp import Llama
    >>> llm = Llama("model.gguf", policy="policy.json", n_ctx=32768)
    >>> llm.create_chat_completion([{"role": "user", "content": "Hello"}])

Everything else is llama_cpp.Llama's own. What differs is what happens to a cache that no longer holds the past: stock
code ignores some failed removals, because a full cache never refuses them; here the tokens are evaluated again.
"""

import difflib
import inspect
import os
import re
import sys

from ..errors import HwkvError
from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy
from . import llama_log, native

llama_cpp = native.load()

OVERRIDE = "hwkv.policy"
KNOWN_ARGUMENTS = {
    name
    for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if name != "self" and p.kind is not p.VAR_KEYWORD
}


class Llama(llama_cpp.Llama):
    """A llama_cpp.Llama whose KV cache follows a policy.

    policy: "auto" (the default) for the policy in the GGUF, if there is one; "embedded" for that one and no other; the
    path of a policy JSON or of a GGUF with an embedded policy; a Policy; None or "off" for full KV, whatever the GGUF
    carries. The other arguments are llama_cpp.Llama's; unknown ones are a TypeError. Unlike there, flash_attn is True
    by
    default: a windowed layer then allocates exactly its heads; without, V is padded to the widest layer of each window.
    HwkvError where the policy cannot be read, is not there, or does not fit the model.
    """

    def __init__(self, model_path, *, policy="auto", **arguments):
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

    def hwkv_info(self):
        """What the grouped KV cache holds, as a dict: fingerprint, bytes, groups of windows; {"active": False} for full
        KV."""
        if self._ctx.ctx is None:
            raise RuntimeError("this Llama is closed")
        return native.info(self.ctx)

    def eval(self, tokens):
        """Evaluates tokens after the first `n_tokens` of what was evaluated before.

        Those must still be there. Where a window, or a recurrent state, cannot go back that far, they are evaluated
        again: stock llama_cpp ignores the refusal and would go on with a cache that holds the wrong past.
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

    def reset(self):
        """Forgets everything that was evaluated."""
        super().reset()
        self._clear()

    def load_state(self, state):
        """Restores a saved state. RuntimeError where it does not fit, such as a state saved under another policy; the
        object then holds nothing, and the next call evaluates its whole prompt."""
        try:
            super().load_state(state)
        except Exception:
            self._clear()
            raise

    def close(self):
        if hasattr(self, "_stack"):  # not where the arguments were refused: __del__ closes such an object too
            super().close()

    def _clear(self):
        self.n_tokens = 0
        self._requires_eval = True
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)

    def __getstate__(self):
        return {**super().__getstate__(), "kv_overrides": self._own_kv_overrides, "policy": self._policy}


def override_value(policy, model_path):
    """The value of the kv override for a `policy` argument. A file is read and checked here, so its path may be of any
    length."""
    if policy is None:
        return "off"
    if isinstance(policy, str) and policy in ("auto", "off"):
        return policy.replace("auto", "embedded")  # llama.cpp's word for the model's own, if it has one
    source = "policy"
    if not isinstance(policy, Policy):
        if not isinstance(policy, (str, os.PathLike)):
            raise TypeError(f'policy is {policy!r}, a path, a Policy, "auto", "embedded" or None expected')
        if policy == "embedded":
            policy = model_path  # so that one without a policy is refused
        source, policy = os.fspath(policy), Policy.load(policy)
    if os.path.exists(model_path):
        policy.check(ModelGeometry.from_gguf(model_path), source)
    return native.register(policy.to_json())
