"""Lists the settings of a training, and parses their values. The command line and run files are generated from this list."""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from convoy.comm.deadlines import TIMEOUT_S
from convoy.errors import InputError, shortened, shown
from convoy.fleet.units import quantity
from convoy.layout.collectives import Reduce
from convoy.layout.comm_dtype import CommDtype, parse_comm_dtype
from convoy.plan.presets import AUTO, PLANS

MAX_DEVICES = 1024  # more processes on one machine are a typing error
MAX_NUMBER = 1e10  # upper bound of a setting without its own: more is a typing error

NO_LOG = Path("none")  # value of `log` for no log

AUTO_DEVICE, ALL = "auto", "all"
"""`--devices auto`: every GPU of this machine, or its CPU if it has none. `all`: every GPU and the CPU. As the name of one
device, `auto` is the best for its rank."""

# ----------------------------------------------------------------------------- parsers: each raises InputError


def numbers(value: Any) -> tuple[float, ...]:
    """Parse comma-separated numbers, or a list."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if isinstance(parts, list | tuple) and not any(isinstance(part, bool) for part in parts):
            return tuple(float(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError("give numbers with commas between them, e.g. 1,1,2,4")


def sizes(value: Any) -> Any:
    """Parse comma-separated byte sizes: 6 GB,8 GB."""
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int | float) else value
    found = tuple(quantity(part, "bytes") for part in parts) if isinstance(parts, list | tuple) else (0.0,)
    if not found or min(found) < 1:
        raise InputError("give a memory above zero, or one for each device: 6 GB or 6 GB,8 GB")
    return found


def device_names(text: str) -> tuple[str, ...]:
    """Parse `--devices`: a number, names, `auto` or `all`. Under torchrun, WORLD_SIZE gives the number."""
    named = tuple(part.strip() for part in text.split(","))
    is_number = text.isdecimal()
    if (processes := os.environ.get("WORLD_SIZE", "")).isdecimal():
        count = int(processes)
        return named if len(named) == count and not is_number and text != ALL else (AUTO_DEVICE,) * count
    if text == ALL or (text == AUTO_DEVICE and not os.environ.get("CONVOY_DEVICE")):
        here: tuple[str, ...] = _imported("convoy.machine.accelerator:local_devices")()
        chosen = here if text == ALL else here[:-1]
        return chosen if len(chosen) > 1 else (AUTO_DEVICE,)
    if is_number:
        if len(text) > 9 or not 1 <= int(text) <= MAX_DEVICES:
            raise InputError(
                f"--devices {shortened(text)}: give a number from 1 to {MAX_DEVICES}, or their names: cuda:0,cpu"
            )
        return ("cpu",) * int(text) if int(text) > 1 else (AUTO_DEVICE,)
    if not all(named) or any(name[0] in "-+." for name in named):
        raise InputError(f"--devices {shown(text)}: give a number, or names with commas between them: cuda:0,cpu")
    return named


def _devices_text(value: Any) -> Any:
    """Convert a run file's number or list to the text of `--devices`."""
    return str(value) if type(value) is int else ",".join(map(str, value)) if isinstance(value, list) else value


def a_path(value: Any) -> Any:
    """Refuse an empty path, which would mean the current folder."""
    if isinstance(value, str) and not value.strip():
        raise InputError("give a path: this is empty; the current folder is .")
    return value


def read_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, as a job prints it."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{shown(text)} is no address of a job: give HOST:PORT, e.g. 192.168.1.5:7000")
    host = host.strip("[]")
    if host in ("0.0.0.0", "::", "*"):
        raise InputError(f"{shown(text)} means all addresses of this machine, but others need one: give that")
    return host, int(port)


def listen_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT or HOST. Port 0 means a free one."""
    return read_address(text) if ":" in text else (read_address(f"{text}:1")[0], 0)


def _imported(home: str) -> Any:
    """Return `module:name`. These modules import torch: import them only to check a value, so that --help is quick."""
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)


def _checked_by(home: str) -> AfterValidator:
    """Check a text with `module:name`: a function, or the allowed texts."""

    def check(text: str) -> str:
        rule = _imported(home)
        if callable(rule):
            rule(text)
        elif text not in rule:
            raise InputError(f"choose one of {', '.join(sorted(rule))}")
        return text

    return AfterValidator(check)


def _needs(package: str) -> AfterValidator:
    """Refuse a setting if its package is not installed."""

    def check(value: Any) -> Any:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:  # W&B keeps its files in a folder "wandb", which is no package
            raise InputError(f"{package} is not installed: pip install 'convoy-train[{package}]', or leave it out")
        return value

    return AfterValidator(check)


Seconds = Annotated[float, BeforeValidator(lambda value: quantity(value, "s") if isinstance(value, str) else value)]
Sizes = Annotated[tuple[float, ...], BeforeValidator(sizes)]
File = Annotated[Path, BeforeValidator(a_path), Field(strict=False)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(numbers)]
Devices = Annotated[str, BeforeValidator(_devices_text)]
Wire = BeforeValidator(lambda value: parse_comm_dtype(value) if isinstance(value, str) else value)
Listen = Annotated[str, _checked_by(f"{__name__}:listen_address")]

# ------------------------------------------------------------------------------------------------ the list


def _setting(panel: str, default: Any, meaning: str, *, here: bool = False, often: bool = False, **rules: Any) -> Any:
    """Return the pydantic field of a setting.

    Args:
        panel: its group in `--help-all`.
        meaning: help text; `--help` shows only the first sentence.
        here: the setting may differ between devices. All others affect the result, and must be equal on all devices.
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
_output = partial(_setting, "Output", here=True)


class Settings(BaseModel):
    """All settings of a training. Names, types, defaults and help texts are defined only here.

    The command line and run files use these names with dashes and without the unit at their end: `data_dir` is `--data-dir D`
    and `data-dir = "D"`, `timeout_s` is `--timeout` and `timeout`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    data: Annotated[str, _checked_by("convoy.data:check")] = _data(
        "digits",
        "Images by name, folder:PATH or MODULE:FUNCTION. Names: digits, fashion-mnist, cifar10, cifar100.",
        often=True,
    )
    data_dir: File | None = _data(None, "Folder of the data's files. Default: a download cache.", here=True, often=True)
    image_size: int | None = _data(None, "Resize a folder's images to this side, in pixels.", ge=1, le=8192)
    test_fraction: float | None = _data(None, "Part to hold out, if no images are for tests. Default: 0.2.", gt=0, lt=1)
    augment: Annotated[str, _checked_by("convoy.data.augment:augment_steps")] | None = _data(
        None,
        "Augment training images, e.g. crop,flip. Steps: crop, flip, resized-crop, jitter, cutout, erase, each with :VALUE.",
    )
    limit: int | None = _data(None, "Use only the first N training images.", ge=1)
    workers: int = _data(0, "Processes per device that load batches ahead; 0: none.", here=True, ge=0, le=256)
    net: str = _data(
        "two-conv:50:500",
        "Net by name, or MODULE:FUNCTION. Built in: two-conv:K1:K2 (filters), alexnet:F, resnet:DEPTH:WIDTH and others; "
        "torchvision:NAME and timm:NAME need pip install 'convoy-train[models]'.",
        often=True,
    )

    plan: str = _fleet(
        "data-by-speed",
        "Plan by name, auto, or a plan file. data: the batch evenly, as PyTorch DDP. data-by-speed: the batch by measured "
        "speed. sharded: also weights and optimizer state. master: filters of convolutions, the rest on the fastest device. "
        "model: filters of every layer. hybrid: convolutions by batch, the rest by filter. auto: the planner chooses.",
        often=True,
    )
    devices: Devices = _fleet(
        AUTO_DEVICE,
        "Devices here: auto, all, a number, or names. auto: every GPU, or the CPU. all: GPUs and CPU. 4: four CPU "
        "processes. Names: cuda:0,cpu. Ignored under torchrun, srun and mpirun.",
        here=True, often=True,
    )  # fmt: skip
    slowdown: Numbers | None = _fleet(None, "Slow each device down by a factor, e.g. 1,1,2,4.")
    speeds: Numbers | None = _fleet(None, "Speeds per device instead of measured ones, e.g. 4,4,2,1.")
    reduce: Reduce | None = _fleet(None, "All-reduce: ring, butterfly, direct or star. Default: as the plan says.")
    wire: Annotated[CommDtype | None, Wire] = _fleet(
        None, "Format of sent activations and gradients: exact, or inexact-bf16 (half the bytes). Default: the plan's."
    )
    rebalance: bool | None = _fleet(None, "Change shares if speeds differ from the prediction. Default: with auto.")
    cuda_graphs: bool = _fleet(False, "On NVIDIA GPUs, launch layers as CUDA graphs.")
    memory: Sizes | None = _fleet(None, "Memory per device: 6 GB or 6 GB,8 GB. Default: the fleet file's, or all.")
    tf32: bool | None = _fleet(None, "Let GPUs round float32 to TF32. Default: as torch does, in convolutions only.")
    deterministic: bool = _fleet(False, "Use only deterministic algorithms of torch. A layer without one is an error.")
    fleet: File | None = _fleet(
        None, "Fleet file; its hosts are started over ssh. Without addresses: for --plan auto.", here=True, often=True
    )
    budget_s: Seconds = _fleet(20.0, "Approximate time for measuring, with --plan auto.", here=True, gt=0, le=1e6)
    spare: Literal["auto", "every-step", "none"] = _fleet(
        "auto",
        "Snapshots, so that the others continue if a device is lost. auto: they cost at most 2 %. none: its loss ends the job.",
    )
    job_key: File | None = _fleet(None, "Key file, if another launcher starts the job on several machines.", here=True)
    trust_network: bool = _fleet(
        False, "No authentication, no encryption. Anyone who reaches the ports can read and end the job.", here=True
    )
    listen: Listen | None = _fleet(
        None, "Let devices join at HOST or HOST:PORT of this machine (or of device 0's). Needs --job-key.", here=True
    )
    port: int | None = _fleet(None, "Rendezvous port of the processes; default: a free one.", here=True, ge=0, le=65535)
    timeout_s: Seconds = _fleet(TIMEOUT_S, "Upper bound of waits for a device that lives.", here=True, gt=0, le=1e6)

    epochs: int = _step(1, "Passes over the training images.", often=True, ge=1)
    batch: int = _step(64, "Global batch: samples per step.", often=True, ge=1)
    accumulate: int = _step(1, "Micro-batches per step: less memory, the same numbers (except of batch norm).", ge=1)
    optimizer: Annotated[str, _checked_by("convoy.train.loop:OPTIMIZERS")] = _step(
        "sgd", "sgd, adam or adamw.", often=True
    )
    lr: float = _step(0.01, "Learning rate, or the highest of a schedule.", often=True, gt=0)
    momentum: float = _step(0.9, "Momentum of sgd.", ge=0)
    weight_decay: float = _step(0.0, "Weight decay.", ge=0)
    schedule: Annotated[str, _checked_by("convoy.train.loop:SCHEDULES")] = _step(
        "constant",
        "constant, cosine, step or one-cycle. step: times --drop-factor after every --drop-epochs. one-cycle: up from 1/25.",
        often=True,
    )
    warmup_epochs: float = _step(0.0, "Epochs of linear warm-up. For one-cycle 0 means 30 % of the steps.", ge=0)
    drop_epochs: int = _step(30, "Epochs between two drops, for --schedule step.", ge=1)
    drop_factor: float = _step(0.1, "Factor of the learning rate at a drop, for --schedule step.", gt=0, le=1)
    clip_norm: float | None = _step(None, "Clip the norm of all gradients, over all devices, to this.", gt=0)
    label_smoothing: float = _step(0.0, "Part of each label that is spread over all classes, e.g. 0.1.", ge=0, lt=1)
    ema: float | None = _step(None, "Test a moving average of the weights, with this decay per step.", ge=0, lt=1)
    precision: Annotated[str, _checked_by("convoy.runtime.precision:PRECISIONS")] = _step(
        "float32",
        "Layers compute in float32, bf16 or fp16. Weights and all-reduce stay float32. fp16 scales the loss and needs GPUs.",
        often=True,
    )
    seed: int = _step(0, "Seed of the initial weights and of the order of the images.", ge=0, le=2**32 - 1)

    evaluate_epochs: int = _test(1, "Test after every N epochs, and after the last one.", ge=1)
    evaluate_steps: int | None = _test(None, "Test after every N steps, too.", ge=1)

    checkpoint: File | None = _output(None, "Save the run in this folder after every epoch; see --resume.", often=True)
    checkpoint_steps: int | None = _output(None, "Save a checkpoint after every N steps, too.", here=False, ge=1)
    resume: bool = _output(False, "Continue from the latest checkpoint, on any devices.", here=False)
    on_nan: Literal["warn", "stop"] = _output("warn", "At the first NaN or infinite loss: warn, or stop.", here=False)
    compare: bool = _output(False, "Then train in plain PyTorch on one CPU, slowed down like the fastest device.")
    explain: bool = _output(False, "Print every setting with its source, and every operation of a step.")
    save_run: File | None = _output(None, "Write all settings to this run file (TOML).")
    save_plan: File | None = _output(None, "Write the plan to this file (JSON).")
    log: File | None = _output(None, "Log file; none: no log. Default: in --checkpoint, or in runs.", often=True)
    page: bool = _output(False, "Write the page of `convoy report` after every epoch.")
    tensorboard: Annotated[File, _needs("tensorboard")] | None = _output(None, "Folder for TensorBoard.")
    wandb: Annotated[str, _needs("wandb")] | None = _output(None, "Project of Weights & Biases.")
    mlflow: Annotated[str, _needs("mlflow")] | None = _output(None, "MLflow: address of a server, or sqlite:///FILE.")

    @property
    def device_names(self) -> tuple[str, ...]:
        return device_names(self.devices)

    @property
    def slowdowns(self) -> tuple[float, ...]:
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
        if _imported("convoy.data:folder_of")(self.data) is not None:
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
