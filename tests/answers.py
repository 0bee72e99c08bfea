"""Greedy answers with their log-probabilities, and how far two of them are apart.

Two ways to split a prompt into batches give slightly different logits, in the unpatched build too. That noise is
measured in the same run, and a difference under a policy is held against it; a different token counts only where the
two best were further apart.
"""

from dataclasses import dataclass

TOP = 5


@dataclass
class Answer:
    tokens: list[int]
    top: list[dict[int, float]]  # per token: {token: log-probability} of the best TOP
    n_read: int  # prompt tokens evaluated for it
    n_cached: int  # prompt tokens taken from the cache


def ask(server, prompt, n_predict=6, **more):
    """One greedy completion of token ids through llama-server."""
    return from_reply(
        server.post(
            "/completion",
            {
                "prompt": prompt,
                "n_predict": n_predict,
                "temperature": 0,
                "n_probs": TOP,
                "seed": 1,
                "cache_prompt": True,
                "return_tokens": True,
                "ignore_eos": True,
                **more,
            },
        )
    )


def from_reply(reply):
    steps = reply["completion_probabilities"]
    return Answer(
        [step["id"] for step in steps],
        [{c["id"]: c["logprob"] for c in step["top_logprobs"]} for step in steps],
        reply["timings"]["prompt_n"],
        reply["timings"]["cache_n"],
    )


def difference(answer, fresh):
    """(largest difference of a top log-probability, the step at which tokens part or None, gap of the two best tokens
    there)."""
    largest = 0.0
    for step, (a, b) in enumerate(zip(answer.top, fresh.top)):
        # a token may drop out of one list where two are nearly equal: it cannot be above that list's last
        for token in a.keys() | b.keys():
            largest = max(largest, abs(a.get(token, min(a.values())) - b.get(token, min(b.values()))))
        if answer.tokens[step] != fresh.tokens[step]:
            best = sorted(b.values(), reverse=True)
            return largest, step, best[0] - best[1]
    return largest, None, 0.0


def limit(noise):
    return 3 * noise + 0.002


def is_same(answer, fresh, noise):
    largest, step, gap = difference(answer, fresh)
    return largest <= limit(noise) and (step is None or gap <= limit(noise))


def assert_same(answer, fresh, noise, what):
    """Fails where the answers differ by more than the noise of batch splits allows."""
    if not is_same(answer, fresh, noise):
        largest, step, gap = difference(answer, fresh)
        raise AssertionError(
            f"{what}: log-probabilities differ by {largest:.4f}, noise of batch splits is {noise:.4f}"
            + ("" if step is None else f"; token {step} differs, where the best two are {gap:.4f} apart")
        )
