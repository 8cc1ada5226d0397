"""`convoy doctor`: finds what would stop or slow a training before it starts, and says what to do about it.

::

    schema.py      facts and findings: frozen values, to and from JSON
    probes.py      the facts of this machine, its speed, one connection
    exchange.py    key-value exchange between the devices, with deadlines
    links.py       the link scan: reachability, round trips, clocks, bytes/s
    examine.py     one examination: alone, as a job, over ssh
    conditions.py  conditions over the facts, pure
    findings.py    the table: condition, severity, words, cure
    report.py      tables, findings, the last line
    command.py     the command
"""
