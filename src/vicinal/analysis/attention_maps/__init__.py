"""Attention maps, rollout, and distance and entropy of heads: measure, results, plots, and files for several models."""

from vicinal.analysis.attention_maps.measure import attention_maps
from vicinal.analysis.attention_maps.outputs import write_attention
from vicinal.analysis.attention_maps.overlay import attention_map, draw_overlay
from vicinal.analysis.attention_maps.plot import draw_maps, draw_rollout
from vicinal.analysis.attention_maps.reader import inspect_images
from vicinal.analysis.attention_maps.result import AttentionMap, save_maps
from vicinal.analysis.attention_maps.rollout import rollout
from vicinal.analysis.attention_maps.statistics import attention_statistics
from vicinal.analysis.attention_maps.statistics_plot import draw_statistics
from vicinal.analysis.attention_maps.statistics_result import AttentionStatistics, LayerStatistics

__all__ = [
    "AttentionMap",
    "AttentionStatistics",
    "LayerStatistics",
    "attention_map",
    "attention_maps",
    "attention_statistics",
    "draw_maps",
    "draw_overlay",
    "draw_rollout",
    "draw_statistics",
    "inspect_images",
    "rollout",
    "save_maps",
    "write_attention",
]
