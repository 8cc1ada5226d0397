"""Starting a job: the devices of this machine, or those of every host of a fleet.

::

    here                                         on each host, over ssh (or beside, on this machine)
    fleet.py   run_on_fleet                      agent.py   python -m convoy.launch.agent
      │  check: what is there? ───────────────►    its version, its address, digests of the command's files
      │  meet ────────────────► (host 0 only)      the address on its route to the others, a free port
      │  start ───────────────────────────────►    one process per device
      │  beat, beat, ... ─────────────────────►    (silence, or the end of ssh: it ends its devices)
      │  ◄── what device 0 says, where newcomers may ask, how each device ended
      │  end ─────────────────────────────────►    the others, once one has failed or Ctrl-C was pressed

    detach.py, stay.py   `--detach`: the hosts are let go; and what an agent does without orders
    supervisor.py    starts processes, reads what they print, ends all of them; signals to this process
    leaving.py       SIGTERM: devices finish the step, and leave or end
    stopped.py       devices that are stopped for too long
    exit_status.py   how processes ended, and which was the cause. Pure
    again.py         which lost devices are started again, and when
    local.py         launch_local: the devices of this machine
    host_job.py      what each host starts, the environment of each device, the lines to paste. Pure
    ssh.py           the call of ssh, and what its complaints mean. Pure
    slurm.py, kubernetes.py   the same fleet as a file for sbatch, as a JobSet for kubectl. Pure
    notebook.py      a cell of a notebook as a script
    survey.py        convoy fleet init: asks hosts what they are made of
    command.py       `--fleet` and `--print` of convoy run, train and measure
"""
