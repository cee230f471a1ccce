"""tabulate: all verdicts of a sweep -> acceptance.tsv, acceptance.md and acceptance.json, and the folders to ship.

A folder below ship/{sweep} for each row that passes or warns: hard links to the artifact, both contracts, host.npz and
the tokenizer. Folders of this sweep's rows that no longer do are removed, and the store is cut to its limit.
"""

from pathlib import Path
from typing import Any

from kvgate import record, store, table
from kvgate.columns import COLUMNS, UNITS
from kvgate.job import Job, record_path

TAKES_BLOCKED = True
NAMES = [name for name, _, _ in COLUMNS]


def run(job: Job) -> dict[str, Any]:
    """The body has the rows (column -> raw cell), the counts, and `announce`: what the terminal shows at the end."""
    sweep = job.wildcards["sweep"]
    verdicts = [job.read(label) for label in job.inputs]
    rows = [table.cells(v, NAMES, people=False) for v in verdicts]
    tsv = "\n".join("\t".join(cells) for cells in [NAMES, *rows]) + "\n"
    record.write_bytes(job.folder / "acceptance.tsv", tsv.encode())
    record.write_bytes(job.folder / "acceptance.md", _markdown(sweep, verdicts).encode())
    shown = Path(job.results.name)  # no absolute path in a record
    shipped = ship(job.results, sweep, verdicts)
    store.prune(job.results, job.config["store_gb"])
    return {
        "files": {name: record.sha256(job.folder / name) for name in ("acceptance.tsv", "acceptance.md")},
        "rows": [dict(zip(NAMES, cells, strict=True)) for cells in rows],
        "counts": {name: sum(v["verdict"] == name for v in verdicts) for name in table.VERDICTS},
        "shipped": shipped,
        "announce": f"\n{table.compact(verdicts)}\n{table.summary(shown, sweep, verdicts, len(verdicts))}",
    }


def _markdown(sweep: str, verdicts: list[dict[str, Any]]) -> str:
    counts = ", ".join(f"{sum(v['verdict'] == name for v in verdicts)} {name}" for name in table.VERDICTS)
    titles = [UNITS[name][0] if name in UNITS else name.replace("_", " ") for name in NAMES]
    lines = [f"# Sweep {sweep}: {counts}", "", "L2 is normalized, in percent. Cycles and traffic are predicted by the"]
    lines[-1] += " compiler. Raw values: acceptance.tsv. Where a gate broke: the row's verdict.json."
    lines += ["", _row(titles), _row(["---"] * len(titles))]
    lines += [_row(table.cells(v, NAMES, people=True)) for v in verdicts]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def ship(results: Path, sweep: str, verdicts: list[dict[str, Any]]) -> list[str]:
    """Links for every row that ships, nothing else below ship/{sweep}. Returns the folders, relative to `results`."""
    root = results / "ship" / sweep
    wanted = {}
    for v in verdicts:
        if table.ships(v):
            wanted[root / table.ship_name(v["row"])] = _files(results, v["row"])
    keep = {folder / name for folder, files in wanted.items() for name in files}
    for found in sorted(root.rglob("*"), reverse=True) if root.exists() else []:
        if found.is_dir() and not found.is_symlink():
            if not any(found.iterdir()):
                found.rmdir()
        elif found not in keep:
            found.unlink()
    for folder, files in wanted.items():
        for name, source in files.items():
            target = folder / name
            if not (target.exists() and target.samefile(source)):
                record.link(source, target)
    return sorted(str(folder.relative_to(results)) for folder in wanted)


def _files(results: Path, row: dict[str, str]) -> dict[str, Path]:
    """Names in the shipped folder -> files. Raises FileNotFoundError where the artifact or its contract is gone."""
    names = row | {"part": "decode"}
    artifact, graph, checkpoint = (
        (results / record_path(stage, names)).parent for stage in ("build", "export", "fetch")
    )
    found = {"model.rknn": artifact / "model.rknn", "contract.json": artifact / "contract.json"}
    found |= {"graph_contract.json": graph / "contract.json", "host.npz": graph / "host.npz"}
    found["verdict.json"] = table.path(results, row)
    for file in sorted(checkpoint.iterdir()):
        tokenizer = file.name in ("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")
        if file.is_file() and (tokenizer or any(x in file.name for x in ("token", "spiece"))):
            found[file.name] = file
    return found
