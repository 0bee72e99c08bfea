"""Names of files as text: on Linux a name may be any bytes, in JSON and HTML it may not."""

import os


def as_text(name):
    """The name, with the replacement character for what is not UTF-8."""
    return os.fsencode(name).decode(errors="replace")
