"""Process that encodes records for `encoding.py`: batches on the input, their results on the output, until the input ends.

Started as `python -m megappo.data.encoding_process`; the first thing that it reads are tokenizer, its identity and the function.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from megappo.data.tokenizers import load_tokenizer


def main() -> None:
    """Encode batch after batch. A reply is (results, text of the ValueError that ended them or None)."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not stand among the answers
    path, identity, encode = pickle.load(sys.stdin.buffer)
    tokenizer = load_tokenizer(path)
    if tokenizer.identity() != identity:
        sys.exit(f"the tokenizer {path} was changed while it was used")
    while True:
        try:
            items = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        results: list[Any] = []
        error = None
        for item in items:
            try:
                results.append(encode(tokenizer, item))
            except ValueError as refused:
                error = str(refused)
                break
        pickle.dump((results, error), answers)
        answers.flush()


if __name__ == "__main__":
    main()
