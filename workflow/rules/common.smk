# The plan, and functions that rules take their inputs, keys and records from. No rules here.
import gc
import os
import shlex
import sys
from pathlib import Path

BASE = Path(str(workflow.current_basedir)).parents[1]
# A job's command finds the package and this interpreter also when this workflow is a module of another one.
os.environ["PYTHONPATH"] = str(BASE / "workflow")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
if str(BASE / "workflow") not in sys.path:
    sys.path.insert(0, str(BASE / "workflow"))

from snakemake.logging import logger
from snakemake.settings.types import Quietness

from kvgate.contract import canonical
from kvgate.jobs import keys
from kvgate.jobs.job import RECORDS
from kvgate.planning import audit, memory, sweep
from kvgate.planning.config import ConfigError
from kvgate.planning.plan import Plan
from kvgate.planning import progress
from kvgate.report import workflow_lines
from kvgate.tools import preflight

# A graph of 3,000 jobs is millions of objects that stay: looking for garbage among them is in vain.
gc.set_threshold(100_000, *gc.get_threshold()[1:])


def moved(path):
    """Where another workflow, whose module this one is, wants a path of ours: its `prefix` or `replace_prefix`."""
    return str(workflow.modifier.path_modifier.replace_prefix(path))


RESULTS = moved("results/.").removesuffix("/.")
if any(moved(f"results/{path}") != f"{RESULTS}/{path}" for path in RECORDS.values()):
    sys.exit("kvgate: replace_prefix: got a part of results, allowed: the whole folder")
# A module's Snakefile is read again for each `use rule x from it as ... with`: what there is to say, the first says.
COPIES = workflow.__dict__.setdefault("kvgate", [])
FIRST = RESULTS not in COPIES
if not FIRST and workflow.modifier.rule_whitelist is None:
    sys.exit(
        f"kvgate: this workflow uses it twice for {RESULTS}: give each module a prefix of its own"
    )
COPIES.append(RESULTS)

try:
    PLAN = Plan(BASE, config, Path(RESULTS))
except (ConfigError, ValueError) as error:
    sys.exit(f"kvgate: {error}")  # one line; a WorkflowError would add a trace
STALE = {}  # what our own comparison asks for, by record
BEGUN = []  # holds something once the first rule was asked for its inputs


def record(stage):
    return f"results/{RECORDS[stage]}"


def records(stage):
    return lambda w: begin() and [
        f"results/{node.record}" for node in PLAN.of_stage(stage)
    ]


def inputs(stage):
    return lambda w: begin() and [f"results/{path}" for path in node(stage, w).reads]


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
    sized = f" --needs {{resources.needs_mb}} --memory {int(preflight.memory()) >> 20}"
    return f"{program(stage)} {{params.key:q}} --log {{log:q}}" + (
        sized if stage in memory.STAGES else ""
    )


def asking(name):
    """A command that asks about the sweep, prints what it finds, and ends as it ends."""
    return f"{program(name)} --config {{params.config:q}} 2>&1 | tee {{log:q}}; exit ${{{{PIPESTATUS[0]}}}}"


def program(name):
    folder = shlex.quote(RESULTS).replace("{", "{{").replace("}", "}}")
    return f"python -m kvgate {name} --results {folder}"


def needs(stage):
    """What a stage takes at its peak: the same twice, as Snakemake cuts `mem_mb` off where a job is alone too large."""

    def asked(w, input):
        try:
            return memory.needed(stage, dict(w), PLAN.config, Path(RESULTS))
        except (
            FileNotFoundError
        ) as error:  # of a file that Snakemake knows: it asks again when that is made
            raise FileNotFoundError(
                error.errno, error.strerror, str(input[0])
            ) from None

    return {"mem_mb": asked, "needs_mb": asked}


def build_mb(w):
    return PLAN.config["models"][w.model]["build_mb"]


def begin():
    """Once: let our own comparison of keys decide what is stale.

    Snakemake compares a key only with what its own metadata remembers: a lost .snakemake, a restored file or results
    from elsewhere would pass as current. The records themselves hold their keys, so a stale one is forced.
    """
    if BEGUN or not FIRST or not workflow.is_main_process:
        return True
    BEGUN.append(True)
    STALE.update(progress.stale(PLAN, Path(RESULTS)))
    dated = 0 if workflow.dryrun else audit.redate(PLAN, Path(RESULTS), STALE)
    if dated:
        print(
            f"kvgate: results were dated in the future: {dated} dated in order",
            file=sys.stderr,
        )
    # Missing ones too: else a removed record between two that exist would not be made again.
    workflow.dag.forcefiles.update(f"{RESULTS}/{path}" for path in STALE)
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
        f"{RESULTS}/{PLAN.node('judge', row.wildcards()).record}" for row in early
    )
    return True


def planned():
    """Lines on the jobs that this run will run, which is Snakemake's word; why, ours where we have one."""
    needed = {path: job for job in workflow.dag.needrun_jobs() for path in job.output}
    todo = {}
    for node in PLAN.made():
        job = needed.get(f"{RESULTS}/{node.record}")
        if job:
            others = (node, workflow_lines.reasons(workflow.dag.reason(job)))
            todo[node.record] = STALE.get(node.record, others)
    write = not (workflow.dryrun or workflow.touch)
    lines = progress.begin(PLAN, todo, Path(RESULTS), write)
    problem = preflight.problem()
    return [*lines, *([f"kvgate: {problem}"] if problem else [])]


if FIRST and workflow.is_main_process:
    # As a module it is a guest: the other workflow's lines stay.
    settings = workflow.output_settings
    alone = not settings.verbose and Quietness.PROGRESS in (settings.quiet or ())
    workflow_lines.Lines(planned, alone and workflow.modifier.namespace is None).attach(
        logger
    )


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
