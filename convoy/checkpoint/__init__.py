"""Checkpoints: save a training run, and resume it on any other fleet with any other plan.

::

    save_checkpoint("run", model, optimizer, Progress(step=300, epoch=2, batch=17))     # on every device
    progress = load_checkpoint("run", model, optimizer)                                 # on every device of another fleet

Plain PyTorch loads the weights: `model.load_state_dict(safetensors.torch.load_file("run/best/model.safetensors"))`.
"""

from convoy.checkpoint.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from convoy.checkpoint.run_folder import Progress, latest

__all__ = ["Checkpointer", "Progress", "latest", "load_checkpoint", "save_checkpoint"]
