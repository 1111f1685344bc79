"""Result files that name a commit which is not in the history."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench.cells import Rows
from bench.common import RESULTS

FIRST = "bd153eee6769d6188983d89cb3cf94bc870c2d6c"
"""The first commit. Where it is not an ancestor of what is checked out (a shallow clone, no repository), nothing is known of others either."""


def in_history(commit: str, folder: Path = RESULTS) -> bool:
    """Whether a commit is an ancestor of what is checked out in the folder's repository."""
    command = ["git", "-C", str(folder), "merge-base", "--is-ancestor", commit, "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def absent_commits(folder: Path = RESULTS, first: str = FIRST) -> Rows | None:
    """The commits that result files name and the history lacks, with these files; None where the history is not whole."""
    if not in_history(first, folder):
        return None
    files: dict[str, list[str]] = {}
    dates: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        commit = document["commit"]
        files.setdefault(commit, []).append(f"`{path.stem}`")
        dates[commit] = max(dates.get(commit, ""), document["date"][:10])
    absent = sorted((commit for commit in files if not in_history(commit, folder)), key=lambda commit: (dates[commit], commit))
    return [["commit", "last measured", "files"], *([commit[:7] + commit[40:], dates[commit], ", ".join(files[commit])] for commit in absent)]
