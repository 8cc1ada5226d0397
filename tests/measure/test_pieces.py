"""A piece of a layer is timed as it would run: every kind of layer, every size that its channels allow."""

import copy

import pytest
import torch

from convoy.measure.axes import full_axes, granule
from convoy.measure.layers import piece
from convoy.model.tracing import trace
from convoy.plan.device_program import LocalSize, whole_size
from tests.support import layer_nets
from tests.support.layer_nets import FILTERED, KEPT


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [*KEPT, *FILTERED])
def test_pieces_of_every_kind_of_layer(name: str) -> None:
    torch.manual_seed(0)
    model = layer_nets.build(name)
    traced = trace(model, torch.zeros(2, 3, 8, 8))
    local = copy.deepcopy(model)
    before = {key: t.clone() for key, t in local.state_dict().items()}
    for layer in traced.graph.layers.values():
        if layer.kind in ("input", "pick") or not layer.batched or not layer.differentiable:
            continue
        whole = whole_size(layer, 2)
        unit = granule(traced.graph, layer)
        sizes = full_axes(traced.graph, layer, 2).sizes(whole)
        for size in (*sizes, LocalSize(2, unit or whole.outputs, whole.inputs)):
            wants = [traced.graph[i].kind != "input" and traced.graph[i].differentiable for i in layer.inputs]
            with torch.no_grad(), piece(local, traced, layer, size, wants, backward=True) as part:
                y, saved = part.run.forward(part.inputs, part.samples, True, wants)
                assert (
                    y.shape[layer.feature_axis] * whole.outputs
                    == size.outputs * layer.batch_shape(2)[layer.feature_axis]
                )
                part.run.backward(saved, part.gradient, wants)
    for key, held in local.state_dict().items():
        if not any(word in key for word in ("_u", "_v", "running", "num_batches")):
            assert torch.equal(held, before[key]), "afterwards all is as it was"
