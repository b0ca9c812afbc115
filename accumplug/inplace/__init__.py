"""Gradients of large weights, added straight into their running sums."""

from accumplug.inplace.gradients import InplaceGradients as InplaceGradients
from accumplug.inplace.gradients import InplaceReport as InplaceReport
