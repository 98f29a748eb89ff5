"""Seeded faults. Each fault is a wrong edit of the library, with the name of a test that must fail on it."""

from __future__ import annotations

from faults import backends, core, integrations, sharded, triton_backend

FAULTS = {
    **core.FAULTS,
    **backends.FAULTS,
    **triton_backend.FAULTS,
    **integrations.FAULTS,
    **sharded.FAULTS,
}
