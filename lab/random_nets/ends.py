"""The extra inputs and the outputs of a random net."""

from random import Random

from lab.random_nets.writer import CLASSES, Writer

INPUTS = ("images",) * 10 + ("two", "scale", "optional", "labels", "no_images")
OUTPUTS = {
    "logits": "x",
    "tuple": "x, features",
    "list": "[x, features]",
    "dict": "{'logits': x, 'features': features}",
    "named": "Pair(x, features)",
    "dataclass": "Both(x, features)",
    "nested": "{'a': [x, (features, {'b': maps})]}",
    "with_none": "{'logits': x, 'nothing': None, 'n': 3, 'name': 'net'}",
    "features": "(x, [maps, features])",
    "loss": "{'logits': x, 'loss': x.square().mean()}",
    "squeezed": "x[:, 0]",
    "same_tensor": "(x, x)",
    "pairs": "(x, features @ features.t())",
    "number": "(x, float(x.detach().mean()))",
    "own_input": "(x, given)",
    "parameter": "(x, HEAD.weight.square().sum())",
    "in_training": "(x, features) if self.training else x",
    "map": "x",
    "added": "F.log_softmax(x, 1) + x.softmax(1)",
}
"""Form of what a net returns -> how that is written: x are the logits, `maps` is what they are made of."""
_POOLED = (
    *("x.mean((2, 3))", "F.adaptive_avg_pool2d(x, 1).flatten(1)", "x.amax(dim=(2, 3))", "x.flatten(2).mean(-1)"),
    *(
        "F.adaptive_max_pool2d(x, (1, 1))[:, :, 0, 0]",
        "x.mean([-1, -2])",
        "torch.logsumexp(x, (2, 3))",
        "x.mean(3).mean(2)",
    ),
)
_FLAT = (
    "x.flatten(1)",
    "torch.flatten(x, 1)",
    "x.reshape(x.size(0), -1)",
    "x.reshape(len(x), -1)",
    "x.reshape(-1, $c * $h * $w)",
)


def write_inputs(w: Writer, kind: str, rng: Random) -> str:
    """Write the use of the inputs; return their types and shapes per sample as source."""
    image = f"('float', {w.shape})"
    _, h, width = w.shape
    match kind:
        case "two":
            w.arguments.append("other")
            w.write("x = «x + other|torch.cat([x, other], 1)[:, :$c]|x * other.sigmoid() + other»", rng)
            return f"[{image}, {image}]"
        case "scale":
            w.arguments.append("scale")
            w.write("x = x * <<nn.Linear(3, $c)>>(scale)[:, :, None, None]", rng)
            return f"[{image}, ('float', (3,))]"
        case "optional":
            w.arguments.append("mask=None, flag=False, *rest, **options")
            w.line("if mask is not None: x = x * mask", "if flag: x = x * 2")
            return f"[{image}]" if rng.random() < 0.7 else f"[{image}, {image}]"
        case "labels":
            w.arguments.append("y")
            w.write("x = x + <<nn.Embedding(7, $c«||, padding_idx=0|, max_norm=0.5»)>>(y)[:, :, None, None]", rng)
            return f"[{image}, ('index', ())]"
        case "no_images":
            w.write("x = <<nn.Embedding(7, $c«|, max_norm=0.5»)>>(x).permute(0, 2, 1).reshape(-1, $c, $h, $w)", rng)
            return f"[('index', ({h * width},))]"
    return f"[{image}]"


def write_outputs(w: Writer, kind: str, rng: Random) -> None:
    """Write the head of the net and its return statement."""
    if kind == "own_input":
        w.lines.insert(0, "given = x")
    if kind == "map":
        w.write(f"x = <<nn.Conv2d($c, {CLASSES}, 1)>>(x)", rng)
        return
    c, h, width = w.shape
    flat = rng.random() < 0.4
    features = c * h * width if flat else c
    w.write(f"maps = x ;; features = {rng.choice(_FLAT if flat else _POOLED)}", rng)
    if rng.random() < 0.3:
        w.write(f"features = F.relu(<<nn.Linear({features}, 8)>>(features))", rng)
        features = 8
    head = w.make(f"nn.Linear({features}, {CLASSES})")
    w.line(f"x = {head}(features)")
    w.returns = OUTPUTS[kind].replace("HEAD", head)
