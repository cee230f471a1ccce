"""`python -m kvgate bundle`: a checked copy of a bundle in a folder of the user's, on request with its graph."""

import shutil
from pathlib import Path
from typing import cast

from kvgate.jobs import record
from kvgate.report import bundle
from kvgate.report.bundle_row import GRAPH, Facts, Refused


def main(folder: Path, into: Path, with_graph: bool) -> int:
    """Copy `folder` to `into`, which must not exist. Nothing in the copy is a link.

    with_graph: the graph and its weights go into `graph/` of the copy, which then runs on any PC.
    Raises Refused where a file is not what its checksum says.
    """
    if not (folder / bundle.FACTS).is_file():
        raise Refused(f"{folder}: got no {bundle.FACTS}, allowed: a bundle's folder")
    if into.exists():
        raise Refused(f"{into}: exists, allowed: a folder that is not there yet")
    facts, known = record.read(folder / bundle.FACTS), bundle.sums(folder)
    files = {name: (folder / name, sha) for name, sha in known.items()}
    if with_graph and facts["graph"] != ".":  # a row of ONNX Runtime is its graph
        for name, of in (("graph", facts), *((f"graph/{part}", of) for part, of in facts["parts"].items())):
            files |= {f"{name}/{x}": source for x, source in _graph(folder / of["graph"]).items()}
            of["graph"] = name
    part = record.partial(into)
    try:
        for name, (source, sha) in files.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, part / name)
            if record.sha256(part / name) != sha:
                raise Refused(f"{source}: got another content than its checksum")
        if with_graph:
            del facts["sizes"]
            bundle.seal(
                part, cast(Facts, facts), {name: sha for name, (_, sha) in files.items() if name != bundle.FACTS}
            )
        else:
            shutil.copyfile(folder / bundle.SUMS, part / bundle.SUMS)
        part.rename(into)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"{into}: {sum(x.stat().st_size for x in into.rglob('*') if x.is_file()) / 2**20:.0f} MiB")
    return 0


def _graph(folder: Path) -> dict[str, tuple[Path, str]]:
    """The files of a part's graph, each with its sha256. Raises Refused."""
    if not (folder / "graph.json").is_file():
        raise Refused(f"{folder}: got no graph, allowed: a bundle where it was made, in results/bundles")
    listed = record.held(folder / "graph.json")["files"]
    return {x: (folder / x, listed[x]) for x in (*GRAPH, "contract.json") if x in listed}
