"""nn.Module -> graph and operations, by torch.fx and the meta device.

`take_apart.py` is the way in. `nodes.py` asks torch.fx for nodes, `values.py` evaluates them for two batch sizes,
`layers.py` makes a layer of every tensor, `whole.py` is for what torch.fx cannot trace. Two checks on random numbers
keep that honest: the trace must compute what the model computes (`same_answer.py`), and an opaque layer that is to be
split by samples must give each sample the same answer alone as in company (`samples.py`).
"""

from convoy.model.tracing.calls import TracedModel, bind_operation, call_operation, disable_in_place, run_traced
from convoy.model.tracing.take_apart import trace

__all__ = ["TracedModel", "bind_operation", "call_operation", "disable_in_place", "run_traced", "trace"]
