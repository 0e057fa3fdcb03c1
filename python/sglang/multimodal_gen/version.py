"""The version of the installed package."""

from functools import cache

DISTRIBUTION = "sglang-multimodal-gen"


@cache
def package_version() -> str:
    """The version from the installed metadata; "unknown" when run from a bare source tree."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, not needed at import

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
