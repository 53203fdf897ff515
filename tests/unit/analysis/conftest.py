"""Records of training runs with known steps, for the tests of the analysis."""

from __future__ import annotations

from training_records import h200, make_cell, make_record, make_reference, make_spec, make_steps, make_wire

__all__ = ["h200", "make_cell", "make_record", "make_reference", "make_spec", "make_steps", "make_wire"]
