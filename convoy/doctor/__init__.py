"""`convoy doctor`: finds what would stop or slow a training before it starts, and says what to do about it.

::

    facts.py      what a device reports of itself and its machine; findings; an examination. Frozen values, to and from JSON
    examine.py    one examination: alone, as a job, over ssh; which hosts reach each other, and how fast
    findings.py   from facts to findings, pure
    doctor.py     the command: tables, findings, the last line
"""
