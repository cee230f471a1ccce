# The plan, and functions that rules take their inputs, keys and records from. No rules here.
import os
import sys
from pathlib import Path

BASE = Path(str(workflow.current_basedir)).parents[1]
# A job's command finds the package and this interpreter also when this workflow is a module of another one.
os.environ["PYTHONPATH"] = str(BASE / "workflow")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
if str(BASE / "workflow") not in sys.path:
    sys.path.insert(0, str(BASE / "workflow"))

from kvgate import keys, preflight, progress, sweep
from kvgate.config import ConfigError
from kvgate.contract import canonical
from kvgate.job import RECORDS
from kvgate.plan import Plan

try:
    PLAN = Plan(BASE, config)
except (ConfigError, ValueError) as error:
    sys.exit(f"kvgate: {error}")  # one line; a WorkflowError would add a trace


BEGUN = []  # holds something once the first rule was asked for its inputs


def record(stage):
    return f"results/{RECORDS[stage]}"


def records(stage):
    return lambda w: [
        f"results/{node.record}" for node in PLAN.of_stage(stage) if begin()
    ]


def inputs(stage):
    return lambda w: [f"results/{path}" for path in node(stage, w).reads if begin()]


def node(stage, wildcards):
    try:
        return PLAN.node(stage, dict(wildcards))
    except ConfigError as error:  # a target of the user's
        sys.exit(f"kvgate: {error}")


def key(stage):
    return lambda w: keys.pack(PLAN.node(stage, dict(w)).key)


def log_of(stage):
    return f"results/logs/{RECORDS[stage].removesuffix('.json')}.log"


def command(stage):
    return f"python -m kvgate {stage} {{params.key:q}} --log {{log:q}}"


def build_mb(w):
    return PLAN.config["models"][w.model]["build_mb"]


def begin():
    """Once: say what there is to do, and let our own comparison of keys decide what is stale.

    Snakemake compares a key only with what its own metadata remembers: a lost .snakemake, a restored file or results
    from elsewhere would pass as current. The records themselves hold their keys, so a stale one is forced.
    """
    if BEGUN or not workflow.is_main_process:
        return True
    BEGUN.append(True)
    results = Path("results")
    stale = progress.stale(PLAN, results)
    # Missing ones too: else a removed record between two that exist would not be made again.
    workflow.dag.forcefiles.update(f"results/{path}" for path in stale)
    # One whole row early: a mistake shows after minutes, not hours. With it the exporters' rows, whose builds take
    # several times as long as any other: begun last, one of them would run alone at the end.
    first = next((row for row in PLAN.rows if row.quant == "fp16"), PLAN.rows[0])
    early = [
        first,
        *(
            r
            for r in PLAN.rows
            if PLAN.config["strategies"][r.strategy]["form"] == "exporter"
        ),
    ]
    workflow.dag.priorityfiles.update(
        f"results/{PLAN.node('judge', row.wildcards()).record}" for row in early
    )
    lines = progress.begin(PLAN, stale, results, write=not workflow.dryrun)
    problem = preflight.problem()
    print(
        "\n".join([*lines, *([f"kvgate: {problem}"] if problem else [])]),
        file=sys.stderr,
    )
    return True


# One job at a time on a board, boards side by side: a resource a device, of which there is one. Entries of one device,
# say for its two engines, share it.
BOARDS = {
    f"board_{n}": lambda w, names=names: int(w.backend in names)
    for n, names in enumerate(sweep.devices(PLAN.config))
}
for name in BOARDS:
    workflow.global_resources.setdefault(name, 1)
if "mem_mb" not in workflow.global_resources:
    workflow.global_resources["mem_mb"] = (
        PLAN.config["limits"]["memory_mb"] or int(preflight.memory() * 0.9) >> 20
    )


wildcard_constraints:
    **{
        name: "[^/]+"
        for name in ("model", "program", "weights", "form", "strategy", "part")
    },
    **{name: "[^/]+" for name in ("platform", "quant", "backend", "sweep")},
