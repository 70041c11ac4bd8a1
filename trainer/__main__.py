"""`python -m trainer COMMAND`."""

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
