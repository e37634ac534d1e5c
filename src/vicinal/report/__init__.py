"""Reports: one HTML file about a study, a comparison or a run, which needs no network."""

from vicinal.report.page import write_report

__all__ = ["write_report"]
