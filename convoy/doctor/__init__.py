"""`convoy doctor`: finds what would stop or slow a training before it starts, and says what to do about it.

::

    facts.py      what a device reports of itself and its machine; findings; an examination. Frozen values, to and from JSON
    links.py      which hosts reach each other; their links, measured as `convoy measure` does
    examine.py    one examination: alone, as a job, over ssh
    findings.py   from facts to findings, pure
    report.py     tables, findings, the last line
    exchange.py   texts that the devices leave for each other, with deadlines
"""
