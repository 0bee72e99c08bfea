"""The invented text that fills the contexts of measured servers."""

import random

from ..errors import HwkvError
from ..runtime.server import LlamaServer


def prompt_tokens(server: LlamaServer, n: int) -> list[int]:
    """n token ids of invented text, which is repeated as often as needed; the same for every server of a model."""
    if n < 1:
        raise HwkvError("the context leaves no room for a prompt")
    text = diary(
        200
    )  # the same for every context: what the tokenizer takes would stay with the process and grow with the text
    tokens = server.post("/tokenize", {"content": text, "add_special": True})["tokens"]
    if not tokens:
        raise HwkvError("llama-server tokenizes text to nothing")
    return (tokens * -(-n // len(tokens)))[:n]


def diary(n_days: int) -> str:
    """Invented diary, about 27 tokens a day. One fact stands near its start, one near its end."""
    rng = random.Random(1)
    weather = ("calm", "grey", "windy", "bright", "cold", "misty", "warm", "stormy")
    work = (
        "I cleaned the lamp",
        "I painted the railing",
        "I counted the gulls",
        "I mended a net",
        "I wrote three letters",
        "I oiled the hinges of the door",
        "I swept the stairs",
        "I cooked fish and potatoes",
    )
    sights = (
        "a fishing boat passed",
        "two sailors waved from their ship",
        "the ferry was late",
        "the tide reached the lower step",
        "a seal slept on the rocks",
        "the post came by boat",
        "the fog horn sounded twice",
        "clouds hung over the hills",
    )
    margin = min(9, n_days // 12)
    facts = {margin: " The harbour master's dog is called Biscuit.", n_days - margin: " My new boat is painted yellow."}
    return "\n".join(
        f"Day {day}. The morning was {rng.choice(weather)}."
        f" {rng.choice(work)}, and in the afternoon {rng.choice(sights)}." + facts.get(day, "")
        for day in range(1, n_days + 1)
    )
