"""`python -m ampwatch` is the console script `ampwatch`."""

from .cli import main

main()
