"""Texts in the language of tests/data/mini-hybrid-f16.gguf: retrieval prompts, and a trace to calibrate on.

A prompt states facts (" fox is 427."), each once, among noise, and ends with a question (" what is fox?"). The answer
is three digits that only a head which still sees the fact can give. Every word, digit and mark is one token of that
model.

    python bench/minilang.py > trace.txt     four stories for `hwkv calibrate --trace-tokens 2048`
"""

import re

import numpy as np

KEYS = """
ant arm axe bar bed bin bow bud bun cab cap cat cub dam dog ear egg elk eye fig fir fox gem hat hip hut ink jam jaw
jet kid lab lid log mop mug net oak oat pan peg pet pig pod pup rat rib rod rum saw sow tab tar tie toe toy urn vat
wax wig yam
""".split()
OTHER_NOUNS = """
ape art bag bat bee boa box bug bus can car cow cup den dot eel elf elm fan fin fly fur gum hen hog ice ivy jar jay
jug kit leg lip map mud nap nut oar owl paw pen pie pin pot rag ray rim rug rye sky spa tap tea tin top tub van web
yak zoo
""".split()
SENTENCE = [
    "the",
    "old big sad shy wet new hot red",
    "man boy son dad mom guy",
    "ran sat met ate got hid led won",
    "to at by in on up",
    "the",
    "day sun sea bay inn way",
]
ECHO_WORDS = " ".join(SENTENCE).replace("the", "").split() + OTHER_NOUNS


def count_tokens(text):
    """Tokens of the model's tokenizer, without the start token that the runtime adds."""
    return len(re.findall(r"[a-z]+|\d|[.,?]", text))


def noise(rng):
    if rng.random() < 0.3:
        phrase = " ".join(rng.choice(ECHO_WORDS, rng.integers(3, 7)))
        return f" say {phrase}, {phrase}."
    return " " + " ".join(rng.choice(words.split()) for words in SENTENCE) + "."


def needle_prompt(seed, n_tokens, distance, n_facts=2):
    """(prompt, answer): about n_tokens tokens; the fact asked for lies about `distance` tokens before its answer."""
    rng = np.random.default_rng(seed)
    keys = list(rng.permutation(KEYS)[:n_facts])
    values = ["".join(str(d) for d in rng.integers(0, 10, 3)) for _ in keys]
    facts = [f" {key} is {value}." for key, value in zip(keys, values)]
    question = f" what is {keys[0]}?"
    body = n_tokens - 1 - count_tokens(question)
    due = [max(0, n_tokens - distance - 5)] + [int(at) for at in np.linspace(0, body - 15, n_facts - 1)]
    waiting = sorted(zip(due, facts))
    text, length = "", 0
    while length < body - 8 or waiting:
        if waiting and (length >= waiting[0][0] - 2 or length >= body - 8):
            sentence = waiting.pop(0)[1]
        else:
            sentence = noise(rng)
        text += sentence
        length += count_tokens(sentence)
    return text + question, values[0]


def story(seed, n_tokens):
    """A text of n_tokens with two facts in its first half, and questions for them, with their answers, all over its
    second."""
    rng = np.random.default_rng(seed)
    keys = list(rng.permutation(KEYS)[:2])
    values = ["".join(str(d) for d in rng.integers(0, 10, 3)) for _ in keys]
    due = sorted(rng.integers(0, n_tokens // 2 - 40, len(keys)))
    text, length, n_stated = "", 0, 0
    while length < n_tokens:
        which = rng.integers(len(keys))
        if n_stated < len(keys) and length >= due[n_stated]:
            sentence = f" {keys[n_stated]} is {values[n_stated]}."
            n_stated += 1
        elif length > n_tokens // 2 and rng.random() < 0.5:
            sentence = f" what is {keys[which]}? {values[which]}."
        else:
            sentence = noise(rng)
        if length + count_tokens(sentence) > n_tokens:
            sentence = " the" * (n_tokens - length)
        text += sentence
        length += count_tokens(sentence)
    return text


if __name__ == "__main__":
    # with the line's end each is 2048 tokens long
    print("\n".join(story(seed, 2047) for seed in range(4)))
