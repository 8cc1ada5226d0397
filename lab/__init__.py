"""Research on Convoy: generators of random nets and failures, tables of whole libraries, calibration. Only tests import it."""
