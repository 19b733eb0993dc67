"""`python -m crowdml.cli`."""

from crowdml.cli import main

main()
