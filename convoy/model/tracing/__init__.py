"""Turns an nn.Module into a graph of layers and their operations, by torch.fx and the meta device.

`trace_model.py` has the entry point, `trace`, and what it falls back on; `nodes.py` gets the calls from torch.fx; `values.py`
evaluates them for two batch sizes; `layers.py` makes a layer of each, with its kind (`kinds.py`). Two checks on random numbers:
the trace must compute what the model computes (`trace_model.py`), and an opaque layer is split by samples only where each
sample gives the same result alone as together with others (`per_sample.py`).
"""

from convoy.model.operation import TracedModel, bind_operation, call_operation, disable_in_place, run_traced
from convoy.model.tracing.trace_model import trace

__all__ = ["TracedModel", "bind_operation", "call_operation", "disable_in_place", "run_traced", "trace"]
