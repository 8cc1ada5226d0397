"""Starts a job: the devices of this machine, or of every host of a fleet.

::

    here                                  on each host, over ssh (or as a child process, on this machine)
    fleet.py   run_on_fleet               agent.py   python -m convoy.launch.agent
    │  check ─────────────────────────►   its version, address, and digests of the command's files
    │  meet ───────────► (host 0 only)    its address on the route to the others, a free port
      │  start ─────────────────────────►   one process per device
      │  beat, beat, ... ───────────────►   (after a minute of silence, or when ssh ends, it ends its devices)
    │  ◄──── output of the first device, exit status of each device
    │  end ───────────────────────────►   after a device failed, or after Ctrl-C

`local.py` starts the devices of this machine. `pairing.py` copies a job's key to another machine by a one-time code.
`survey.py` queries hosts for their hardware (`convoy fleet init`). The package `fleet`, below the planner, describes fleets.
This package is above the trainer, because it checks settings and starts jobs.
"""
