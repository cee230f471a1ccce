"""`python -m kvgate`: one command a stage, called by the workflow, and the commands for people."""

import argparse
import os
import signal
import sys
from pathlib import Path

from kvgate.planning.config import ConfigError, override

BASE = Path(__file__).parents[2]
STAGES = {
    "fetch": "take a model from its source into a plain checkpoint folder",
    "trace": "the reference: tokens, logits and every K/V by whole-prefix recomputation",
    "prepare": "the matrices that the graphs read, in one file",
    "export": "write the graph of a strategy, its contract and host tables",
    "check": "hold the graph to the reference in ONNX Runtime",
    "build": "compile for a chip and simulate, in a child process",
    "probe": "compile the self-test graphs of boards for a chip",
    "selftest": "run the self tests on a board",
    "run": "run a row on a board",
    "verify": "compare observations with the reference",
    "judge": "metrics and thresholds to a verdict",
    "accuracy": "the toolkit's accuracy analysis of a row's worst step, for its diagnosis",
    "diagnose": "explain one row by layer, step and tensor, with a heat map",
    "tabulate": "all verdicts of a sweep to one table, and the bundles",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvgate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for stage, text in STAGES.items():
        command = commands.add_parser(stage, help=f"{text} (run by snakemake)")
        command.add_argument("key", help="the job's key, as snakemake -p shows it")
        command.add_argument("--log", type=Path, help="write what the stage prints here")
        command.add_argument("--needs", type=int, default=0, metavar="MB", help="what the job takes at its peak")
        command.add_argument("--memory", type=int, default=0, metavar="MB", help="what this machine has; 0: any")
        _folders(command)
    table = commands.add_parser("table", help="print the rows there are, also while a run goes on")
    ask = commands.add_parser("ask", help="what the row to ship answers, through its bundle on this PC")
    ask.add_argument("prompt", nargs="?", default="", help="default: What is the capital of France?")
    gate = commands.add_parser("gate", help="exit with 1 when a required row is not pass")
    audit = commands.add_parser("audit", help="list results that are not what would be planned now")
    what = audit.add_mutually_exclusive_group()
    what.add_argument("--adopt", action="store_true", help="date verified results in order, so that they count as made")
    what.add_argument("--discard", action="store_true", help="remove stale results, so that they are made again")
    audit.add_argument("--deep", action="store_true", help="also read every large file and compare its sha256")
    for command in (gate, audit, table, ask):
        command.add_argument("--config", default="", help="what goes over the config files (set by snakemake)")
        _configfile(command, "as snakemake's")
        _folders(command)
    store = commands.add_parser("store", help="size of the store of finished builds; prune it")
    store.add_argument("--prune", type=float, metavar="GB", help="remove the longest unused entries beyond this size")
    _folders(store)
    bench = commands.add_parser("bench", help="what a sweep costs, and our graphs beside today's ways")
    bench.add_argument("--board", default="", help="only what this board of the config costs beside its own work")
    _configfile(bench, "as snakemake's; with --board")
    _folders(bench)
    copied = commands.add_parser("bundle", help="a checked copy of a bundle in a folder of yours")
    copied.add_argument("folder", type=Path, help="the bundle, in results/bundles")
    copied.add_argument("into", type=Path, help="a folder that is not there yet")
    copied.add_argument("--with-graph", action="store_true", help="with the graph and its weights: runs on any PC")
    commands.add_parser("preflight", help="whether this machine can run the toolkit")
    args = parser.parse_args(argv)
    if args.command == "ask" and not args.prompt and args.configfile and not args.configfile[-1].exists():
        args.prompt = str(args.configfile.pop())  # the question, after the files
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except (ConfigError, ValueError) as error:
        print(f"kvgate {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `table | head`: nobody reads on, nor what is left in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"kvgate {args.command}: {where}{error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _configfile(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--configfile", type=Path, nargs="+", action="extend", default=[], help=text)


def _folders(command: argparse.ArgumentParser) -> None:
    command.add_argument("--results", type=Path, default=Path("results"), help="results folder (default: results)")
    command.add_argument(
        "--base", type=Path, default=BASE, help="the folder that texts are relative to (default: the repository)"
    )


def _run(args: argparse.Namespace) -> int:
    if args.command in STAGES:
        from kvgate.jobs import machine, runner

        return runner.run(
            args.command, args.key, args.results, args.base, args.log, machine.room(args.needs, args.memory)
        )
    if args.command == "preflight":
        from kvgate.tools import preflight

        print("\n".join(preflight.lines()))
        problem = preflight.problem()
        if problem:
            print(f"kvgate preflight: {problem}", file=sys.stderr)
        return 1 if problem else 0
    if args.command == "store":
        from kvgate.jobs import store

        return store.main(args.results, args.prune)
    if args.command == "bundle":
        from kvgate.report import bundle_copy

        return bundle_copy.main(args.folder, args.into, args.with_graph)
    from kvgate.planning import plan  # the stages, one process a job, do without

    if args.command == "bench":
        from kvgate.tools import bench

        if args.board:
            return bench.board(plan.Plan(args.base, override(args.configfile, "")), args.results, args.board)
        return bench.main(args.base, args.results)
    planned = plan.Plan(args.base, override(args.configfile, args.config), args.results)
    if args.command == "audit":
        from kvgate.planning import audit

        return audit.main(planned, args.results, args.adopt, args.discard, args.deep)
    if args.command == "ask":
        from kvgate.report import ask

        return ask.main(args.results, planned.name, planned.rows, planned.config["sweep"]["bundle"], args.prompt)
    from kvgate.planning import audit
    from kvgate.report import table

    sweep, outdated = planned.config["sweep"], audit.outdated(planned, args.results)
    if args.command == "gate":
        return table.gate(args.results, planned.rows, sweep["require"], outdated)
    return table.main(args.results, planned.name, planned.rows, sweep["bundle"], outdated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
