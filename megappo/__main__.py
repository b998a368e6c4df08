"""`python -m megappo` is the `megappo` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:  # as of a user's own torchrun: a torch.py in the working directory would be imported for torch
        del sys.path[0]
    from megappo.commands.cli import main

    sys.exit(main())
