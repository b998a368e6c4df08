"""Settings of the documentation site: `scripts/docs.sh` builds it, and every warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import megappo

project = "megappo"
release = version = megappo.__version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
# Headings get the anchors that GitHub gives them, so a link works in both places.
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"megappo {release}"
html_static_path = []
exclude_patterns = ["_build"]
