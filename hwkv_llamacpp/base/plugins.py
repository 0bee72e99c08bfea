"""Classes that packages register under a group of entry points: ours, and those of others."""

import functools
from importlib.metadata import EntryPoint, entry_points

from ..errors import HwkvError


@functools.cache
def load(group: str, base: type) -> dict[str, type]:
    """{name: class} of all entry points of the group, ours first.

    base: the class that they derive from. HwkvError names the package whose entry is at fault.
    """
    found: dict[str, type] = {}
    owners: dict[str, str] = {}
    entries = sorted(entry_points(group=group), key=lambda entry: (_package(entry) != "hwkv-llamacpp", entry.name))
    if not any(_package(entry) == "hwkv-llamacpp" for entry in entries):
        raise HwkvError(
            f"no entry points of hwkv-llamacpp in the group {group}: the package is not installed; run ./build.sh env"
        )
    for entry in entries:
        where = f"the entry point {entry.name} of the group {group} in package {_package(entry)}"
        try:
            item = entry.load()
        except Exception as error:  # whatever another package does on import
            raise HwkvError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not (isinstance(item, type) and issubclass(item, base)):
            raise HwkvError(f"{where} is {item!r}, a subclass of {base.__module__}.{base.__qualname__} expected")
        if getattr(item, "name", None) != entry.name:
            raise HwkvError(f"{where} has the name {getattr(item, 'name', None)!r}, {entry.name!r} expected")
        if entry.name in found:
            raise HwkvError(f"{where} is called as one of package {owners[entry.name]}: two names expected")
        found[entry.name], owners[entry.name] = item, _package(entry)
    return found


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown"
