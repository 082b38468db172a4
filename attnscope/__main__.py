"""`python -m attnscope`."""

from attnscope.cli import main

main()
