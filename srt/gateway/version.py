"""The installed version of the package."""

from __future__ import annotations

from importlib import metadata


def find_version() -> str:
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a checkout that is not installed
