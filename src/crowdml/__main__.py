"""`python -m crowdml`: the command, where no script of that name is on the path."""

from crowdml.cli import main

if __name__ == "__main__":
    main()
