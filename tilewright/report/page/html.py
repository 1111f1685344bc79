"""The page as a file: style, script and data in one, which no browser needs a network for."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from tilewright.report.code import Progress
from tilewright.report.page.connections import match_data, matched
from tilewright.report.page.data import Subject, subject_data

SCRIPTS = ("elements.js", "tables.js", "graph.js", "charts.js", "detail.js", "page.js")
"""In the order in which the page runs them."""


def page(subjects: Sequence[Subject], progress: Progress) -> str:
    """The page of one program, or of two with their comparison.

    The page's policy admits no connection at all, and only the style and the script whose digests it names; names of the model reach the document as
    text only.
    """
    data: dict[str, Any] = {"subjects": [subject_data(subject, progress) for subject in subjects], "matches": []}
    if len(subjects) == 2:
        data["matches"] = match_data(matched(*(subject.plan for subject in subjects)))
    style = _asset("page.css")
    script = "\n".join(('"use strict";', "(() => {", *map(_asset, SCRIPTS), "})();"))
    return Template(_asset("page.html")).substitute(
        title=html.escape(" and ".join(subject.name for subject in subjects)),
        policy=f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        style=style,
        script=script,
        data=embedded(data),
    )


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: it has no `<`."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8").strip()


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
