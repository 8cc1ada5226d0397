"""Start a job: the devices of this machine, or those of every host of a fleet.

::

    here                                  on each host, over ssh (or as a child process, on this machine)
    fleet.py   run_on_fleet               agent.py   python -m convoy.launch.agent
      │  check ─────────────────────────►   its version, its address, digests of the command's files
      │  meet ───────────► (host 0 only)    the address on its route to the others, a free port
      │  start ─────────────────────────►   one process per device
      │  beat, beat, ... ───────────────►   (after a minute of silence, or the end of ssh, it ends its devices)
      │  ◄──── output of the first device, how each device ended
      │  end ───────────────────────────►   when a device has failed, or Ctrl-C was pressed

`local.py` starts the devices of this machine. `batch_files.py` writes the same job for a shell, Slurm and Kubernetes.
`survey.py` asks hosts for their hardware (`convoy fleet init`). The values of a fleet are in the room `fleet`, below the
planner; this room is above the trainer, because it checks settings and starts jobs.
"""
