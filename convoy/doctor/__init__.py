"""`convoy doctor`: what would stop or slow a training, found before it, in words and with the cure.

::

    facts.py      values: what was found out about devices, links and speeds; what may be told of it
    schedule.py   which links carry data when
    diagnose.py   facts to findings, pure: diagnose_hosts.py and diagnose_links.py hold the stories
    own.py        the facts of this process and its machine
    knock.py      one connection tried: open, refused, silent, no way
    link.py       round trips, clocks and bytes/s between two hosts
    pace.py       how fast a device computes, and what else runs beside it
    board.py      short texts of all devices of a job, handed round with deadlines
    job.py        one examination of all devices of a job
    remote.py     the same, started over ssh
    report.py     tables, findings, the last line
    command.py    the three ways in
"""
