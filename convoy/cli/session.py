"""A `convoy train` on one device, from the images to the last line of the log."""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from convoy.api import distribute
from convoy.checkpoint import Progress
from convoy.cli.admission import build_members
from convoy.cli.build import build_checkpointer, build_loaders, build_rebalancer, build_training
from convoy.cli.comparison import Done
from convoy.cli.inputs import build_model, example_of
from convoy.cli.job import Job
from convoy.cli.newcomer import measured_alone
from convoy.cli.reporter import ids_of, start_reporting
from convoy.cli.show import decision_reporter, show_new_plan, show_plan
from convoy.comm.environment import imposed_slowdown
from convoy.config.run_file import to_toml
from convoy.files import write_whole
from convoy.machine.process import handle_signals
from convoy.measure.replanner import expect_measured
from convoy.plan.presets import AUTO
from convoy.train.loop import fit


def train_job(job: Job) -> Done:
    """Train as the settings say, as one device of the job."""
    group, screen, splits = job.group, job.screen, job.images()
    model, example = build_model(job.settings, splits), example_of(splits)
    slowdown = job.settings.slowdowns[group.device] * imposed_slowdown()
    plans = job.plans(model, example, slowdown)
    settings = job.settings
    part = distribute(
        model, plans[0], group, example, slowdown=slowdown, precision=settings.precision, compile=settings.compile
    )
    expect_measured(part, plans.request.fleet.measured)
    devices = job.devices()
    screen.fleet(devices, plans.speeds)
    if group.device == 0 and job.invitation is None:
        if settings.save_run is not None:
            write_whole(settings.save_run, to_toml(settings))
        if settings.save_plan is not None:
            write_whole(settings.save_plan, plans[0].to_json())
    show_plan(settings, part, screen)
    loaders = train, test = build_loaders(settings, splits, part)
    training = build_training(settings, part, train)
    training.tell = screen.line
    checkpointer = build_checkpointer(settings, training, screen, job.stack, begins=job.invitation is None)
    done = Progress() if checkpointer is None else checkpointer.progress
    reporter = start_reporting(job, part, plans, devices, train.samples, done.step)
    title = f"{group.devices} device{'s' * (group.devices > 1)}, plan {part.plan.name}"
    samples_done = done.epoch * train.samples + done.batch * settings.batch
    start_s = time.perf_counter()
    with screen.progress(title, settings.epochs, train.samples, samples_done, test.samples) as bar:
        reporter.observers.observers = (reporter.timer, bar, *reporter.observers.observers)
        rebalancer = None
        if settings.rebalances:
            on_chosen = partial(show_new_plan, part, plans[0], screen)
            report = decision_reporter(screen, reporter.timer, lambda: reporter.log, reporter.header.predict, on_chosen)
            rebalancer = build_rebalancer(part, training, plans, report, screen)
        replan = plans.anew(rebalancer)
        known = None
        if job.invitation is not None:
            print("measures itself while the others train", flush=True)
            known = measured_alone(job.invitation.offer, settings, model, example, group, slowdown)
        elif group.devices == 1 and settings.listen is not None:
            asked = {"timed": True, "measured": settings.plan == AUTO}
            alone = measured_alone(asked, settings, model, example, group, slowdown)
            replan.known = replace(replan.known, speeds=alone.speeds, measured=alone.measured)
        members = build_members(job, training, reporter, plans, replan, splits.fingerprint, known)
        with nullcontext() if members is None else handle_signals(members):
            history = fit(training, *loaders, settings.epochs, reporter.observers, rebalancer, checkpointer, members)
    uses = reporter.usage(members, time.perf_counter() - start_s)
    screen.usage(uses, history)
    screen.best(history)
    reporter.on_end(plans, plans[0] if rebalancer is None else rebalancer.autotune.plan, uses)
    trained = [reporter.header.devices[d] for d in ids_of(members, job)]
    return Done(history, splits, trained, uses, plans[0].inexact, reporter.directory)
