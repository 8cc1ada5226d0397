"""Turn an nn.Module into a graph of layers and their operations, by torch.fx and the meta device.

`trace_model.py` has the entry point, `trace`. `tracer.py` gets the calls from torch.fx; `node_values.py` evaluates them for two
batch sizes; `layer_builder.py` makes the layers, with their kinds (`kinds.py`). `python_state.py` finds the values beside
tensors that code reads; `trials.py` runs a layer that no rule splits, to learn how it must be computed.
"""

from convoy.model.layer_rules import register_layer
from convoy.model.operation import TracedModel, bind_operation, call_operation, disable_in_place
from convoy.model.tracing.python_state import StateWatch
from convoy.model.tracing.trace_model import trace, unwrapped

__all__ = [
    "StateWatch",
    "TracedModel",
    "bind_operation",
    "call_operation",
    "disable_in_place",
    "register_layer",
    "trace",
    "unwrapped",
]
