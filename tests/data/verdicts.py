"""Policies, good and bad, and what a reader must say to each: the Python reader and the C++ reader give one verdict.

JSON is a list of (name, bytes of the file, words), GGUF one of (name, hwkv.* keys, words). Words are None where the
policy is taken; else the file is refused, with one sentence that contains them. All that is taken is for the mini
hybrid model: layers 3 and 7 of 8 have 4 KV heads each.
"""

import json
import struct

from gguf import GGUFValueType as Type

MAX_BYTES = 2**20
MAX_DEPTH = 64
MAX_ENTRIES = 65536
MAX = 2**31 - 1

ROWS = [{"layer": 3, "windows": [64, "full", 128, 64]}, {"layer": 7, "windows": [1, 2, 3, "full"]}]
MODEL = {"architecture": "qwen35", "name": "any", "n_layer": 8}


def doc(**changes):
    """A good policy with other keys; a value of ... removes the key, one of bytes stands as it is."""
    data = {"format": "hwkv-policy", "version": 1, "model": MODEL, "n_sink": 4, "layers": ROWS, "provenance": {"a": 1}}
    items = {**data, **changes}.items()
    texts = (
        json.dumps(k).encode() + b": " + (v if isinstance(v, bytes) else json.dumps(v).encode())
        for k, v in items
        if v is not ...
    )
    return b"{" + b", ".join(texts) + b"}"


def row(*windows, layer=3):
    return doc(layers=[{"layer": layer, "windows": list(windows)}])


def raw_row(window):
    """A window that stands as it is."""
    return doc(layers=b'[{"layer": 3, "windows": [64, 64, 64, ' + window + b"]}]")


def model(**changes):
    return doc(model={**MODEL, **changes})


def nested(depth):
    """A policy of so many levels: its object, provenance, and lists in it."""
    text = '{"x": ' + "[" * (depth - 2) + "]" * (depth - 2) + "}"
    return doc(provenance=text.encode())


def padded(n_bytes):
    return doc().ljust(n_bytes)


def many_keys():
    """As many keys as fit, every one of them another."""
    keys, n = [], 500
    while n < MAX_BYTES:
        keys.append(f'"k{len(keys)}": 1')
        n += len(keys[-1]) + 2
    return doc(provenance=("{" + ", ".join(keys[:-1]) + "}").encode())


NUMBER = f"an integer from 0 to {MAX} expected"
WINDOW = f'"full" or 1 to {MAX} tokens expected'
TWICE = "occurs twice in one JSON object"
DEEP = "its JSON is nested too deeply"
OBJECT = "a JSON object expected"
LARGE = "not JSON: a number is too large"

JSON = [
    # taken
    ("whole", doc(), None),
    ("least", b'{"format": "hwkv-policy", "version": 1, "layers": []}', None),
    ("model null", doc(model=None), None),
    ("model missing", doc(model=...), None),
    ("model empty", doc(model={}), None),
    ("model name empty", model(name=""), None),
    ("model fingerprint short", model(fingerprint="00ff"), None),
    ("model fingerprint 64 digits", model(fingerprint="0123456789abcdef" * 4), None),
    ("n_sink missing", doc(n_sink=...), None),
    ("n_sink 0", doc(n_sink=0), None),
    ("n_sink -0", doc(n_sink=b"-0"), None),
    ("n_sink largest", doc(n_sink=MAX), None),
    ("provenance null", doc(provenance=None), None),
    ("provenance missing", doc(provenance=...), None),
    ("provenance empty", doc(provenance={}), None),
    ("provenance with any value", doc(provenance={"a": [None, True, -1, 2.5, "\0\x1b\u202e😀", {"": {}}]}), None),
    ("provenance with escapes", doc(provenance=b'{"\\ud83d\\ude00": "\\u0000\\/\\b"}'), None),
    ("provenance with the largest double", doc(provenance=b'{"a": 1.7976931348623157e308}'), None),
    ("provenance with an integer of 300 digits", doc(provenance=b'{"a": ' + b"9" * 300 + b"}"), None),
    ("provenance with a number near zero", doc(provenance=b'{"a": [1e-400, -0.0, 5e-324]}'), None),
    ("provenance with many keys", many_keys(), None),
    ("layers empty", doc(layers=[]), None),
    ("layers in any order", doc(layers=ROWS[::-1]), None),
    ("all full", row(*["full"] * 4), None),
    ("window 1", row(1, 1, 1, 1), None),
    ("window largest", row(64, MAX, MAX, 64), None),
    ("key written with an escape", doc(n_sink=...).replace(b'"layers"', b'"n\\u005fsink": 4, "layers"'), None),
    ("space around", b"\r\n\t " + doc() + b" \t\r\n", None),
    ("largest", padded(MAX_BYTES), None),
    ("deepest, lists", nested(MAX_DEPTH), None),
    ("deepest, objects", doc(provenance=('{"a":' * 63 + "1" + "}" * 63).encode()), None),
    # not JSON
    ("empty", b"", ""),
    ("only space", b" \n ", "not JSON"),
    ("cut", doc()[:-1], "not JSON"),
    ("two values", doc() + doc(), "not JSON"),
    ("more behind it", doc() + b"x", "not JSON"),
    ("trailing comma", doc().replace(b"]", b",]"), "not JSON"),
    ("comment", b"// x\n" + doc(), "not JSON"),
    ("single quotes", doc().replace(b'"', b"'"), "not JSON"),
    ("byte-order mark", b"\xef\xbb\xbf" + doc(), "not JSON"),
    ("UTF-16", doc().decode().encode("utf-16"), "not JSON"),
    ("NUL behind it", doc() + b"\0", "not JSON"),
    ("NUL before it", b"\0" + doc(), "not JSON"),
    ("NUL in a text", doc(provenance=b'{"a": "\0"}'), "not JSON"),
    ("only NUL", bytes(100), "not JSON"),
    ("control character in a text", doc(provenance=b'{"a": "\x1b[31m"}'), "not JSON"),
    ("line end in a text", doc(provenance=b'{"a": "\n"}'), "not JSON"),
    ("other space", b"\xc2\xa0" + doc(), "not JSON"),
    ("not UTF-8", doc(provenance=b'{"a": "\xff"}'), "not JSON"),
    ("UTF-8 cut", doc(provenance=b'{"a": "\xe2\x82"}'), "not JSON"),
    ("UTF-8 too long", doc(provenance=b'{"a": "\xc0\xaf"}'), "not JSON"),
    ("surrogate in UTF-8", doc(provenance=b'{"a": "\xed\xa0\x80"}'), "not JSON"),
    ("half a surrogate pair, first", doc(provenance=b'{"a": "\\ud83d"}'), "not JSON"),
    ("half a surrogate pair, second", doc(provenance=b'{"a": "\\ude00"}'), "not JSON"),
    ("surrogates in the wrong order", doc(provenance=b'{"a": "\\ude00\\ud83d"}'), "not JSON"),
    ("half a surrogate pair in a key", doc(provenance=b'{"\\ud83d": 1}'), "not JSON"),
    ("bad escape", doc(provenance=b'{"a": "\\x41"}'), "not JSON"),
    ("NaN", doc(n_sink=b"NaN"), "not JSON"),
    ("Infinity", doc(n_sink=b"Infinity"), "not JSON"),
    ("-Infinity", doc(provenance=b'{"a": -Infinity}'), "not JSON"),
    ("zero before a number", doc(n_sink=b"04"), "not JSON"),
    ("plus before a number", doc(n_sink=b"+4"), "not JSON"),
    ("no digit after a point", doc(n_sink=b"4."), "not JSON"),
    ("no digit before a point", doc(n_sink=b".5"), "not JSON"),
    ("hexadecimal", doc(n_sink=b"0x4"), "not JSON"),
    ("True", doc(n_sink=b"True"), "not JSON"),
    # numbers that are none
    ("n_sink 1e999", doc(n_sink=b"1e999"), LARGE),
    ("window -1e999", raw_row(b"-1e999"), LARGE),
    ("provenance with 1e999", doc(provenance=b'{"a": [1e999]}'), LARGE),
    ("provenance with an integer of 310 digits", doc(provenance=b'{"a": ' + b"9" * 310 + b"}"), LARGE),
    ("provenance with an integer of 5000 digits", doc(provenance=b'{"a": -' + b"9" * 5000 + b"}"), LARGE),
    # too much
    ("too large", padded(MAX_BYTES + 1), "not a policy: it has 1048577 bytes, at most 1048576 expected"),
    ("far too large", padded(5 * MAX_BYTES), "not a policy: it has 5242880 bytes, at most 1048576 expected"),
    ("too deep by one, lists", nested(MAX_DEPTH + 1), DEEP),
    ("too deep by one, objects", doc(provenance=('{"a":' * 64 + "1" + "}" * 64).encode()), DEEP),
    ("65 deep in provenance", nested(67), DEEP),
    ("950 deep in provenance", nested(952), DEEP),
    ("100000 deep", nested(100_002), DEEP),
    ("100000 deep and open", b"[" * 100_000, DEEP),
    ("deep windows", raw_row(b"[" * 500 + b"]" * 500), DEEP),
    # doubled keys
    ("format twice", b'{"format": "x", ' + doc()[1:], f"key 'format' {TWICE}"),
    ("layers twice", doc()[:-1] + b', "layers": []}', f"key 'layers' {TWICE}"),
    ("windows twice", doc().replace(b'{"layer": 3', b'{"windows": [1], "layer": 3'), f"key 'windows' {TWICE}"),
    ("n_layer twice", doc().replace(b'"n_layer"', b'"n_layer": 8, "n_layer"'), f"key 'n_layer' {TWICE}"),
    ("twice in provenance", doc(provenance=b'{"a": {"b": 1, "c": 2, "b": 1}}'), f"key 'b' {TWICE}"),
    ("twice, once with an escape", doc(provenance=b'{"b": 1, "\\u0062": 1}'), f"key 'b' {TWICE}"),
    (
        "twice, a long key",
        doc(provenance=(b'{"' + b"k" * 9999 + b'": 1, "' + b"k" * 9999 + b'": 1}')),
        f"kkk...' {TWICE}",
    ),
    # the object
    ("list", b"[1]", f"holds [1], {OBJECT}"),
    ("null", b"null", f"holds null, {OBJECT}"),
    ("number", b"3", f"holds 3, {OBJECT}"),
    ("text", b'"x"', f'holds "x", {OBJECT}'),
    ("no keys", b"{}", "key 'format' is missing"),
    ("format missing", doc(format=...), "key 'format' is missing"),
    ("version missing", doc(version=...), "key 'version' is missing"),
    ("layers missing", doc(layers=...), "key 'layers' is missing"),
    (
        "unknown key",
        doc(windows=[]),
        "key 'windows' is unknown; known are format, version, model, n_sink, layers, provenance",
    ),
    ("unknown key in place of a known one", doc(layers=..., layer=[]), "key 'layer' is unknown"),
    ("unknown key with an escape sequence", doc(**{"\x1b[31m\r": 1}), "is unknown; known are format"),
    ("unknown key, a long one", doc(**{"k" * 99999: 1}), "kkk...' is unknown; known are format"),
    ("unknown key, empty", doc(**{"": 1}), "key '' is unknown; known are format"),
    # format and version
    ("format null", doc(format=None), "key 'format' is null, \"hwkv-policy\" expected"),
    ("format other", doc(format="hwkv"), 'key \'format\' is "hwkv", "hwkv-policy" expected'),
    ("format list", doc(format=["hwkv-policy"]), 'key \'format\' is ["hwkv-policy"], "hwkv-policy" expected'),
    ("version 0", doc(version=0), "key 'version' is 0, 1 expected"),
    ("version 2", doc(version=2), "key 'version' is 2, 1 expected"),
    ("version 1.0", doc(version=1.0), "key 'version' is 1.0, 1 expected"),
    ("version 1e0", doc(version=b"1e0"), "key 'version' is 1.0, 1 expected"),
    ("version text", doc(version="1"), "key 'version' is \"1\", 1 expected"),
    ("version true", doc(version=True), "key 'version' is true, 1 expected"),
    ("version null", doc(version=None), "key 'version' is null, 1 expected"),
    ("version 2^64 + 1", doc(version=2**64 + 1), ", 1 expected"),
    # n_sink
    ("n_sink -1", doc(n_sink=-1), f"key 'n_sink' is -1, {NUMBER}"),
    ("n_sink 2^31", doc(n_sink=2**31), f"key 'n_sink' is 2147483648, {NUMBER}"),
    ("n_sink 2^63", doc(n_sink=2**63), f"key 'n_sink' is 9223372036854775808, {NUMBER}"),
    ("n_sink 2^64", doc(n_sink=2**64), f", {NUMBER}"),
    ("n_sink -2^63", doc(n_sink=-(2**63)), f"key 'n_sink' is -9223372036854775808, {NUMBER}"),
    ("n_sink 4.0", doc(n_sink=4.0), f"key 'n_sink' is 4.0, {NUMBER}"),
    ("n_sink 1.5", doc(n_sink=1.5), f"key 'n_sink' is 1.5, {NUMBER}"),
    ("n_sink 1e3", doc(n_sink=b"1e3"), f"key 'n_sink' is 1000.0, {NUMBER}"),
    ("n_sink text", doc(n_sink="4"), f"key 'n_sink' is \"4\", {NUMBER}"),
    ("n_sink null", doc(n_sink=None), f"key 'n_sink' is null, {NUMBER}"),
    ("n_sink false", doc(n_sink=False), f"key 'n_sink' is false, {NUMBER}"),
    ("n_sink list", doc(n_sink=[4]), f"key 'n_sink' is [4], {NUMBER}"),
    ("n_sink object", doc(n_sink={}), f"key 'n_sink' is {{}}, {NUMBER}"),
    # model
    ("model list", doc(model=[]), f"key 'model' is [], {OBJECT}"),
    ("model text", doc(model="qwen35"), f"key 'model' is \"qwen35\", {OBJECT}"),
    ("model false", doc(model=False), f"key 'model' is false, {OBJECT}"),
    (
        "model with an unknown key",
        model(arch="x"),
        "key 'model.arch' is unknown; known are architecture, name, n_layer, fingerprint",
    ),
    (
        "architecture null",
        model(architecture=None),
        "key 'model.architecture' is null, a text that is not empty expected",
    ),
    (
        "architecture empty",
        model(architecture=""),
        "key 'model.architecture' is \"\", a text that is not empty expected",
    ),
    (
        "architecture number",
        model(architecture=35),
        "key 'model.architecture' is 35, a text that is not empty expected",
    ),
    ("architecture a list", model(architecture=[0] * 9999), "..., a text that is not empty expected"),
    ("name null", model(name=None), "key 'model.name' is null, a text expected"),
    ("name number", model(name=7), "key 'model.name' is 7, a text expected"),
    ("n_layer null", model(n_layer=None), f"key 'model.n_layer' is null, {NUMBER}"),
    ("n_layer -1", model(n_layer=-1), f"key 'model.n_layer' is -1, {NUMBER}"),
    ("n_layer 8.0", model(n_layer=8.0), f"key 'model.n_layer' is 8.0, {NUMBER}"),
    ("n_layer text", model(n_layer="8"), f"key 'model.n_layer' is \"8\", {NUMBER}"),
    ("n_layer 2^31", model(n_layer=2**31), f"key 'model.n_layer' is 2147483648, {NUMBER}"),
    ("n_layer true", model(n_layer=True), f"key 'model.n_layer' is true, {NUMBER}"),
    ("fingerprint null", model(fingerprint=None), "key 'model.fingerprint' is null, 1 to 64 hex digits expected"),
    ("fingerprint number", model(fingerprint=12), "key 'model.fingerprint' is 12, 1 to 64 hex digits expected"),
    ("fingerprint empty", model(fingerprint=""), "key 'model.fingerprint' is \"\", 1 to 64 hex digits expected"),
    (
        "fingerprint upper case",
        model(fingerprint="AB"),
        "key 'model.fingerprint' is \"AB\", 1 to 64 hex digits expected",
    ),
    ("fingerprint 65 digits", model(fingerprint="0" * 65), "..., 1 to 64 hex digits expected"),
    ("fingerprint with a line end", model(fingerprint="ab\n"), "1 to 64 hex digits expected"),
    # provenance
    ("provenance list", doc(provenance=[]), f"key 'provenance' is [], {OBJECT}"),
    ("provenance text", doc(provenance="me"), f"key 'provenance' is \"me\", {OBJECT}"),
    ("provenance false", doc(provenance=False), f"key 'provenance' is false, {OBJECT}"),
    # layers
    ("layers null", doc(layers=None), "key 'layers' is null, a list expected"),
    ("layers object", doc(layers={}), "key 'layers' is {}, a list expected"),
    ("layers text", doc(layers="x"), "key 'layers' is \"x\", a list expected"),
    ("layers of numbers", doc(layers=[3]), f"key 'layers[0]' is 3, {OBJECT}"),
    ("layers of lists", doc(layers=[ROWS[0], []]), f"key 'layers[1]' is [], {OBJECT}"),
    ("layers of null", doc(layers=[None]), f"key 'layers[0]' is null, {OBJECT}"),
    ("layer missing", doc(layers=[{"windows": [1]}]), "key 'layers[0].layer' is missing"),
    ("windows missing", doc(layers=[ROWS[0], {"layer": 7}]), "key 'layers[1].windows' is missing"),
    (
        "unknown key in a layer",
        doc(layers=[{**ROWS[0], "n": 1}]),
        "key 'layers[0].n' is unknown; known are layer, windows",
    ),
    ("layer twice", doc(layers=[ROWS[0]] * 2), "key 'layers[1].layer' lists layer 3 a second time"),
    ("layer -1", row(1, layer=-1), f"key 'layers[0].layer' is -1, {NUMBER}"),
    ("layer 2^31", row(1, layer=2**31), f"key 'layers[0].layer' is 2147483648, {NUMBER}"),
    ("layer 3.0", row(1, layer=3.0), f"key 'layers[0].layer' is 3.0, {NUMBER}"),
    ("layer text", row(1, layer="3"), f"key 'layers[0].layer' is \"3\", {NUMBER}"),
    ("layer true", row(1, layer=True), f"key 'layers[0].layer' is true, {NUMBER}"),
    ("layer null", row(1, layer=None), f"key 'layers[0].layer' is null, {NUMBER}"),
    ("layer list", row(1, layer=[3]), f"key 'layers[0].layer' is [3], {NUMBER}"),
    # windows
    (
        "windows null",
        doc(layers=[{"layer": 3, "windows": None}]),
        "key 'layers[0].windows' is null, a list of one window per KV head expected",
    ),
    (
        "windows number",
        doc(layers=[{"layer": 3, "windows": 64}]),
        "key 'layers[0].windows' is 64, a list of one window per KV head expected",
    ),
    (
        "windows full",
        doc(layers=[{"layer": 3, "windows": "full"}]),
        "key 'layers[0].windows' is \"full\", a list of one window per KV head expected",
    ),
    (
        "windows object",
        doc(layers=[{"layer": 3, "windows": {}}]),
        "key 'layers[0].windows' is {}, a list of one window per KV head expected",
    ),
    ("windows empty", row(), "key 'layers[0].windows' is [], a list of one window per KV head expected"),
    ("window 0", row(64, 0), f"key 'layers[0].windows[1]' is 0, {WINDOW}"),
    ("window -1", row(-1), f"key 'layers[0].windows[0]' is -1, {WINDOW}"),
    ("window 2^31", row(2**31), f"key 'layers[0].windows[0]' is 2147483648, {WINDOW}"),
    ("window 2^32 + 64", row(2**32 + 64), f"key 'layers[0].windows[0]' is 4294967360, {WINDOW}"),
    ("window 2^63", row(2**63), f"key 'layers[0].windows[0]' is 9223372036854775808, {WINDOW}"),
    ("window 10^30", row(10**30), f", {WINDOW}"),
    ("window 1e3", raw_row(b"1e3"), f"key 'layers[0].windows[3]' is 1000.0, {WINDOW}"),
    ("window 64.0", row(64.0), f"key 'layers[0].windows[0]' is 64.0, {WINDOW}"),
    ("window true", row(True), f"key 'layers[0].windows[0]' is true, {WINDOW}"),
    ("window null", row(None), f"key 'layers[0].windows[0]' is null, {WINDOW}"),
    ("window digits in a text", row("64"), f"key 'layers[0].windows[0]' is \"64\", {WINDOW}"),
    ("window Full", row("Full"), f"key 'layers[0].windows[0]' is \"Full\", {WINDOW}"),
    ("window empty text", row(""), f"key 'layers[0].windows[0]' is \"\", {WINDOW}"),
    ("window with an escape sequence", row("\x1b]0;x\x07\x9b"), f", {WINDOW}"),
    ("window a long text", row("ä" * 9999), f"..., {WINDOW}"),
    ("window list", row([64]), f"key 'layers[0].windows[0]' is [64], {WINDOW}"),
    ("window object", row({}), f"key 'layers[0].windows[0]' is {{}}, {WINDOW}"),
]


def keys(**changes):
    """The keys of a good policy with others; a value of ... removes the key."""
    data = {
        "version": u32(1),
        "n_sink": u32(4),
        "layers": i32(3, 7),
        "head_counts": i32(4, 4),
        "windows": i32(64, -1, 128, 64, 1, 2, 3, -1),
        "summary": "for people",
        "model": json.dumps(MODEL),
        "provenance": '{"a": 1}',
    }
    return {f"hwkv.{key}": value for key, value in {**data, **changes}.items() if value is not ...}


def only(**values):
    return {f"hwkv.{key}": value for key, value in values.items()}


def u32(value):
    return value, Type.UINT32


def i32(*values):
    return array(Type.INT32, *values)


def array(kind, *values):
    return list(values), Type.ARRAY, kind


CODES = {
    Type.UINT8: "B",
    Type.INT8: "b",
    Type.UINT16: "H",
    Type.INT16: "h",
    Type.UINT32: "I",
    Type.INT32: "i",
    Type.UINT64: "Q",
    Type.INT64: "q",
    Type.FLOAT32: "f",
    Type.FLOAT64: "d",
    Type.BOOL: "?",
}


def gguf_bytes(keys):
    """A GGUF with these keys and no tensors. Written here: the official writer takes no empty arrays."""

    def text(value):
        data = value if isinstance(value, bytes) else value.encode()
        return struct.pack("<Q", len(data)) + data

    def item(kind, value):
        return text(value) if kind == Type.STRING else struct.pack("<" + CODES[kind], value)

    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys) + 1)
    for key, value in {"general.architecture": "qwen35", **keys}.items():
        value, kind, *item_kind = value if isinstance(value, tuple) else (value, Type.STRING)
        data += text(key) + struct.pack("<I", kind)
        if item_kind:
            data += struct.pack("<IQ", item_kind[0], len(value)) + b"".join(item(item_kind[0], x) for x in value)
        else:
            data += item(kind, value)
    return data


INTEGERS = (Type.UINT8, Type.INT8, Type.UINT16, Type.INT16, Type.UINT32, Type.INT32, Type.UINT64, Type.INT64)
NOT_OBJECT = "a JSON object expected"
FULL_OR_WINDOW = f"-1 for full or 1 to {MAX} tokens expected"
NONE = "has no embedded policy"

GGUF = [
    # taken
    ("whole", keys(), None),
    ("nothing optional", keys(n_sink=..., summary=..., model=..., provenance=...), None),
    ("no layers", keys(layers=i32(), head_counts=i32(), windows=i32()), None),
    ("no layers, of another type", keys(layers=array(Type.STRING), head_counts=i32(), windows=i32()), None),
    *((f"version {kind.name}", keys(version=(1, kind)), None) for kind in INTEGERS),
    *((f"n_sink {kind.name}", keys(n_sink=(4, kind)), None) for kind in INTEGERS),
    *((f"layers {kind.name}", keys(layers=array(kind, 3, 7)), None) for kind in INTEGERS),
    *((f"head_counts {kind.name}", keys(head_counts=array(kind, 4, 4)), None) for kind in INTEGERS),
    *((f"windows {kind.name}", keys(windows=array(kind, *[64] * 8)), None) for kind in INTEGERS),
    ("windows INT64 with full", keys(windows=array(Type.INT64, 64, -1, 1, 1, 1, 1, 1, MAX)), None),
    ("n_sink largest", keys(n_sink=u32(MAX)), None),
    ("layers in any order", keys(layers=i32(7, 3)), None),
    ("summary of another type", keys(summary=u32(1)), None),
    ("unknown key", keys(colour="red"), None),
    ("model null", keys(model="null"), None),
    ("model with a NUL behind it", keys(model='{"n_layer": 8}\0x'), None),
    ("provenance null", keys(provenance="null"), None),
    ("provenance deepest", keys(provenance='{"a":' + "[" * 62 + "]" * 62 + "}"), None),
    # no policy
    ("no keys", {}, NONE),
    ("only a key that is none of a policy's", only(policy="/etc/passwd"), NONE),
    # keys missing
    ("version missing", keys(version=...), "key 'hwkv.version' is missing"),
    *(
        (f"only {key}", only(**{key: value}), "key 'hwkv.version' is missing")
        for key, value in (
            ("n_sink", u32(4)),
            ("layers", i32(3)),
            ("head_counts", i32(4)),
            ("windows", i32(1)),
            ("summary", "x"),
            ("model", "{}"),
            ("provenance", "{}"),
        )
    ),
    ("only version", only(version=u32(1)), "key 'hwkv.layers' is missing"),
    ("layers missing", keys(layers=...), "key 'hwkv.layers' is missing"),
    ("head_counts missing", keys(head_counts=...), "key 'hwkv.head_counts' is missing"),
    ("windows missing", keys(windows=...), "key 'hwkv.windows' is missing"),
    # version
    ("version 0", keys(version=u32(0)), "key 'hwkv.version' is 0, 1 expected"),
    ("version 2", keys(version=(2, Type.UINT64)), "key 'hwkv.version' is 2, 1 expected"),
    (
        "version 2^64 - 1",
        keys(version=(2**64 - 1, Type.UINT64)),
        "key 'hwkv.version' is 18446744073709551615, 1 expected",
    ),
    ("version -1", keys(version=(-1, Type.INT8)), "key 'hwkv.version' is -1, 1 expected"),
    ("version float", keys(version=(1.0, Type.FLOAT32)), "key 'hwkv.version' is"),
    ("version bool", keys(version=(True, Type.BOOL)), "key 'hwkv.version' is"),
    ("version text", keys(version="1"), "key 'hwkv.version' is"),
    ("version array", keys(version=array(Type.UINT32, 1)), "key 'hwkv.version' is"),
    # n_sink
    ("n_sink -1", keys(n_sink=(-1, Type.INT32)), f"key 'hwkv.n_sink' is -1, {NUMBER}"),
    ("n_sink 2^31", keys(n_sink=u32(2**31)), f"key 'hwkv.n_sink' is 2147483648, {NUMBER}"),
    ("n_sink 2^63", keys(n_sink=(2**63, Type.UINT64)), f"key 'hwkv.n_sink' is 9223372036854775808, {NUMBER}"),
    ("n_sink float", keys(n_sink=(4.0, Type.FLOAT64)), "key 'hwkv.n_sink' is"),
    ("n_sink text", keys(n_sink="4"), "key 'hwkv.n_sink' is"),
    ("n_sink array", keys(n_sink=i32(4)), "key 'hwkv.n_sink' is"),
    ("n_sink a long array", keys(n_sink=i32(*[4] * 70000)), "key 'hwkv.n_sink'"),
    # layers
    ("layers -1", keys(layers=i32(3, -1)), f"key 'hwkv.layers[1]' is -1, {NUMBER}"),
    ("layers 2^31", keys(layers=array(Type.UINT32, 2**31, 7)), f"key 'hwkv.layers[0]' is 2147483648, {NUMBER}"),
    ("layers 2^32 + 3", keys(layers=array(Type.UINT64, 2**32 + 3, 7)), f"key 'hwkv.layers[0]' is 4294967299, {NUMBER}"),
    ("layers twice", keys(layers=i32(3, 3)), "key 'hwkv.layers[1]' lists layer 3 a second time"),
    ("layers scalar", keys(layers=u32(3)), "key 'hwkv.layers' is"),
    ("layers float", keys(layers=array(Type.FLOAT32, 3.0, 7.0)), "key 'hwkv.layers"),
    ("layers bool", keys(layers=array(Type.BOOL, True, False)), "key 'hwkv.layers"),
    ("layers text", keys(layers=array(Type.STRING, "3", "7")), "key 'hwkv.layers"),
    # head_counts
    (
        "head_counts 0",
        keys(head_counts=i32(8, 0)),
        f"key 'hwkv.head_counts[1]' is 0, an integer from 1 to {MAX_ENTRIES} expected",
    ),
    (
        "head_counts negative",
        keys(head_counts=i32(-1, 9)),
        f"key 'hwkv.head_counts[0]' is -1, an integer from 1 to {MAX_ENTRIES} expected",
    ),
    (
        "head_counts 2^63",
        keys(head_counts=array(Type.UINT64, 2**63, 2**63)),
        "key 'hwkv.head_counts[0]' is 9223372036854775808",
    ),
    (
        "head_counts too few",
        keys(head_counts=i32(8)),
        "key 'hwkv.head_counts' has 1 counts that sum to 8, 2 that sum to 8 expected",
    ),
    (
        "head_counts too many",
        keys(head_counts=i32(4, 2, 2)),
        "key 'hwkv.head_counts' has 3 counts that sum to 8, 2 that sum to 8 expected",
    ),
    (
        "head_counts sum",
        keys(head_counts=i32(4, 5)),
        "key 'hwkv.head_counts' has 2 counts that sum to 9, 2 that sum to 8 expected",
    ),
    ("head_counts float", keys(head_counts=array(Type.FLOAT64, 4.0, 4.0)), "key 'hwkv.head_counts"),
    # windows
    ("window 0", keys(windows=i32(1, 0, 1, 1, 1, 1, 1, 1)), f"key 'hwkv.windows[1]' is 0, {FULL_OR_WINDOW}"),
    ("window -2", keys(windows=i32(1, 1, 1, 1, 1, 1, 1, -2)), f"key 'hwkv.windows[7]' is -2, {FULL_OR_WINDOW}"),
    (
        "window 2^31",
        keys(windows=array(Type.UINT32, *[2**31] * 8)),
        f"key 'hwkv.windows[0]' is 2147483648, {FULL_OR_WINDOW}",
    ),
    (
        "window 2^32 - 1",
        keys(windows=array(Type.UINT32, *[2**32 - 1] * 8)),
        f"key 'hwkv.windows[0]' is 4294967295, {FULL_OR_WINDOW}",
    ),
    (
        "window 2^64 - 1",
        keys(windows=array(Type.UINT64, *[2**64 - 1] * 8)),
        f"key 'hwkv.windows[0]' is 18446744073709551615, {FULL_OR_WINDOW}",
    ),
    (
        "window -2^63",
        keys(windows=array(Type.INT64, *[-(2**63)] * 8)),
        f"key 'hwkv.windows[0]' is -9223372036854775808, {FULL_OR_WINDOW}",
    ),
    ("windows float", keys(windows=array(Type.FLOAT32, *[1.0] * 8)), "key 'hwkv.windows"),
    ("windows text", keys(windows=array(Type.STRING, *["full"] * 8)), "key 'hwkv.windows"),
    ("windows scalar", keys(windows=u32(1)), "key 'hwkv.windows' is"),
    (
        "windows too many",
        keys(windows=i32(*[1] * (MAX_ENTRIES + 1))),
        "key 'hwkv.windows' has 65537 entries, at most 65536 expected",
    ),
    # model
    ("model of another type", keys(model=u32(3)), "key 'hwkv.model' is of another type, a string expected"),
    ("model empty", keys(model=""), "key 'hwkv.model': not JSON"),
    ("model cut", keys(model="{"), "key 'hwkv.model': not JSON"),
    ("model not UTF-8", keys(model=b'{"name": "\xff"}'), "key 'hwkv.model': not JSON"),
    ("model list", keys(model="[]"), f"key 'hwkv.model': holds [], {NOT_OBJECT}"),
    (
        "model with an unknown key",
        keys(model='{"colour": 1}'),
        "key 'hwkv.model': key 'colour' is unknown; known are architecture, name",
    ),
    ("model twice n_layer", keys(model='{"n_layer": 8, "n_layer": 8}'), f"key 'hwkv.model': key 'n_layer' {TWICE}"),
    (
        "architecture null",
        keys(model='{"architecture": null}'),
        "key 'hwkv.model': key 'architecture' is null, a text that is not empty",
    ),
    (
        "architecture empty",
        keys(model='{"architecture": ""}'),
        "key 'hwkv.model': key 'architecture' is \"\", a text that is not empty",
    ),
    ("n_layer 8.0", keys(model='{"n_layer": 8.0}'), f"key 'hwkv.model': key 'n_layer' is 8.0, {NUMBER}"),
    (
        "fingerprint upper case",
        keys(model='{"fingerprint": "AB"}'),
        "key 'hwkv.model': key 'fingerprint' is \"AB\", 1 to 64 hex digits",
    ),
    # provenance
    (
        "provenance of another type",
        keys(provenance=u32(3)),
        "key 'hwkv.provenance' is of another type, a string expected",
    ),
    ("provenance list", keys(provenance="[]"), f"key 'hwkv.provenance': holds [], {NOT_OBJECT}"),
    ("provenance not JSON", keys(provenance="made by hand"), "key 'hwkv.provenance': not JSON"),
    ("provenance NaN", keys(provenance='{"x": NaN}'), "key 'hwkv.provenance': not JSON"),
    ("provenance 1e999", keys(provenance='{"x": 1e999}'), f"key 'hwkv.provenance': {LARGE}"),
    ("provenance half a surrogate pair", keys(provenance='{"x": "\\ud800"}'), "key 'hwkv.provenance': not JSON"),
    ("provenance twice a key", keys(provenance='{"x": 1, "x": 1}'), f"key 'hwkv.provenance': key 'x' {TWICE}"),
    (
        "provenance too deep by one",
        keys(provenance='{"a":' + "[" * 63 + "]" * 63 + "}"),
        f"key 'hwkv.provenance': {DEEP}",
    ),
    (
        "provenance too large",
        keys(provenance='{"a": "' + "x" * MAX_BYTES + '"}'),
        "key 'hwkv.provenance': not a policy: it has 1048585 bytes",
    ),
]
