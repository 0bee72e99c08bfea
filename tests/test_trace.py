"""Traces: what is calibrated on, what is held out, and which queries are scored."""

import ctypes
import hashlib
import re

import numpy as np
import pytest
from minilang import needle_prompt

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.calibration import trace
from hwkv_llamacpp.runtime import native

try:
    native.library()
except HwkvError as error:
    pytest.skip(str(error), allow_module_level=True)

from hwkv_llamacpp.runtime.context import Model, RuntimeOptions


@pytest.fixture(scope="module")
def model(smollm2):
    """Its vocabulary is what the tests need, so nothing is decoded."""
    with Model(smollm2, RuntimeOptions(n_gpu_layers=0)) as model:
        yield model


def text_of(model, tokens):
    llama_cpp, piece, data = native.load(), ctypes.create_string_buffer(256), b""
    for token in tokens:
        size = llama_cpp.llama_token_to_piece(model.vocab, int(token), piece, len(piece), 0, True)
        data += piece.raw[:size]
    return data.decode(errors="replace")


# the default


def test_default_is_three_kinds_and_as_many_held_out(model):
    made = trace.default(model, 3000)
    assert [len(s) for s in (*made.sequences, *made.held_out)] == [3000] * 6
    assert all(
        s.dtype == np.int32 and (0 <= s).all() and (s < model.n_vocab).all() for s in (*made.sequences, *made.held_out)
    )
    assert made.source == {"text": "default", "seed": 0}
    assert len({s.tobytes() for s in (*made.sequences, *made.held_out)}) == 6


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_documents_are_not_calibrated_on(model, seed):
    """No paragraph of a held-out sequence is in a trace."""
    made = trace.default(model, 4096, seed)
    traced, held_out = (
        {p for s in sequences for p in text_of(model, s).split("\n") if len(p) > 80}
        for sequences in (made.sequences, made.held_out)
    )
    assert min(len(traced), len(held_out)) > 50
    assert not traced & held_out


def test_the_seed_decides_and_nothing_else(model):
    first, again, other = (trace.default(model, 1000, seed) for seed in (3, 3, 4))
    assert first.sha256 == again.sha256 and first.held_out_sha256 == again.held_out_sha256
    assert first.sha256 != other.sha256 and first.held_out_sha256 != other.held_out_sha256


def test_lengths(model):
    """Every length gives sequences of that length, up to what the shipped texts hold."""
    for n in (2, 3, 64, 1001, 16384):
        assert {len(s) for s in trace.default(model, n).sequences} == {n}
    with pytest.raises(
        HwkvError,
        match="the default trace has [0-9]+ tokens in this model's vocabulary, 1000000 are asked for: give text",
    ):
        trace.default(model, 1_000_000)


def test_retrieval_asks_for_what_it_stated_before(model):
    """Facts stand in the first half, questions in the second, and every answer is the stated one."""
    for sequence in (trace.default(model, 4096).sequences[2], trace.default(model, 4096, seed=5).held_out[2]):
        text = text_of(model, sequence)
        stated = {m[1]: (m[2], m.start()) for m in re.finditer(r"the number of ([^\n]*) is (\d{5})\.", text)}
        asked = [
            (m[1], m[2], m.start())
            for m in re.finditer(r"Question: what is the number of ([^\n?]*)\? Answer: (\d{5})\.", text)
        ]
        assert len(stated) > 5 and len(asked) > 10
        assert all(stated[what][0] == answer and stated[what][1] < at for what, answer, at in asked)
        assert max(at for _, at in stated.values()) < min(at for _, _, at in asked)


# files


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(needle_prompt(seed, 400, 300)[0] for seed in range(10)))
    return path


def test_from_files_holds_out_the_end(model, book):
    tokens = model.tokenize(book.read_text())
    made = trace.from_files(model, [book], 600)
    assert [len(s) for s in made.sequences] == [600] * 3 and [len(s) for s in made.held_out] == [600]
    assert (np.concatenate(made.sequences) == tokens[:1800]).all() and (
        made.held_out[0] == tokens[-600:]
    ).all()  # this model has no start token
    assert made.source == {"text": ["book.txt"], "held_out": "end of text"}


def test_from_files_with_held_out_files(model, book, tmp_path):
    (tmp_path / "other.txt").write_text("The end of the story. " * 100)
    made = trace.from_files(model, [book, book], 600, held_out_paths=[tmp_path / "other.txt"])
    assert len(made.sequences) == 3 and 300 <= len(made.held_out[0]) <= 600
    assert made.source == {"text": ["book.txt", "book.txt"], "held_out": ["other.txt"]}
    # all of the text is there to calibrate on
    n = len(model.tokenize(book.read_text()))
    assert len(trace.from_files(model, [book], n, held_out_paths=[tmp_path / "other.txt", book]).sequences) == 1


def test_fewer_sequences_from_less_text(model, book):
    n = len(model.tokenize(book.read_text()))
    assert [len(trace.from_files(model, [book], n // k).sequences) for k in (2, 3, 4, 5, 9)] == [1, 2, 3, 3, 3]
    with pytest.raises(HwkvError, match=f"book.txt: {n} tokens, at least {2 * (n // 2 + 1)}, half to calibrate on"):
        trace.from_files(model, [book], n // 2 + 1)


def test_texts_of_special_tokens_are_text(model, tmp_path):
    """A text about <|im_start|> must not open a turn."""
    llama_cpp = native.load()
    tokens = model.tokenize("a <|im_start|> b <|endoftext|>")
    assert text_of(model, tokens) == "a <|im_start|> b <|endoftext|>"
    assert not any(llama_cpp.llama_vocab_is_control(model.vocab, int(t)) for t in tokens)


@pytest.mark.parametrize("name", ["mini_hybrid", "gemma3"])
def test_the_start_token_comes_first_where_the_model_wants_it(request, name, tmp_path, book):
    llama_cpp = native.load()
    with Model(request.getfixturevalue(name), RuntimeOptions(n_gpu_layers=0)) as model:
        assert llama_cpp.llama_vocab_get_add_bos(model.vocab)
        made = trace.from_files(model, [book], 300)
        assert {int(s[0]) for s in (*made.sequences, *made.held_out)} == {llama_cpp.llama_vocab_bos(model.vocab)}
        assert (made.sequences[0][1:] == model.tokenize(book.read_text())[:299]).all()


def test_hash_is_of_lengths_and_tokens():
    """As docs say, so that others can compute it."""
    a, b = np.array([1, 2, 3], np.int32), np.array([70000], np.int32)
    expected = hashlib.sha256(b"3\n\x01\0\0\0\x02\0\0\0\x03\0\0\0" + b"1\n\x70\x11\x01\0").hexdigest()
    assert trace.Trace((a, b), (b,), {}).sha256 == expected
    assert trace.Trace((np.array([1, 2], np.int32), np.array([3, 70000], np.int32)), (), {}).sha256 != expected
    assert trace.Trace((b,), (a, b), {}).held_out_sha256 == expected


# queries


def test_sampled_positions():
    made = trace.Trace((np.zeros(1001, np.int32), np.zeros(1001, np.int32)), (), {})
    positions = trace.sample_positions(made.sequences, 64, seed=1)
    for at in positions:
        assert len(at) == 64 == len(set(at)) and (np.diff(at) > 0).all() and 500 <= at[0] and at[-1] < 1001
    assert (positions[0] != positions[1]).any()
    again, other = (
        trace.sample_positions(made.sequences, 64, seed=1),
        trace.sample_positions(made.sequences, 64, seed=2),
    )
    assert all((a == b).all() for a, b in zip(positions, again)) and (positions[0] != other[0]).any()
    # more than there are: all of the second half
    assert [at.tolist() for at in trace.sample_positions(made.sequences, 10_000, seed=1)] == [
        list(range(500, 1001))
    ] * 2
