"""A Lightning strategy: `Trainer(strategy="convoy")` trains an unchanged LightningModule on all devices of the job.

Importing this module registers the name. Each process is one device and computes losses, metrics and decisions from the global
batch, as one device does. So for Lightning the world has one process, and only the first device writes logs and checkpoints.

A module is distributed when `training_step` first calls it, and is an ordinary module again when the training ends. Meanwhile
it stays the same object, and its parameters may be shards.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torchmetrics import Metric

from convoy.api import shared_group, take_over
from convoy.comm.control_messages import from_first, gather
from convoy.comm.environment import read_process_env
from convoy.errors import InputError
from convoy.layout.layout import OnOne, everywhere
from convoy.machine.accelerator import random_state_kept
from convoy.model.nested import Arguments, map_tensors
from convoy.model.tracing import samples_in
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO
from convoy.planner.request import PlanOptions
from convoy.runtime import shards
from convoy.runtime.exchange import redistribute
from convoy.runtime.gradients import global_norm
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import full_optimizer_state
from convoy.train.adopt import refuse_distributed_sampler
from convoy.train.random_states import generators_in, read_states, set_states

__all__ = ["ConvoyStrategy"]

PRECISIONS = {"32-true": "float32", "64-true": "float32", "bf16-mixed": "bf16"}
"""Lightning's name of a precision -> Convoy's. "float32" is the model's own type."""

ON_WHOLE_WEIGHTS = {"LearningRateFinder", "ModelPruning", "StochasticWeightAveraging", "WeightAveraging"}  # callbacks


class ConvoyStrategy(ParallelStrategy):
    """A strategy for processes that `convoy run`, torchrun or srun has started.

    Args:
        plan: a name, a plan, or "auto", as for `convoy.prepare`.
        timeout_s: time limit of each wait for other devices, also while the first one runs `prepare_data`.
        options: see `PlanOptions`: speeds, wire, reduce, budget_s, ...
    """

    global_rank, local_rank, node_rank, num_nodes, world_size = 0, 0, 0, 1, 1

    def __init__(self, plan: str | Plan = AUTO, timeout_s: float = 60.0, **options: Unpack[PlanOptions]) -> None:
        if odd := {"precision", "outputs"} & options.keys():
            raise InputError(
                f"ConvoyStrategy takes no {min(odd)!r}: the Trainer takes precision; outputs are everywhere"
            )
        self.plan, self.timeout_s, self.options = plan, timeout_s, options
        self.group: Any = None
        self.accumulates = False  # this micro-batch does not end a step
        self._entries: list[_Entry] = []
        if env := read_process_env(os.environ):
            self.global_rank, self.local_rank = env.device, env.local
            self.node_rank = int(env.device > env.local)  # launchers number the processes of the first host first
        super().__init__()

    # --- processes and devices ---------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        rank_zero_only.rank = self.global_rank

    @property
    def root_device(self) -> Any:
        return self.parallel_devices[0] if self.group is None else self.group.torch_device

    def setup_environment(self) -> None:
        self.group = shared_group()
        self.group.timeout_s = self.timeout_s
        own, wanted = self.group.torch_device, len(self.parallel_devices) * self.num_nodes
        if self.group.devices == 1 < wanted:
            raise InputError(
                f"the Trainer has {wanted} devices, but this process is alone, and a process is one device: start it with "
                f"`convoy run --devices {wanted}`, or give the Trainer devices=1"
            )
        if (kind := self.parallel_devices[0].type) != own.type:
            raise InputError(
                f"the Trainer's accelerator is {kind}, but Convoy's device is {own}: give the Trainer "
                f'accelerator="auto", or set CONVOY_DEVICE={kind}'
            )
        super().setup_environment()
        self.same_random_numbers()

    def setup(self, trainer: Any) -> None:
        module, devices = self.lightning_module, self.group.devices
        name = type(module).__name__
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise InputError(
                f"{name} has automatic_optimization = False, so Convoy cannot know where a step ends: let training_step return "
                "the loss, or use convoy.prepare in a loop of your own"
            )
        if any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in module.modules()):
            raise InputError(f"{name} uses torch.compile, but Convoy calls layers one by one: leave torch.compile out")
        for each in module.modules():
            if isinstance(each, Metric):
                each.sync_on_compute = False  # every device has counted all samples
        super().setup(trainer)
        for each in (*module.parameters(), *module.buffers()):  # device 0's count
            whole = redistribute(self.group, each.detach(), OnOne(0), everywhere(devices), each.shape)
            each.data.copy_(whole)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        for entry in self._entries:
            entry.remove()
        self._entries = []  # the other devices may not take part in gathering weights

    def teardown(self) -> None:
        """Make the modules ordinary again, with whole weights and optimizer state on every device."""
        states = [(each, self._whole_states(each)) for each in self.optimizers]
        for entry in self._entries:
            entry.end()
        for optimizer, state in states:
            optimizer.state.update(state)
        self._entries = []
        super().teardown()

    # --- agreement between devices -----------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self.group is not None:
            gather(self.group, f"lightning: {name}", None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.group is None else gather(self.group, "lightning: broadcast", obj)[src]

    def reduce_boolean_decision(self, decision: bool, *_args: Any, **_options: Any) -> bool:
        return bool(from_first(self.group, "lightning: decision", lambda: bool(decision)))

    def reduce(self, tensor: Any, *_args: Any, **_options: Any) -> Any:
        return tensor  # it is of the global batch

    all_gather = reduce

    def same_random_numbers(self, *holders: object) -> None:
        """Take over the random states of device 0, also those of generators in the attributes of `holders`."""
        generators, device = generators_in(*holders), self.group.torch_device
        states = from_first(self.group, "lightning: random states", lambda: read_states(generators, device))
        set_states(states, generators, device)

    def process_dataloader(self, dataloader: Any) -> Any:
        refuse_distributed_sampler(dataloader)
        _auto_add_worker_init_fn(dataloader, rank=0)  # Lightning adds one with this device's rank, to what is returned
        return _SameBatches(dataloader, self)

    # --- training ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._entries:
            return super().training_step(*args, **kwargs)
        modules = self.lightning_module.named_modules()
        tried = self._entries = [_Entry(self, name, m) for name, m in modules if _can_be_distributed(m)]
        try:
            output = super().training_step(*args, **kwargs)
        finally:
            self._entries = [entry for entry in tried if entry.part is not None]
            for entry in {*tried} - {*self._entries}:
                entry.remove()
        if not self._entries:
            raise InputError("training_step calls no module with parameters: compute in forward, and call self(x)")
        return output

    def distribute(self, name: str, module: nn.Module, example: Arguments) -> Distributed:
        """Return this device's part of a module, for a call with a global batch. Every device calls it."""
        inside = {*module.modules()}
        names: dict[Tensor, str] = {p: key for key, p in module.named_parameters()}
        for other in self._entries:
            if other.part is None and other.module in inside:
                other.remove()
            elif other.part is not None and names.keys() & {*other.part.parameters()}:
                raise InputError(
                    f"training_step calls {other.name} and {name}, which have the same parameters: call one of them"
                )
        given = [*example.args, *example.kwargs.values()]
        if (batch := samples_in(given)) < 1:
            raise InputError(
                f"training_step calls {name}({', '.join(type(x).__name__ for x in given)}), but Convoy splits a module's first "
                "argument along its first axis: give it a batch first, as a tensor or in a tuple, list or dict"
            )
        group, precision = self.group, PRECISIONS[self.precision_plugin.precision]
        trained = [each for each in self.optimizers if names.keys() & {*shards.works_on(each)}]
        options: dict[str, Any] = {"net": name, "precision": precision, **self.options}
        with random_state_kept(group.torch_device), torch.autocast(group.torch_device.type, enabled=False):
            part = take_over(module, map_tensors(example, Tensor.detach), batch, group, self.plan, trained, **options)
        callbacks = {cls.__name__ for each in self.lightning_module.trainer.callbacks for cls in type(each).__mro__}
        if (found := callbacks & ON_WHOLE_WEIGHTS) and not all(part.weights.in_use.whole.values()):
            raise InputError(
                f"the callback {min(found)} works on whole weights, but the plan {part.plan.name} splits {name}: use a plan "
                "that copies parameters ('data', 'data-by-speed'), or leave the callback out"
            )
        rank_zero_info(f"Convoy: {name} is distributed over {group.devices} devices, plan {part.plan.name}")
        return part

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self.accumulates = True
        try:
            yield
        finally:
            self.accumulates = False

    @ParallelStrategy.precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None  # the Trainer asks whether the strategy was given one
        if plugin is None:
            return
        kinds = {Precision: _Exact, DoublePrecision: _ExactDouble, MixedPrecision: _ExactMixed}
        if type(plugin) not in kinds or plugin.precision not in PRECISIONS:
            raise InputError(
                f"precision {plugin.precision!r} of a {type(plugin).__name__} is not exact with Convoy: give the Trainer "
                f"{' or '.join(PRECISIONS)}, and no plugin"
            )
        self._precision_plugin = made = object.__new__(kinds[type(plugin)])
        made.__dict__.update(vars(plugin), strategy=self)

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Scale an optimizer's gradients by one factor, so that their norm over all devices is at most `max_norm`."""
        parameters = [p for p in shards.works_on(optimizer) if p.grad is not None]
        shards.check_gradients("gradient_clip_val", parameters)
        device, counts = self.group.device, dict[Tensor, bool]()
        for part in (entry.part for entry in self._entries):
            counts |= {p: part.weights.in_use.counts(key, device) for key, p in part.named_parameters()}
        norm = global_norm(self.group, [(p.grad, counts.get(p, device == 0)) for p in parameters if p.grad is not None])
        factor = max_norm / (norm + 1e-6)  # torch's
        for gradient in [p.grad for p in parameters if p.grad is not None and not factor >= 1.0]:
            gradient.mul_(factor)
        shards.accept_gradients(parameters)

    # --- checkpoints: the whole model, as on one device --------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with shards.reading_shards():
            state: dict[str, Any] = self.lightning_module.state_dict()
        for entry in self._entries:
            prefix = f"{entry.name}." if entry.name else ""
            state |= {prefix + key: whole for key, whole in entry.part.full_state_dict().items()}
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._entries:
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]
        states = self._whole_states(optimizer)
        numbers: dict[Tensor, int] = {p: i for i, p in enumerate(shards.works_on(optimizer))}
        groups = [group | {"params": [numbers[p] for p in group["params"]]} for group in optimizer.param_groups]
        return {"state": {numbers[p]: state for p, state in states.items()}, "param_groups": groups}

    def _whole_states(self, optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
        states: dict[Tensor, dict[str, Any]] = dict(optimizer.state)
        for part in (entry.part for entry in self._entries):
            whole = full_optimizer_state(part, optimizer)["state"]
            states |= {p: whole[key] for key, p in part.named_parameters() if key in whole}
        return states


class _Entry:
    """The `forward` of a module that `training_step` may call. The first call distributes the module."""

    def __init__(self, strategy: ConvoyStrategy, name: str, module: nn.Module) -> None:
        self.name, self.module, self._strategy = name, module, strategy
        self.part: Any = None
        vars(module)["forward"] = self  # in this one object, as Lightning itself redirects calls

    def remove(self) -> None:
        vars(self.module).pop("forward", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.remove()  # the distributed model calls the module's own forward
        try:
            if self.part is None:
                self.part = self._strategy.distribute(self.name or "forward", self.module, Arguments(args, kwargs))
            self.part.training = self.module.training
            with self.part.no_sync() if self._strategy.accumulates else nullcontext():
                return self.part(*args, **kwargs)
        finally:
            vars(self.module)["forward"] = self

    def end(self) -> None:
        """Make the module ordinary again, with whole weights. Every device calls it."""
        self.remove()
        weights = self.part.weights
        for key in [key for key, whole in weights.in_use.whole.items() if not whole]:
            weights.put(key, weights.gather(key, weights.own(key).detach()))
        for module in self.part.module.modules():
            for number in [n for n, hook in module._forward_pre_hooks.items() if hook is self.part.calls]:
                del module._forward_pre_hooks[number]
        for parameter in self.part.parameters():
            delattr(parameter, shards.SHARD)


def _can_be_distributed(module: nn.Module) -> bool:
    is_own = isinstance(module, Metric | torch.jit.ScriptModule) or "forward" in vars(module)
    return not is_own and any(True for _ in module.parameters())


class _SameBatches:
    """A DataLoader that draws device 0's random numbers on every device, so that all load the same global batches."""

    def __init__(self, source: Any, strategy: ConvoyStrategy) -> None:
        self.source, self._strategy = source, strategy

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the DataLoader, such as its sampler."""
        if name == "source":  # not set yet
            raise AttributeError(name)
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        self._strategy.same_random_numbers(self.source)
        return iter(self.source)


class _Exact(Precision):
    """Lightning's steps and clipping, exact on shards."""

    strategy: ConvoyStrategy

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        # Compute and clip gradients first, because Convoy checks them when the step begins.
        results = [self._wrap_closure(model, optimizer, closure)]

        def result() -> Any:
            if results:
                return results.pop()
            raise InputError(
                f"{type(optimizer).__name__} computes the loss several times per step, but Convoy computes it once: use one of "
                f"{shards.elementwise_names()}"
            )

        return optimizer.step(closure=result, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.strategy.clip_grad_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        shards.check_gradients("gradient_clip_val", shards.works_on(optimizer))
        super().clip_grad_by_value(optimizer, clip_val)
        shards.accept_gradients(shards.works_on(optimizer))


class _ExactDouble(DoublePrecision, _Exact): ...


class _ExactMixed(MixedPrecision, _Exact): ...


StrategyRegistry.register("convoy", ConvoyStrategy, description="Convoy: unequal devices, the numbers of one device")
