"""Check installed packages against the ranges that our metadata declares."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.core import version
from bridge.core.errors import UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra that this machine has to meet; none if the package was not installed by pip."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        every = [Requirement(text) for text in requires(version.DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return []
    ours = [need for need in every if need.name != version.DISTRIBUTION and _extra_of(need) == extra]
    return [need for need in ours if need.marker is None or need.marker.evaluate({"extra": extra})]


def fits(need: Requirement) -> bool:
    """Whether the installed version is within the range; False if the package is absent."""
    found = version.installed(need.name)
    return bool(found) and need.specifier.contains(found, prereleases=True)


def check_versions(extra: str, packages: tuple[str, ...] = ("transformers",)) -> None:
    """UsageError if one of `packages` is installed in a version outside the range that `extra` declares.

    Another torch is not refused: servers pin later ones than the tests do, and nothing is known to fail with them.
    """
    wrong = [need for need in requirements(extra) if need.name in packages and version.installed(need.name)]
    if wrong := [need for need in wrong if not fits(need)]:
        found = ", ".join(f"{need.name} {version.installed(need.name)} is outside {need.specifier}" for need in wrong)
        install = " ".join(f"'{need.name}{need.specifier}'" for need in wrong)
        raise UsageError(
            f"{found}, which this version of {version.DISTRIBUTION} was tested with; pip install {install}"
        )


def _extra_of(need: Requirement) -> str:
    found = re.search(r"""extra == ["']([^"']+)""", str(need.marker or ""))
    return found[1] if found else ""
