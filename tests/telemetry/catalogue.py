"""Lookup of logged names in the catalogue of metrics, for tests that hold logs and guides against it."""

from megappo.telemetry.metrics import Metric


def metric_of(name: str) -> Metric | None:
    """Entry of a logged name; None if unknown. An entry that ends in `*` covers all names that start with it; the longest wins."""
    fitting = [m for m in Metric if m.value == name or (m.value.endswith("*") and name.startswith(m.value[:-1]))]
    return max(fitting, key=lambda m: (m.value == name, len(m.value)), default=None)
