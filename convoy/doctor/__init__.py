"""`convoy doctor`: finds problems that would stop or slow a training, and their remedies.

::

    facts.py      a device's report on itself and its machine; findings; an examination. Frozen values, to and from JSON
    examine.py    one examination: alone, as a job, over ssh; which hosts reach each other, and how fast
    findings.py   from facts to findings, pure
    doctor.py     the command: tables, findings, the last line
"""
