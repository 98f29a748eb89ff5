"""Versions of the packages that this library works with: installed, tested and supported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from ...extras import needs

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "verl", "liger-kernel")
CONSTRAINTS = Path(__file__).parent.parent.parent / "constraints.txt"


@dataclass(frozen=True)
class Package:
    """A package that this library or one of its extras requires."""

    name: str
    installed: str | None  # version; None: not installed
    tested: str | None  # version in constraints.txt; None: it has none for this Python
    supported: str  # version specifier, such as ">=0.29,<1.17"
    is_supported: bool  # also True if it is not installed
    is_newer: bool  # the installed version is newer than the tested one

    @property
    def remark(self) -> str:
        """A warning if the installed version is not supported, otherwise empty."""
        if self.is_supported:
            return ""
        return f"{self.name} {self.installed} is not supported: expected {self.supported}, tested with {self.tested}"


def packages() -> list[Package]:
    """List the packages in the order of PACKAGES.

    Supported versions are those in the metadata of the installed gspo-kernels. Without metadata, as in a source tree
    on PYTHONPATH, the list is empty.
    """
    with needs("gspo doctor", "cli", "packaging"):
        from packaging.requirements import Requirement
        from packaging.version import Version
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
        pin = tested.get(name, required[name])  # verl has no pin, but its extra requires one version
        exact = [x.version for x in pin if x.operator == "=="]
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        is_supported = installed is None or required[name].contains(installed, prereleases=True)
        supported = ",".join(sorted(map(str, required[name]), reverse=True))  # a SpecifierSet is unordered
        # Only the public part counts: 2.13.0+cpu is not newer than 2.13.0.
        is_newer = bool(installed and exact and Version(Version(installed).public) > Version(exact[0]))
        result.append(Package(name, installed, exact[0] if exact else None, supported, is_supported, is_newer))
    return result
