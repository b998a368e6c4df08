#!/usr/bin/env python
"""`megappo tune` of this checkout, installed or not: the same arguments."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))  # for the ranks of trials

from megappo.commands.cli import main

sys.exit(main(["tune", *sys.argv[1:]]))
