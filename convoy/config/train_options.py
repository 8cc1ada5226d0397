"""Lists the settings of a training. The command line, run files and `--explain` are generated from this list."""

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from convoy.config.option_types import (
    Devices,
    File,
    Listen,
    Numbers,
    Seconds,
    Sizes,
    Wire,
    checked_by,
    device_names,
    listen_address,
    needs,
    one_of,
)  # fmt: skip
from convoy.layout.collectives import Reduce
from convoy.layout.comm_dtype import CommDtype
from convoy.plan.presets import AUTO, PLANS

MAX_NUMBER = 1e10
"""Upper bound of a setting without its own: more is a typing error."""

NO_LOG = Path("none")
"""Value of `log` for no log."""


def _setting(panel: str, default: Any, meaning: str, *, here: bool = False, often: bool = False, **rules: Any) -> Any:
    """Return the pydantic field of a setting.

    Args:
        panel: its group in `--help-all`.
        meaning: help text; `--help` shows only the first sentence.
        here: may differ between devices. All other settings affect the result, and must be equal everywhere.
        often: `--help` shows it; otherwise only `--help-all` does.
        rules: bounds, as pydantic names them.
    """
    if rules.keys() & {"ge", "gt"} and "lt" not in rules:
        rules.setdefault("le", MAX_NUMBER)
    extra: dict[str, Any] = {"panel": panel, "here": here, "often": often}
    return Field(default, description=meaning, json_schema_extra=extra, **rules)


DATA, TRAINING = "Data and net", "Training"
_data = partial(_setting, DATA)
_fleet = partial(_setting, "Devices and plan")
_step = partial(_setting, TRAINING)
_test = partial(_setting, "Tests while training")
_output = partial(_setting, "Output")


class Settings(BaseModel):
    """All settings of a training. Names, types, defaults and help texts are defined only here.

    The command line and run files use these names with dashes and without the unit at their end: `data_dir` is `--data-dir D`
    and `data-dir = "D"`, `timeout_s` is `--timeout` and `timeout`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    data: Annotated[str, checked_by("convoy.data:check")] = _data(
        "digits",
        "Images by name, folder:PATH or MODULE:FUNCTION. By name: digits (ships with scikit-learn), fashion-mnist, "
        "cifar10, cifar100. folder:PATH or a path: a folder of JPEG or PNG images per class, in train and val, or with a part "
        "held out. MODULE:FUNCTION: returns a torch Dataset, or two.",
        often=True,
    )
    data_dir: File | None = _data(
        None,
        "Folder with the files of a data set by name. Default: a cache folder, filled by download and checked.",
        here=True,
        often=True,
    )
    image_size: int | None = _data(
        None, "Resize the images of a folder to squares of this side, in pixels.", ge=1, le=8192
    )
    test_fraction: float | None = _data(
        None, "Part of each class to hold out for tests, if the data has no test images. Default: 0.2.", gt=0, lt=1
    )
    augment: Annotated[str, checked_by("convoy.data.augment:augment_steps")] | None = _data(
        None,
        "Augment training images, differently in every epoch, e.g. crop,flip. Also crop[:PADDING], resized-crop[:AREA], "
        "jitter[:STRENGTH], cutout[:SIDE], erase[:PROBABILITY], with commas between them.",
    )
    limit: int | None = _data(None, "Use only the first N training images.", ge=1)
    workers: int = _data(0, "Processes per device that load batches ahead; 0: none.", here=True, ge=0, le=256)
    net: str = _data(
        "two-conv:50:500",
        "Net by name, or MODULE:FUNCTION. Built in: two-conv:K1:K2 (filters), alexnet:F "
        "(features), resnet:DEPTH:WIDTH and others. torchvision:NAME and timm:NAME need pip install 'convoy-train[models]'. "
        "package.module:function returns an nn.Module.",
        often=True,
    )

    plan: str = _fleet(
        "data-by-speed",
        "Plan by name, auto, or a plan file. data: even parts of the batch, as PyTorch DDP. "
        "data-by-speed: parts of the batch by measured speed. sharded: the same, with weights and optimizer state in shards "
        "by speed. master: filters of the convolutions by speed, the rest on the fastest device (Marques 2018). model: every "
        "weighted layer by filter, evenly (Castello 2021). hybrid: convolutions by batch, fully connected layers by filter "
        "(Jin 2018). auto: the planner measures the devices and chooses.",
        often=True,
    )
    devices: Devices = _fleet(
        "auto",
        "Devices here: auto, all, a number, or names. auto: every GPU, or the CPU if there is none. all: the GPUs "
        "and the CPU. Names: cuda:0,cpu. A number of processes on the CPU: 4. Ignored under torchrun, srun and mpirun.",
        here=True,
        often=True,
    )
    slowdown: Numbers | None = _fleet(
        None, "Slow each device down by a factor, e.g. 1,1,2,4: unequal devices on one machine."
    )
    speeds: Numbers | None = _fleet(None, "Speeds per device instead of measured ones, e.g. 4,4,2,1.")
    reduce: Reduce | None = _fleet(
        None,
        "All-reduce algorithm: ring, butterfly, direct or star. Default: butterfly for hybrid, "
        "ring for the other named plans; auto chooses, a plan file says.",
    )
    wire: Annotated[CommDtype | None, Wire] = _fleet(
        None,
        "Number format of sent activations and gradients: exact or inexact-bf16. inexact-bf16 (short: bf16) halves the bytes, "
        "rounds to 8 bits and does not quite train like one device. Default: exact, or as the plan file says.",
    )
    rebalance: bool | None = _fleet(
        None,
        "Change the shares while training if a device is faster or slower than predicted. With --plan auto also try other "
        "plans with nearly the same predicted step time. Default: with --plan auto on CPUs; on a GPU, timing a layer means "
        "waiting for its kernels.",
    )
    compile: bool = _fleet(
        False,
        "Run layers through torch.compile, which may be faster or slower; numbers are equal up to rounding. It "
        "needs a C++ compiler such as g++ (on GPUs Triton).",
    )
    memory: Sizes | None = _fleet(
        None,
        "Memory that each device may use, e.g. 6 GB, or 6 GB,8 GB. Plan auto respects it, and GPUs refuse to allocate more. "
        "Default: all of it; with a fleet file, its memory_bytes.",
    )
    tf32: bool | None = _fleet(
        None,
        "Let GPUs round float32 to TF32 (10 bits) in matrix products and convolutions. Default: as torch does, in "
        "convolutions only.",
    )
    deterministic: bool = _fleet(
        False, "Use only deterministic algorithms of torch. A layer that has none is an error."
    )
    fleet: File | None = _fleet(
        None,
        "Fleet file; its hosts are started over ssh. Hosts without addresses are not: then only --plan auto reads its times. "
        "Default: measure now.",
        here=True,
        often=True,
    )
    budget_s: Seconds = _fleet(20.0, "Approximate time for measuring, with --plan auto.", here=True, gt=0, le=1e6)
    spare: Literal["auto", "every-step", "none"] = _fleet(
        "auto",
        "How often to keep a snapshot, so that the others continue if a device is lost. every-step: after each step, with "
        "copies of sharded parameters in another device's memory. auto: as often as costs at most 2 % of the time; the steps "
        "since are repeated. none: no snapshots; a lost device ends the training.",
    )
    job_key: File | None = _fleet(
        None,
        "Key file of the job, made by `convoy fleet key`. Needed under torchrun, srun and mpirun on several machines. Devices "
        "that this command starts need none.",
        here=True,
    )
    trust_network: bool = _fleet(
        False,
        "Neither authenticate nor encrypt connections. Anyone who reaches the machines' ports can read and end the job.",
        here=True,
    )
    listen: Listen | None = _fleet(
        None,
        "Let further devices join: the address of this machine to connect to. E.g. 192.168.1.5:7000 or 192.168.1.5; with "
        "--fleet, of the machine of device 0. It needs --job-key. Default: no device may join.",
        here=True,
    )
    port: int | None = _fleet(None, "Rendezvous port of the processes; default: a free one.", here=True, ge=0, le=65535)
    timeout_s: Seconds = _fleet(60.0, "Time after which a silent device counts as lost.", here=True, gt=0, le=1e6)

    epochs: int = _step(1, "Passes over the training images.", often=True, ge=1)
    batch: int = _step(64, "Global batch: samples per step.", often=True, ge=1)
    accumulate: int = _step(
        1, "Micro-batches per step: less memory, the same numbers. Batch norm alone sees one micro-batch.", ge=1
    )
    optimizer: Annotated[str, one_of("convoy.train.loop:OPTIMIZERS")] = _step("sgd", "sgd, adam or adamw.", often=True)
    lr: float = _step(0.01, "Learning rate, or the highest of a schedule.", often=True, gt=0)
    momentum: float = _step(0.9, "Momentum of sgd.", ge=0)
    weight_decay: float = _step(0.0, "Weight decay.", ge=0)
    schedule: Annotated[str, one_of("convoy.train.loop:SCHEDULES")] = _step(
        "constant",
        "constant, cosine, step or one-cycle. cosine: down to 0. step: multiplied by --drop-factor "
        "after every --drop-epochs. one-cycle: up from 1/25, then down to nearly 0.",
        often=True,
    )
    warmup_epochs: float = _step(
        0.0, "Epochs in which the learning rate first rises linearly. For one-cycle 0 means 30 % of the steps.", ge=0
    )
    drop_epochs: int = _step(30, "Epochs between two drops, for --schedule step.", ge=1)
    drop_factor: float = _step(0.1, "Factor of the learning rate at a drop, for --schedule step.", gt=0, le=1)
    clip_norm: float | None = _step(None, "Clip the norm of all gradients, over all devices, to this.", gt=0)
    label_smoothing: float = _step(0.0, "Part of each label that is spread over all classes, e.g. 0.1.", ge=0, lt=1)
    ema: float | None = _step(
        None, "Keep a moving average of the weights with this decay per step, e.g. 0.999. Tests use it.", ge=0, lt=1
    )
    precision: Annotated[str, one_of("convoy.runtime.precision:PRECISIONS")] = _step(
        "float32",
        "Layers compute in float32, bf16 or fp16. fp16 has loss scaling and needs GPUs. Weights and all-reduce stay "
        "float32, and so does the traffic, unless --wire says otherwise.",
        often=True,
    )
    seed: int = _step(0, "Seed of the initial weights and of the order of the images.", ge=0, le=2**32 - 1)

    evaluate_epochs: int = _test(1, "Test after every N epochs, and after the last one.", ge=1)
    evaluate_steps: int | None = _test(None, "Test after every N steps, too.", ge=1)

    checkpoint: File | None = _output(
        None,
        "Save the run in this folder after every epoch. The last three checkpoints and the best one are kept.",
        here=True,
        often=True,
    )
    checkpoint_steps: int | None = _output(None, "Save a checkpoint after every N steps, too.", ge=1)
    resume: bool = _output(
        False, "Continue from the latest checkpoint. On any devices, by any plan, with the same numbers.", often=True
    )
    on_nan: Literal["warn", "stop"] = _output(
        "warn", "At the first NaN or infinite loss: warn, or stop with exit status 2."
    )
    compare: bool = _output(
        False, "Then train the same net in plain PyTorch on one CPU, slowed down like the fastest device.", here=True
    )
    explain: bool = _output(
        False,
        "Print every setting with its source, and the step list: every computation, move and all-reduce of one step.",
        here=True,
    )
    save_run: File | None = _output(None, "Write all settings to this run file (TOML).", here=True)
    save_plan: File | None = _output(None, "Write the plan to this file (JSON).", here=True)
    log: File | None = _output(
        None,
        "Log file; none: no log. It has a JSON object per line. Default: log.jsonl in the folder of --checkpoint, or in a new "
        "folder in runs (or $CONVOY_RUNS), with run.toml, plan.json and fleet.toml.",
        here=True,
        often=True,
    )
    page: bool = _output(
        False,
        "Write the page of `convoy report` after every epoch. An open browser reloads it.",
        here=True,
    )
    tensorboard: Annotated[File, needs("tensorboard")] | None = _output(
        None,
        "Folder for TensorBoard: loss, accuracy, learning rate, samples/s. Needs pip install 'convoy-train[tensorboard]'.",
        here=True,
    )
    wandb: Annotated[str, needs("wandb")] | None = _output(
        None,
        "Project of Weights & Biases: the same numbers, and each device's usage. Needs pip install 'convoy-train[wandb]'; "
        "without a network: WANDB_MODE=offline.",
        here=True,
    )
    mlflow: Annotated[str, needs("mlflow")] | None = _output(
        None,
        "MLflow: the address of a tracking server, or sqlite:///FILE. Needs pip install 'convoy-train[mlflow]'.",
        here=True,
    )

    @property
    def device_names(self) -> tuple[str, ...]:
        return device_names(self.devices)

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """One per device."""
        return (1.0,) * len(self.device_names) if self.slowdown is None else self.slowdown

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch over all devices. Plans are made for this number."""
        return self.batch // self.accumulate

    @property
    def recovers(self) -> bool:
        """Whether the training continues if devices are lost."""
        return self.spare != "none"

    @property
    def rebalances(self) -> bool:
        """Whether plans are tried and shares change while training."""
        return self.plan == AUTO if self.rebalance is None else self.rebalance

    @property
    def listens_at(self) -> tuple[str, int] | None:
        """Address and port of `--listen`; port 0: a free one."""
        return None if self.listen is None else listen_address(self.listen)

    @property
    def optimizer_state(self) -> str:
        """The kind of optimizer state, for memory predictions."""
        if self.optimizer == "sgd":
            return "sgd-momentum" if self.momentum else "sgd"
        return "adam"

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that must be equal on all devices, as JSON.

        A plan file or a folder of images may have another path on each machine; the contents are compared later.
        """
        shown = self.model_dump(mode="json", include={name for name in FIELDS if not extra_of(name)["here"]})
        if self.plan not in (*PLANS, AUTO):
            shown["plan"] = "a file"
        if importlib.import_module("convoy.data").folder_of(self.data) is not None:
            shown["data"] = "a folder"
        return shown

    @property
    def lasting(self) -> dict[str, Any]:
        """The settings that a resumed run must keep, as JSON, because they shape its loss curve."""
        free = {"accumulate"} if self.schedule in ("cosine", "one-cycle") else {"accumulate", "epochs"}
        shaping = {name for name in FIELDS if extra_of(name)["panel"] in (DATA, TRAINING)} - free
        return {name: value for name, value in self.decisive.items() if name in shaping}


FIELDS: Mapping[str, FieldInfo] = Settings.model_fields


def extra_of(name: str) -> Mapping[str, Any]:
    """Return panel, here and often of a setting, as `_setting` was given them."""
    extra = FIELDS[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra


def key_of(name: str) -> str:
    """Return the name on the command line and in a run file: data_dir is data-dir, timeout_s is timeout."""
    return name.removesuffix("_s").replace("_", "-")


def kind_of(name: str) -> type:
    """Return the type of a setting's values: bool, int, float, str, Path or tuple."""
    kind: Any = FIELDS[name].annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    found = str if get_origin(kind) is Literal else get_origin(kind) or kind
    assert isinstance(found, type)
    return found
