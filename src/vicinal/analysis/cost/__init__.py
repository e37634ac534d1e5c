"""Parameters, operations and training memory of models: measure and result."""

from vicinal.analysis.cost.measure import cost_of, costs_of
from vicinal.analysis.cost.result import Cost, Published, format_costs, published, save_costs
from vicinal.analysis.cost.saved_tensors import saved_bytes

__all__ = ["Cost", "Published", "cost_of", "costs_of", "format_costs", "published", "save_costs", "saved_bytes"]
