"""The policy object: JSON in and out, what is refused, and what it means."""

import json
import random

import pytest

from hwkv_llamacpp import HwkvError, ModelGeometry, Policy
from hwkv_llamacpp.baselines.matrix import matrix
from hwkv_llamacpp.baselines.pattern import pattern
from hwkv_llamacpp.baselines.rows import format_row, parse_row
from hwkv_llamacpp.baselines.uniform import uniform

CANONICAL = """\
{
  "format": "hwkv-policy",
  "version": 1,
  "model": {"architecture": "llama", "name": "Ünit", "n_layer": 4, "fingerprint": "00ff"},
  "n_sink": 0,
  "layers": [
    {"layer": 0, "windows": ["full", 512]},
    {"layer": 3, "windows": [64, 2147483647]}
  ],
  "provenance": {"method": "hand", "tau": 0.995, "nested": {"a": [1, 2.5, null]}}
}
"""


@pytest.fixture
def geometry(metadata_gguf):
    """4 layers of 2 KV heads: layers 0 and 2 take windows, 1 and 3 slide."""
    return ModelGeometry.from_gguf(
        metadata_gguf(
            "maple",
            {
                "attention.head_count_kv": 2,
                "attention.sliding_window": 128,
                "attention.sliding_window_pattern": [0, 1, 0, 1],
            },
        )
    )


def refused(function, *arguments):
    with pytest.raises(HwkvError) as caught:
        function(*arguments)
    return str(caught.value)


# JSON


def test_canonical_json():
    policy = Policy.from_json(CANONICAL)
    assert policy.layers == {0: (None, 512), 3: (64, 2**31 - 1)}
    assert policy.to_json() == CANONICAL


def test_json_of_any_layout_becomes_canonical():
    data = json.loads(CANONICAL)
    data["layers"].reverse()
    text = json.dumps(dict(reversed(data.items())), indent=8)
    assert Policy.from_json(text).to_json() == CANONICAL


def test_least_json():
    policy = Policy.from_json('{"format": "hwkv-policy", "version": 1, "layers": []}')
    assert policy == Policy() == Policy.from_json(policy.to_json())
    assert policy.to_json() == '{\n  "format": "hwkv-policy",\n  "version": 1,\n  "n_sink": 0,\n  "layers": []\n}\n'


def test_save_and_load(tmp_path):
    path = tmp_path / "p.json"
    Policy.from_json(CANONICAL).save(path)
    assert path.read_text(encoding="utf-8") == CANONICAL
    assert Policy.load(path).to_json() == CANONICAL
    assert list(tmp_path.iterdir()) == [path]


def edited(**changes):
    """The canonical policy's text with other keys; a value of ... removes the key."""
    data = {**json.loads(CANONICAL), **changes}
    return json.dumps({key: value for key, value in data.items() if value is not ...})


def rows(*windows, layer=0):
    return edited(layers=[{"layer": layer, "windows": list(windows)}])


EXPECTED = '"full" or 1 to 2147483647 tokens expected'
BAD_JSON = [
    ("", "P: not JSON: Expecting value at line 1 column 1"),
    ("{]", "P: not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
    ("\ufeff{}", "P: not JSON: Unexpected UTF-8 BOM (decode using utf-8-sig) at line 1 column 1"),
    ("[1, 2]", "P: holds [1, 2], a JSON object expected"),
    ("null", "P: holds null, a JSON object expected"),
    ("[" * 100_000, "P: its JSON is nested too deeply: at most 64 levels expected"),
    ('{"format": NaN}', "P: not JSON: NaN is not a JSON value"),
    ('{"version": 1e999}', "P: not JSON: a number is too large"),
    ('{"version": ' + "9" * 5000 + "}", "P: not JSON: a number is too large"),
    ('{"format": "\\ud800"}', "P: not JSON: it has a text with half a surrogate pair"),
    ('{"format": 1, "format": 2}', "P: key 'format' occurs twice in one JSON object"),
    ('{"provenance": {"a": 1, "a": 1}}', "P: key 'a' occurs twice in one JSON object"),
    ("{}", "P: key 'format' is missing"),
    (edited(layers=...), "P: key 'layers' is missing"),
    (edited(windows=[]), "P: key 'windows' is unknown; known are format, version, model, n_sink, layers, provenance"),
    (edited(format="x"), 'P: key \'format\' is "x", "hwkv-policy" expected'),
    (edited(version=2), "P: key 'version' is 2, 1 expected"),
    (edited(version=1.0), "P: key 'version' is 1.0, 1 expected"),
    (edited(version=True), "P: key 'version' is true, 1 expected"),
    (edited(n_sink=-1), "P: key 'n_sink' is -1, an integer from 0 to 2147483647 expected"),
    (edited(n_sink="4"), "P: key 'n_sink' is \"4\", an integer from 0 to 2147483647 expected"),
    (edited(model=[]), "P: key 'model' is [], a JSON object expected"),
    (edited(model={"arch": "x"}), "P: key 'model.arch' is unknown; known are architecture, name, n_layer, fingerprint"),
    (edited(model={"n_layer": "4"}), "P: key 'model.n_layer' is \"4\", an integer from 0 to 2147483647 expected"),
    (edited(model={"name": 7}), "P: key 'model.name' is 7, a text expected"),
    (edited(provenance="me"), "P: key 'provenance' is \"me\", a JSON object expected"),
    (edited(layers={}), "P: key 'layers' is {}, a list expected"),
    (edited(layers=[3]), "P: key 'layers[0]' is 3, a JSON object expected"),
    (edited(layers=[{"layer": 0}]), "P: key 'layers[0].windows' is missing"),
    (
        edited(layers=[{"layer": 0, "windows": [1], "n": 1}]),
        "P: key 'layers[0].n' is unknown; known are layer, windows",
    ),
    (edited(layers=[{"layer": 0, "windows": [1]}] * 2), "P: key 'layers[1].layer' lists layer 0 a second time"),
    (
        edited(layers=[{"layer": 0, "windows": 512}]),
        "P: key 'layers[0].windows' is 512, a list of one window per KV head expected",
    ),
    (rows(), "P: key 'layers[0].windows' is [], a list of one window per KV head expected"),
    (rows(1, layer=-1), "P: key 'layers[0].layer' is -1, an integer from 0 to 2147483647 expected"),
    (rows(1, layer="0"), "P: key 'layers[0].layer' is \"0\", an integer from 0 to 2147483647 expected"),
    (rows(1, 0), f"P: key 'layers[0].windows[1]' is 0, {EXPECTED}"),
    (rows(-5), f"P: key 'layers[0].windows[0]' is -5, {EXPECTED}"),
    (rows(True), f"P: key 'layers[0].windows[0]' is true, {EXPECTED}"),
    (rows(512.0), f"P: key 'layers[0].windows[0]' is 512.0, {EXPECTED}"),
    (rows(None), f"P: key 'layers[0].windows[0]' is null, {EXPECTED}"),
    (rows("512"), f"P: key 'layers[0].windows[0]' is \"512\", {EXPECTED}"),
    (rows("Full"), f"P: key 'layers[0].windows[0]' is \"Full\", {EXPECTED}"),
    (rows(2**31), f"P: key 'layers[0].windows[0]' is 2147483648, {EXPECTED}"),
    (rows(10**100), f"P: key 'layers[0].windows[0]' is {str(10**100)[:57]}..., {EXPECTED}"),
]


@pytest.mark.parametrize(("text", "message"), BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json(text, message):
    assert refused(Policy.from_json, text, "P") == message


def test_bad_files(tmp_path):
    path = tmp_path / "p.json"
    assert refused(Policy.load, path) == f"{path}: cannot read: No such file or directory"
    assert refused(Policy.load, tmp_path) == f"{tmp_path}: cannot read: Is a directory"
    path.write_bytes(b'{"format": "\xff"}')
    assert refused(Policy.load, path) == f"{path}: not JSON: byte 12 is not UTF-8 text"
    with open(path, "wb") as file:
        file.truncate(2**36)
    assert refused(Policy.load, path) == f"{path}: not a policy: it has {2**36} bytes, at most {2**20} expected"


def test_policy_from_a_gguf(mini_hybrid):
    assert refused(Policy.load, mini_hybrid) == f"{mini_hybrid}: has no embedded policy"


# the object


def test_windows_from_python():
    numpy = pytest.importorskip("numpy")
    policy = Policy({5: ["full", None, numpy.int64(7)], 1: numpy.array([3, 4])})
    assert policy.layers == {1: (3, 4), 5: (None, None, 7)}
    assert list(policy.layers) == [1, 5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({0: [0]},), f"policy: window 0 of layer 0 is 0, {EXPECTED}"),
        (({0: [1, 2.0]},), f"policy: window 1 of layer 0 is 2.0, {EXPECTED}"),
        (({0: "full"},), 'policy: windows of layer 0 is "full", a sequence expected'),
        (({0: []},), "policy: windows of layer 0 is empty, one window per KV head expected"),
        (({"a": [1]},), 'policy: layer is "a", an integer from 0 to 2147483647 expected'),
        (([1],), "policy: layers is [1], a dict of layer: windows expected"),
        (({}, -1), "policy: n_sink is -1, an integer from 0 to 2147483647 expected"),
    ],
)
def test_bad_objects(arguments, message):
    assert refused(Policy, *arguments) == message


def test_fingerprint():
    """FNV-1a of the canonical text, written out here once more."""

    def fnv(text):
        value = 0xCBF29CE484222325
        for byte in text.encode():
            value = (value ^ byte) * 0x100000001B3 % 2**64
        return f"{value:016x}"

    assert fnv("") == "cbf29ce484222325" and fnv("a") == "af63dc4c8601ec8c"  # published test vectors
    policy = Policy({3: [None, 512], 0: [64, 64], 1: [None, None]})
    assert policy.fingerprint(8) == fnv("hwkv1 n_layer=8 n_sink=0 0:64,64 3:full,512")
    assert policy.fingerprint(8) == Policy({3: [None, 512], 0: [64, 64]}, provenance={"a": 1}).fingerprint(8)
    assert len({p.fingerprint(8) for p in (policy, Policy(), Policy({0: [64, 64]}), Policy(n_sink=4))}) == 4
    assert policy.fingerprint(8) != policy.fingerprint(9)
    assert Policy({0: [None]}).fingerprint(8) == Policy().fingerprint(8)


def test_retention(geometry):
    policy = Policy({0: [100, None]})
    assert policy.retention(1000) == pytest.approx((100 + 1000) / 2000)  # of the listed layer
    assert policy.retention(1000, geometry) == pytest.approx((100 + 3 * 1000) / 4000)  # layer 2 is full
    assert policy.retention(50, geometry) == 1.0
    assert Policy({0: [100, 100], 2: [100, 100]}, n_sink=4).retention(1000, geometry) == pytest.approx(0.104)
    assert Policy().retention(10) == 1.0
    assert refused(policy.retention, 0) == "retention is asked at 0 tokens, at least 1 expected"


# does it fit


def test_fits(geometry):
    Policy({0: [1, None], 2: [None, None]}, model=geometry.describe()).check(geometry)
    Policy().check(geometry)
    Policy({0: [1, 1]}, model={"name": "some other name"}).check(geometry)


def test_does_not_fit(geometry):
    def message(policy):
        return refused(policy.check, geometry, "P")

    assert message(Policy({7: [1, 1]})) == "P: lists layer 7, the model has layers 0 to 3"
    assert message(Policy({1: [1, 1]})) == (
        "P: lists layer 1, which cannot take windows: it has the model's own sliding window of 128 tokens"
    )
    assert message(Policy({2: [1]})) == "P: layer 2 has 1 windows, the model has 2 KV heads there"
    assert message(Policy(model={"architecture": "llama"})) == (
        f'P: made for another model: key \'model.architecture\' is "llama", "maple" expected ({geometry.name})'
    )
    assert message(Policy(model={"n_layer": 5})) == (
        f"P: made for another model: key 'model.n_layer' is 5, 4 expected ({geometry.name})"
    )
    assert "key 'model.fingerprint' is \"ab\"" in message(Policy(model={"fingerprint": "ab"}))


def test_layers_that_take_no_windows_say_why(mini_hybrid, metadata_gguf):
    hybrid = ModelGeometry.from_gguf(mini_hybrid)
    assert refused(Policy({0: [1]}).check, hybrid) == (
        "policy: lists layer 0, which cannot take windows: it is recurrent and keeps a state instead of KV"
    )
    bloom = ModelGeometry.from_gguf(metadata_gguf("bloom"))
    assert refused(Policy({0: [1] * 8}).check, bloom) == (
        "policy: no policy fits a model of architecture bloom:"
        " its ALiBi slopes follow the head's index, which grouped attention changes"
    )


# made by hand


def test_uniform(geometry):
    policy = uniform(geometry, 256, keep_full=[(0, 1)])
    assert policy.layers == {0: (256, None), 2: (256, 256)}
    assert policy.model == geometry.describe()
    assert policy.provenance == {"method": "uniform", "window": 256, "keep_full": ["0:1"], "made_by": "hand"}
    assert uniform(geometry, 256, [(2, None)]).layers[2] == (None, None)
    assert refused(uniform, geometry, 1, [(1, None)]) == (
        "layer 1 cannot be kept full: it has the model's own sliding window of 128 tokens"
    )
    assert refused(uniform, geometry, 1, [(9, 0)]) == "layer 9 cannot be kept full: the model has layers 0 to 3"
    assert refused(uniform, geometry, 1, [(0, 2)]) == (
        "KV head 2 of layer 0 cannot be kept full: the layer has KV heads 0 to 1"
    )


def test_pattern(geometry):
    assert pattern(geometry, [None, 64]).layers == {0: (None, 64), 2: (None, 64)}
    assert pattern(geometry, [None, 64], {2: [1, 2]}).layers == {0: (None, 64), 2: (1, 2)}
    assert pattern(geometry, None, {2: [1, 2]}).layers == {2: (1, 2)}
    assert refused(pattern, geometry, [1, 2, 3]) == "pattern: layer 0 gets 3 windows, the model has 2 KV heads there"
    assert refused(pattern, geometry, None, {3: [1, 2]}) == (
        "pattern: layer 3 cannot take windows: it has the model's own sliding window of 128 tokens"
    )


MATRICES = [
    ("m.csv", "full,512\n64,full\n", {0: (None, 512), 2: (64, None)}),
    ("m.csv", "# head 0, head 1\n\n full , 512 \r\n64,1\n", {0: (None, 512), 2: (64, 1)}),
    ("m.json", '[["full", 512], [64, 1]]', {0: (None, 512), 2: (64, 1)}),
    ("m.json", '{"2": [64, 1]}', {2: (64, 1)}),
    ("m.csv", "1,2\n", "FILE: has 1 rows, the model has 2 configurable layers"),
    ("m.csv", "1,2\n3\n", "FILE: layer 2 gets 1 windows, the model has 2 KV heads there"),
    ("m.csv", "1,2\n3,4.5\n", 'FILE: line 2: "4.5" is neither "full" nor a number of tokens'),
    ("m.csv", "1,2\n3,\n", 'FILE: line 2: "" is neither "full" nor a number of tokens'),
    ("m.csv", "1,2\n3,0\n", f"policy: window 1 of layer 2 is 0, {EXPECTED}"),
    ("m.csv", b"\xff\xfe", "FILE: is not UTF-8 text"),
    ("m.json", "{", "FILE: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("m.json", "[1, 2]", "FILE: a list of rows, or an object of layer: row expected"),
    ("m.json", '{"a": [1]}', "FILE: keys that are layer numbers expected"),
    (
        "m.json",
        '{"1": [1, 1]}',
        "FILE: layer 1 cannot take windows: it has the model's own sliding window of 128 tokens",
    ),
    ("m.json", "[[1, 2.5], [1, 1]]", f"policy: window 1 of layer 0 is 2.5, {EXPECTED}"),
]


@pytest.mark.parametrize(("name", "content", "expected"), MATRICES, ids=range(len(MATRICES)))
def test_matrix(geometry, tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, dict):
        assert matrix(geometry, path).layers == expected
    else:
        assert refused(matrix, geometry, path).replace(str(path), "FILE") == expected


def test_rows_as_text():
    assert parse_row("full, 512,64") == [None, 512, 64]
    assert format_row([None, 512, 64]) == "full,512,64"
    for bad in ("", "full,,", "1.5", "-3", "٣", "1" * 30):
        with pytest.raises(ValueError, match="is neither"):
            parse_row(bad)


# any policy


def test_round_trips_of_any_policy():
    rng = random.Random(0)
    texts = ["", "full", "ü", "日本", "\u2028", '"\\', "\x00\x1f", "😀", "a" * 300]
    numbers = [0, -1, 2**70, 0.1, -0.0, 1e-320, 1.7976931348623157e308]

    def value(depth):
        kind = rng.randrange(5 if depth else 3)
        if kind < 3:
            return rng.choice([None, True, False, *texts, *numbers, rng.random() * 10 ** rng.randint(-300, 300)])
        items = [value(depth - 1) for _ in range(rng.randrange(4))]
        return items if kind == 3 else {rng.choice(texts) + str(i): item for i, item in enumerate(items)}

    for _ in range(500):
        layers = {
            rng.randrange(600): [
                rng.choice([None, 1, 2**31 - 1, rng.randint(1, 2**31 - 1)]) for _ in range(rng.randint(1, 9))
            ]
            for _ in range(rng.randrange(6))
        }
        policy = Policy(layers, rng.choice([0, 4, 2**31 - 1]), provenance=rng.choice([None, {"x": value(3)}]))
        again = Policy.from_json(policy.to_json())
        assert again == policy
        assert again.to_json() == policy.to_json()
