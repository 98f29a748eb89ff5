"""Versions of the packages that this library works with: installed, tested and supported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...extras import needs

if TYPE_CHECKING:
    from packaging.version import Version

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "verl", "liger-kernel")
CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"
# "newer" and "older" are supported.
Status = Literal["tested", "newer", "older", "too new", "too old", "no version number", "not installed"]


@dataclass(frozen=True)
class Package:
    """A package that this library or one of its extras requires."""

    name: str
    installed: str | None  # version; None: not installed
    tested: str  # version in constraints.txt, or the one that the extra requires
    supported: str  # version specifier, such as ">=1.15,<1.17"
    status: Status  # the installed version, compared with the tested and the supported ones


def packages() -> list[Package]:
    """List the packages in the order of PACKAGES.

    Supported versions are those in the metadata of the installed gspo-kernels. Without metadata, as in a source tree
    on PYTHONPATH, the list is empty.
    """
    with needs("gspo doctor", "cli", "packaging"):
        from packaging.requirements import Requirement
        from packaging.version import InvalidVersion, Version
    try:
        lines = requires("gspo-kernels") or []
    except PackageNotFoundError:
        return []
    required = {x.name: x.specifier for x in map(Requirement, lines) if x.name in PACKAGES}
    pins = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    tested = {x.name: x.specifier for x in pins if x.marker is None or x.marker.evaluate()}
    result = []
    for name in PACKAGES:
        if name not in required:
            continue
        # verl has no pin, because its extra requires one version.
        (pin,) = (x.version for x in tested.get(name, required[name]) if x.operator == "==")
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        supported = ",".join(sorted(map(str, required[name]), reverse=True))  # a SpecifierSet is unordered
        status: Status = "not installed"
        if installed is not None:
            try:
                public = Version(Version(installed).public)  # 2.13.0+cpu is 2.13.0
                status = _status(public, Version(pin), required[name].contains(installed, prereleases=True))
            except InvalidVersion:
                status = "no version number"
        result.append(Package(name, installed, pin, supported, status))
    return result


def _status(installed: Version, tested: Version, is_supported: bool) -> Status:
    if installed == tested:
        return "tested"
    if installed > tested:
        return "newer" if is_supported else "too new"
    return "older" if is_supported else "too old"
