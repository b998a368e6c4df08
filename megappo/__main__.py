"""`python -m megappo` is the `megappo` command."""

import sys

from megappo.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
