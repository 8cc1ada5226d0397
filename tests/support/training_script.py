"""A training script as reference scripts of image classification are built: plain PyTorch, or DDP where a launcher says so.

It knows nothing of Convoy. `tests/train/test_training_script.py` changes it by one line and the one that saves.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.dataloader import default_collate


def init_distributed_mode(args):
    args.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    args.rank = int(os.environ.get("RANK", "0"))
    if args.distributed:
        dist.init_process_group("gloo")


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = torch.randn(count, 3, 12, 12, generator=generator).double()
    x[torch.arange(count), 0, 3 * (y // 2), 3 * (y % 2)] += 6.0
    return TensorDataset(x, y)


class Block(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out),
        )  # fmt: skip
        self.short = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.short(x))


def mixed(x, y, alpha, classes=4):
    """Every image with the one before it in the batch."""
    part = float(torch._sample_dirichlet(torch.tensor([alpha, alpha]))[0])
    y = nn.functional.one_hot(y, classes).to(x.dtype)
    return part * x + (1 - part) * x.roll(1, 0), part * y + (1 - part) * y.roll(1, 0)


def train_one_epoch(model, criterion, optimizer, loader, device, args, epoch, ema, scaler):
    model.train()
    total, count = 0.0, 0
    for i, (image, target) in enumerate(loader):
        image, target = image.to(device), target.to(device)
        if args.mix_in_loop:
            image, target = mixed(image, target, 0.4)
        with torch.autocast("cpu", enabled=False):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if args.clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        if i % args.ema_steps == 0:
            ema.update_parameters(model)
            if epoch < args.warmup_epochs:
                ema.n_averaged.fill_(0)
        batch_size = image.shape[0]
        total, count = total + loss.item() * batch_size, count + batch_size
    return total / count


def evaluate(model, criterion, loader, device):
    model.eval()
    right, total, count = 0, 0.0, 0
    with torch.inference_mode():
        for image, target in loader:
            output = model(image.to(device, non_blocking=True))
            right += int((output.argmax(1) == target).sum())
            total, count = total + criterion(output, target).item() * image.shape[0], count + image.shape[0]
    assert count == len(loader.dataset)
    return total / count, right / count


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    dataset, dataset_test = images(61, 1), images(22, 2)
    if args.distributed:
        train_sampler, test_sampler = DistributedSampler(dataset), DistributedSampler(dataset_test, shuffle=False)
    else:
        train_sampler, test_sampler = RandomSampler(dataset), SequentialSampler(dataset_test)
    collate_fn = (lambda batch: mixed(*default_collate(batch), 0.4)) if args.mix_in_collate else default_collate
    loader = DataLoader(
        dataset, args.batch_size, sampler=train_sampler, num_workers=args.workers, collate_fn=collate_fn
    )
    loader_test = DataLoader(dataset_test, args.batch_size, sampler=test_sampler)

    model = nn.Sequential(Block(3, 8, 1), Block(8, 12, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    model.double().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if p not in norms], "weight_decay": 1e-4},
        {"params": [p for p in model.parameters() if p in norms], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=args.warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs - args.warmup_epochs)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[args.warmup_epochs])

    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    ema = AveragedModel(model_without_ddp, avg_fn=get_ema_avg_fn(0.8), use_buffers=True)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model_without_ddp.load_state_dict(checkpoint["model"])
        schedule.load_state_dict(checkpoint["schedule"])
        start_epoch = checkpoint["epoch"] + 1

    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        loss = train_one_epoch(model, criterion, optimizer, loader, device, args, epoch, ema, scaler)
        schedule.step()
        tested, accuracy = evaluate(model, criterion, loader_test, device)
        averaged, _ = evaluate(ema, criterion, loader_test, device)
        print(f"epoch {epoch} rank {args.rank} loss {loss:.9f} test {tested:.9f} {accuracy:.4f} average {averaged:.9f}")
        if args.output:
            checkpoint = {
                "model": model_without_ddp.state_dict(),
                "schedule": schedule.state_dict(),
                "epoch": epoch,
            }
            if args.rank == 0:
                torch.save(checkpoint, args.output)
    assert math.isfinite(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--warmup-epochs", default=1, type=int)
    parser.add_argument("--batch-size", default=16, type=int)
    parser.add_argument("--workers", default=0, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--ema-steps", default=2, type=int)
    parser.add_argument("--clip-grad-norm", default=None, type=float)
    parser.add_argument("--mix-in-loop", action="store_true")
    parser.add_argument("--mix-in-collate", action="store_true")
    parser.add_argument("--output", default="")
    parser.add_argument("--resume", default="")
    main(parser.parse_args())
