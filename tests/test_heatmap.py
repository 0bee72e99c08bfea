"""The picture of a policy."""

import struct

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.plot.heatmap import FULL_COLOR, draw, plot, short


def cells(figure):
    return [patch for patch in figure.axes[0].patches if patch.get_width() < 1]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(("n_layers", "n_heads"), [(1, 1), (4, 4), (30, 3), (60, 8), (32, 32)])
def test_pictures_of_every_size(tmp_path, n_layers, n_heads):
    path = tmp_path / "p.png"
    plot(
        Policy({il: [None if (il + i) % 3 == 0 else 64 << i % 8 for i in range(n_heads)] for il in range(n_layers)}),
        path,
    )
    width, height = png_size(path)
    assert 400 < width < 4000 and 150 < height < 4000
    assert list(tmp_path.iterdir()) == [path]


def test_what_it_shows():
    figure = draw(Policy({3: [None, 512, 8192], 7: [512, 512, 1536]}), title="a model")
    assert len(cells(figure)) == 6
    assert texts(figure) == ["full", "512", "8K", "512", "512", "1.5K"]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["3", "7"]
    assert legend(figure) == ["512", "1.5K", "8K", "full"]
    assert figure._suptitle.get_text() == "a model"
    from matplotlib.colors import to_rgba

    colors = {text: cell.get_facecolor() for text, cell in zip(texts(figure), cells(figure))}
    assert colors["full"] == to_rgba(FULL_COLOR)
    assert len(set(colors.values())) == 4


def test_many_windows_have_a_scale():
    figure = draw(Policy({0: [16 << i for i in range(12)], 1: [None] * 12}))
    assert len(figure.axes) == 2 and legend(figure) == ["full"]
    figure.draw_without_rendering()
    assert {"64", "1K", "16K"} & {tick.get_text() for tick in figure.axes[1].get_xticklabels()}


def test_layers_that_the_policy_does_not_list(mini_hybrid):
    figure = draw(Policy({3: [1, 2, 3, 4]}), ModelGeometry.from_gguf(mini_hybrid))
    assert texts(figure) == ["1", "2", "3", "4"] + ["full"] * 4


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (1, "1"),
        (1000, "1000"),
        (1024, "1K"),
        (1500, "1.46K"),
        (131072, "128K"),
        (1023 * 1024 + 5, "1023K"),
        (2**20, "1M"),
        (2**31 - 1, "2G"),
        (None, "full"),
    ],
)
def test_short(window, text):
    assert short(window) == text


def test_a_title_is_no_formula(tmp_path):
    """The names of models may hold what TeX would read."""
    plot(Policy({0: [1, None]}), tmp_path / "p.png", title=r"costs $\frac$ 5")
    assert (tmp_path / "p.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["p.svg", "p.PDF"])
def test_other_formats(tmp_path, name):
    plot(Policy({0: [1, None]}), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 1000


def test_errors(tmp_path):
    policy = Policy({0: [1]})
    taken = tmp_path / "taken.png"
    taken.touch()
    for arguments, message in (
        ((Policy(), tmp_path / "a.png"), "the policy lists no layer: there is nothing to draw"),
        ((policy, tmp_path / "a.xyz"), f"{tmp_path}/a.xyz: a name that ends in .png, .svg or .pdf expected"),
        ((policy, taken), f"{taken}: exists already; --force replaces it"),
        ((policy, tmp_path / "no" / "a.png"), f"{tmp_path}/no/a.png: cannot write: No such file or directory"),
    ):
        with pytest.raises(HwkvError) as caught:
            plot(*arguments)
        assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == [taken]
    plot(policy, taken, overwrite=True)
    assert taken.stat().st_size > 1000
