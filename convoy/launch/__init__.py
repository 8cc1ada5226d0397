"""Starting a job on every host of a fleet from one of them, or from a machine beside them.

::

    here                                         on each host, over ssh (or beside, on this machine)
    run.py   run_on_fleet                        far.py   python -m convoy.launch.agent
      │  check: what is there? ───────────────►    its version, its address, digests of the command's files
      │  meet ────────────────► (host 0 only)      the address on its route to the others, a free port
      │  start ───────────────────────────────►    one process per device
      │  beat, beat, ... ─────────────────────►    (silence, or the end of ssh: it ends its devices)
      │  ◄── what device 0 says, how each device ended
      │  end ─────────────────────────────────►    the others, once one has failed or Ctrl-C was pressed

    post.py   a fleet's devices host by host, and the lines to paste. Pure
    ssh.py    the call of ssh, and what its complaints mean. Pure
    link.py   one host as seen from here: a process with lines to it and from it
"""
