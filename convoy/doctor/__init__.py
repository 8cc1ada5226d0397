"""`convoy doctor`: finds problems that would stop or slow a training, and their remedies.

::

    facts.py      frozen values and their JSON: each device's facts about itself and its machine, findings, an examination
    examine.py    collects the facts: alone, as a job, over ssh; which hosts reach each other, and how fast
    findings.py   derives findings from the facts (pure functions)
    doctor.py     the command; prints tables, findings and the verdict
"""
