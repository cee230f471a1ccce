"""Source `hub`: a Hugging Face repository at a pinned commit.

{"kind": "hub", "id": "owner/name", "revision": 40 hex digits, "licence": optional}. The token comes from the hub
client's own environment (HF_TOKEN, or its login). A branch or tag is refused: it can move.
"""

import re
from pathlib import Path
from typing import NotRequired, TypedDict

from kvgate.jobs.record import blocked, one_line
from kvgate.sources import Fetched, folder

REQUIRED = {"id": "[^/]+/[^/]+", "revision": "[0-9a-f]{40}"}  # keys, and the form of the text that they hold
OPTIONAL = {"licence": ".+"}
LOCAL = ()


class Source(TypedDict):
    kind: str
    id: str
    revision: str
    licence: NotRequired[str]


def fetch(source: Source, into: Path) -> Fetched:
    """Download the needed files through the hub's own cache and copy them. Raises Blocked with one line."""
    name = f"hub {source['id']}"
    revision = str(source.get("revision", ""))
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise blocked("revision", f"{name}: got revision {revision!r}, allowed: a commit of 40 hex digits")
    cached = _download(source["id"], revision, folder.PATTERNS, name)
    if not list(cached.glob("model.safetensors*")):
        cached = _download(source["id"], revision, folder.PATTERNS + folder.FALLBACK, name)
    return {**folder.take(cached, into, name), "revision": revision}


def _download(repository: str, revision: str, patterns: tuple[str, ...], name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # offline, no such repository, gated, a proxy: the client has many types for them
        text = f"{name} at {revision}: cannot be downloaded: {one_line(error)}"
        raise blocked("unreachable", text) from error
