"""Learned tables and masks of priors and relative biases: measure, results, plots, and files for several models."""

from vicinal.analysis.learned_tables.fit_plot import draw_fits, draw_mixture_r2
from vicinal.analysis.learned_tables.fit_report import FitReport, FitRow
from vicinal.analysis.learned_tables.fit_tables import fit_model
from vicinal.analysis.learned_tables.mask_plot import draw_convolutions, draw_masks
from vicinal.analysis.learned_tables.mask_result import LayerMask, Masks, Mixture
from vicinal.analysis.learned_tables.masks import masks_of
from vicinal.analysis.learned_tables.mixture_plot import draw_history, draw_mixture
from vicinal.analysis.learned_tables.outputs import write_fits, write_masks
from vicinal.analysis.learned_tables.tables import LayerTable, tables_of

__all__ = [
    "FitReport",
    "FitRow",
    "LayerMask",
    "LayerTable",
    "Masks",
    "Mixture",
    "draw_convolutions",
    "draw_fits",
    "draw_history",
    "draw_masks",
    "draw_mixture",
    "draw_mixture_r2",
    "fit_model",
    "masks_of",
    "tables_of",
    "write_fits",
    "write_masks",
]
