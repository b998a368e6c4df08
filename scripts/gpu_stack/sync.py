"""Copy the files of a git checkout that git does not ignore to another folder: python scripts/gpu_stack/sync.py TARGET

The GPU environment builds and runs megappo from such a copy, so that the checkout keeps its own `_native.so`. Files that are
unchanged are left alone; files that an earlier call copied and the checkout no longer has are removed; what else lies in the
target (the compiled library, egg-info) stays.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = ".synced"


def files_of(checkout: Path) -> list[str]:
    """Paths of the tracked files and of the new ones that git does not ignore, without those that were deleted."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=checkout, check=True, capture_output=True
    ).stdout.decode()
    return sorted({path for path in listed.split("\0") if path and (checkout / path).is_file()})


def sync(checkout: Path, target: Path) -> int:
    """Make `target` hold the checkout's files; the number of files that were written or removed."""
    target.mkdir(parents=True, exist_ok=True)
    before = (target / LIST).read_text().split("\n") if (target / LIST).exists() else []
    files, changed = files_of(checkout), 0
    for gone in sorted(set(before) - set(files) - {""}):
        (target / gone).unlink(missing_ok=True)
        changed += 1
    # Written before the copies, so that the next call knows of an interrupted one.
    (target / LIST).write_text("\n".join(sorted({*before, *files})))
    for path in files:
        source, copy = checkout / path, target / path
        # The mode counts too: scripts are called by name.
        if copy.exists() and copy.read_bytes() == source.read_bytes() and copy.stat().st_mode == source.stat().st_mode:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
        changed += 1
    (target / LIST).write_text("\n".join(files))
    return changed


if __name__ == "__main__":
    print(f"{sync(ROOT, Path(sys.argv[1]))} files copied to {sys.argv[1]}")
