"""The one error that this package raises on purpose."""


class HwkvError(Exception):
    """A problem that the user can act on, told in one sentence.

    The sentence names the file and the key or value at fault. The command line
    prints it as ``error: <sentence>`` and exits with 1; nothing else is printed.
    """
