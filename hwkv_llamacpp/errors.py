"""The one error that this package raises on purpose."""


class HwkvError(Exception):
    """A problem that the user can act on, told in one sentence.

    The sentence names the file and the key or value at fault. The command line
    prints it as ``error: <sentence>`` and exits with 1; nothing else is printed.
    Names and values come from files and users: what a terminal would obey is escaped.
    """

    def __init__(self, sentence: object) -> None:
        super().__init__(printable(str(sentence)))


def printable(text: str) -> str:
    """The text with escapes for control characters, line ends, and bytes that are not UTF-8."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
