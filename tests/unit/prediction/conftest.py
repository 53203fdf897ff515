"""Records of training runs with known steps."""

from __future__ import annotations

from training_records import h200, make_record, make_spec, make_steps

__all__ = ["h200", "make_record", "make_spec", "make_steps"]
