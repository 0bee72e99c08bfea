"""Applies a unified diff in memory.

`git apply` skips paths silently when it runs below another repository's root, and `patch` is often not installed;
this needs neither, and its errors name the file and the hunk. Context must match exactly; hunks may have moved.
"""

import re

HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)")


class PatchError(Exception):
    """One sentence that names the file and the hunk."""


def parse(patch):
    """{path: [hunk]} of a unified diff (bytes). A hunk is (header, line number, old lines, new lines)."""
    files, path, hunk, left = {}, None, None, [0, 0]
    for line in patch.splitlines(keepends=True):
        if left[0] > 0 or left[1] > 0:
            kind, text = line[:1], line[1:]
            if kind in (b" ", b"-") or line == b"\n":
                hunk[2].append(text if line != b"\n" else line)
                left[0] -= 1
            if kind in (b" ", b"+") or line == b"\n":
                hunk[3].append(text if line != b"\n" else line)
                left[1] -= 1
        elif line.startswith(b"\\") and hunk:  # "\ No newline at end of file" belongs to the line before it
            for lines in hunk[2:]:
                if lines and lines[-1].endswith(b"\n") and (kind == b" " or lines is hunk[2 if kind == b"-" else 3]):
                    lines[-1] = lines[-1][:-1]
        elif line.startswith(b"+++ "):
            path = line[4:].split(b"\t")[0].strip().decode()
            if path == "/dev/null":
                raise PatchError("the patch deletes a file, which is not supported")
            path = path.split("/", 1)[1]
            files[path] = []
        elif line.startswith((b"rename ", b"copy ", b"GIT binary patch")):
            raise PatchError(f"the patch holds {line.strip().decode()!r}, which is not supported")
        elif match := HUNK.match(line):
            counts = [1 if n is None else int(n) for n in (match[2], match[4])]
            hunk = (match[0].decode(), int(match[1]), [], [])
            files[path].append(hunk)
            left = counts
    return files


def find(lines, wanted, expected):
    """The place of `wanted` in `lines` that is nearest to index `expected`, or None."""
    last = len(lines) - len(wanted)
    for distance in range(max(expected, last - expected) + 1):
        for at in {expected - distance, expected + distance}:
            if 0 <= at <= last and lines[at : at + len(wanted)] == wanted:
                return at
    return None


def apply(patch, read):
    """{path: new content} (bytes). `read(path)` gives a file's old content, or None where there is none."""
    result = {}
    for path, hunks in parse(patch).items():
        old = read(path)
        if old is None and any(hunk[2] for hunk in hunks):
            raise PatchError(f"{path} does not exist, which hunk 1 ({hunks[0][0]}) changes")
        lines, shift = (old or b"").splitlines(keepends=True), 0
        for number, (header, line, before, after) in enumerate(hunks, 1):
            expected = max(0, line - 1) + shift if before else len(lines)
            at = find(lines, before, expected)
            if at is None:
                raise PatchError(f"{path}, hunk {number} ({header}) finds no matching lines")
            lines[at : at + len(before)] = after
            shift += at - expected + len(after) - len(before)
        result[path] = b"".join(lines)
    return result
