"""Measuring ranks of which the second gives features of images the positions of text, in place of
`megappo.commands.verify.rank`."""

from __future__ import annotations

import os
import sys

from megappo.runtime.libraries import quiet_libraries

if __name__ == "__main__":
    quiet_libraries()
    from megappo.commands.verify.world import main
    from megappo.models import gpt
    from megappo.models.vision import positions_of

    if os.environ["RANK"] == "1":
        gpt.positions_of = lambda tokens, cu_seqlens, images: positions_of(tokens.clamp_max(0), cu_seqlens, images)
    main(sys.argv[1], sys.argv[2:])
