"""python -m convoy"""

from convoy.cli import main

main()
