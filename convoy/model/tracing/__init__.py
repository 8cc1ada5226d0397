"""Turns an nn.Module into a graph of layers and their operations, by torch.fx and the meta device.

`trace_model.py` has the entry point, `trace`. `nodes.py` gets the calls from torch.fx (`effects.py`: which of them do more
than give a result); `values.py` evaluates them for two batch sizes; `regions.py` groups those that must be one layer;
`layers.py` makes the layers, with their kinds (`kinds.py`); `whole.py` makes one of the whole model. Two checks on random
numbers: the trace must compute what the model computes (`check.py`; `search.py` finds what must stay whole for it, `state.py`
is what modules keep in Python, `outside.py` what their code reads elsewhere), and an opaque layer is split by samples only
where each sample gives the same result alone as together with others (`per_sample.py`, at the numbers of samples that
`turning_points.py` finds, too; `noting.py` is what a call leaves behind).
"""

from convoy.model.layer_rules import register_layer
from convoy.model.operation import TracedModel, bind_operation, call_operation, disable_in_place, run_traced
from convoy.model.tracing.python_state import StateWatch
from convoy.model.tracing.trace_model import trace, unwrapped

__all__ = [
    "StateWatch",
    "TracedModel",
    "bind_operation",
    "call_operation",
    "disable_in_place",
    "register_layer",
    "run_traced",
    "trace",
    "unwrapped",
]
