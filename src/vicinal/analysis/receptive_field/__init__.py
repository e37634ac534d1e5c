"""Effective receptive fields: measure, result, plots, and files for several models."""

from vicinal.analysis.receptive_field.measure import receptive_field
from vicinal.analysis.receptive_field.outputs import write_receptive_fields
from vicinal.analysis.receptive_field.plot import draw_field, draw_fields
from vicinal.analysis.receptive_field.position_change import changed_positions, is_rotary
from vicinal.analysis.receptive_field.result import ReceptiveField, fields_table

__all__ = [
    "ReceptiveField",
    "changed_positions",
    "draw_field",
    "draw_fields",
    "fields_table",
    "is_rotary",
    "receptive_field",
    "write_receptive_fields",
]
