"""Where runs and merged folders lie: local paths, or URLs that fsspec knows (s3://, gs://, memory:// ...).

Invariant: whoever is given a location speaks pathlib to it; local ones are `pathlib.Path` itself, also when they were
written as file:// URLs. This module opens nothing; how a URL's credentials are found is fsspec's business.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from upath import UPath

from polar_toolkit.errors import Refusal


def location(text: str) -> Path:
    """The path or URL that somebody typed. Raises Refusal when no library for its protocol is installed."""
    protocol, separator, _ = text.partition("://")
    if not separator:
        return Path(text)
    if protocol == "file":
        return Path(unquote(urlsplit(text).path))
    try:
        found = UPath(text)
        _ = found.fs  # this is what imports the protocol's library
    except (ImportError, ValueError) as error:
        raise Refusal(f"{text!r} cannot be opened: {error}") from error
    return cast(Path, found)  # it has pathlib's methods, though it is not pathlib's class


def is_remote(path: Path) -> bool:
    """Whether the location is a URL's: without renames and locks."""
    return isinstance(path, UPath)


def is_of_this_process(path: Path) -> bool:
    """Whether other processes see something else there: memory://."""
    return isinstance(path, UPath) and path.protocol == "memory"
