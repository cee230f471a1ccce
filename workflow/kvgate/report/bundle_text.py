"""What a bundle says of itself in words: its README, its requirements, and the programs in its folder."""

from datetime import date

from kvgate.jobs.rows import ONNXRUNTIME, SIMULATOR
from kvgate.judging import behaviour, measures
from kvgate.judging.records import Verdict
from kvgate.judging.wording import TIMES
from kvgate.report import columns
from kvgate.report.bundle_row import Facts

_ENTRY = """\
import os
import signal
import sys

usual = signal.getsignal(signal.SIGINT)
if usual is signal.default_int_handler:  # ctrl-C while modules are loaded: no trace
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from pathlib import Path  # noqa: E402

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
sys.dont_write_bytecode = True  # the folder stays what SHA256SUMS says
try:
    from kvgate.serving.{program} import main
except Exception as error:  # of numpy, or of a file of this folder
    raise SystemExit("{program}: {{}}: {{}}".format(type(error).__name__, " ".join(str(error).split()))) from None

signal.signal(signal.SIGINT, usual)
sys.exit(main(sys.argv[1:], FOLDER))
"""
# Columns of the table behind the measures' own, and their words.
_COSTS = {
    "cpu_operators": "operators left to the CPU",
    "predicted_cycles": "predicted Mcycles a token",
    "predicted_traffic_bytes": "predicted traffic, MiB a token",
    "artifact_bytes": "artifact, MiB",
    "tokens_per_second": "tokens a second, measured",
    **{f"{name}_ms": f"{name.replace('_', ' ')}, ms, measured" for name in TIMES},
    "clock_state": "clocks",
}


def entry(program: str) -> str:
    """A program of the folder: `generate` or `serve`."""
    return _ENTRY.format(program=program)


def requirements(facts: Facts) -> str:
    lines = ["numpy>=1.21", "tokenizers>=0.20", "jinja2>=3.1.6"]
    if facts["artifact"] == "model.rknn":
        lines += [f'rknn-toolkit-lite2=={facts["toolkit"]}; platform_machine == "aarch64"']
        lines += ['onnxruntime>=1.17; platform_machine != "aarch64"']
    else:
        lines += ["onnxruntime>=1.17"]
    return "\n".join(lines) + "\n"


def readme(verdict: Verdict, facts: Facts, capacity: int, licence: str, day: date | None = None) -> str:
    """README.md: the row's numbers, and how to run it. day: that the chat template is told, where it asks for one."""
    row, chip = facts["row"], facts["artifact"] == "model.rknn"
    risks = "".join(f"- {text}\n" for text in verdict["risks"])
    seen = f"\nSeen right on a PC and wrong on boards:\n\n{risks}" if risks else ""
    figures = {name: words for of in measures.every() for name, words in of.bundle.items()} | _COSTS
    cells = zip(figures.values(), columns.cells(verdict, list(figures), people=True), strict=True)
    numbers = "\n".join(f"| {title} | {cell} |" for title, cell in cells if cell)
    where = f"On the board ({row['platform']}), in this folder" if chip else "In this folder"
    pc = """
On a PC (x86-64) `generate.py` and `serve.py` run the graph in ONNX Runtime, not the artifact, where they find it: while
this folder lies in the `results` that it was made in, and in a copy that was made there with the graph:

```
python -m kvgate bundle THIS_FOLDER NEW_FOLDER --with-graph
```
"""
    return f"""# {row["model"]}: {row["strategy"]}, {row["quant"]}, {row["platform"]}

{_standing(verdict, row["backend"])}
{seen}
| | |
|---|---|
| context, tokens | {capacity} |
{numbers}

Errors are normalized L2 against the model in float32. `verdict.json` has every figure.

## Run

{where}:

```
sha256sum -c SHA256SUMS
pip install -r requirements.txt
python3 generate.py "What is the capital of France?"
python3 generate.py --chat
python3 serve.py --port 8000
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "What is the capital of France?"}}], "stream": true}}'
```
{pc if chip else ""}
- Python 3.9 or newer. Without `tokenizers` and `jinja2` token ids work: `python3 generate.py --ids 1,2,3`.
- Tokens are greedy; `--temperature`, `--top-k`, `--top-p`, `--min-p` and `--seed`, or the fields of a request, draw
  them. What a message spells is plain text: only the chat template makes special tokens.
- A conversation has at most {capacity} tokens, the answer among them. {_prompt(verdict, facts)} What it begins with in
  common with an earlier one is kept (`--keep`, MiB).{_day(day)}{_pieces(facts)}
- What cannot be opened, a damaged file or a runtime's own failure, is one line on stderr and exit code 1.
- `serve.py` answers one request at a time and listens on this machine only. For others: `--host 0.0.0.0` with
  `--api-key-file FILE`; for web pages: `--allow-origin ORIGIN`; for clients with a fixed model name: `--alias NAME`.
- Weights: licence {licence}. Code below `kvgate/`: Apache-2.0.
"""


def _prompt(verdict: Verdict, facts: Facts) -> str:
    tokens = verdict["figures"].get("prefill_tokens")
    if not facts["parts"] or not tokens:
        return "A prompt is read one token a step."
    return f"`prefill/` reads a prompt {tokens} tokens a step, the last one by itself."


def _pieces(facts: Facts) -> str:
    if not facts["pieces"]:
        return ""
    names = ", ".join(f"`{x['part']}/`" for x in facts["pieces"])
    return f"\n- The decoder is in {len(facts['pieces'])} artifacts, which run in this order: {names}."


def _day(day: date | None) -> str:
    if day is None:
        return ""
    return f"\n- The chat template asks for the date. It is told {day:%d %B %Y}, as in the reference, whatever the day."


def _standing(verdict: Verdict, backend: str) -> str:
    """How good the row is, in its README's first lines."""
    if behaviour.ships(verdict) != "behaves":
        return f"Verdict **{verdict['verdict']}** {_judge(backend)}: {verdict['reason']}."
    ratio, top1 = columns.cells(verdict, ["perplexity_ratio", "top1_text"], people=True)
    chats = any(gate["name"] == "tokens" for gate in verdict["gates"])
    answers = "its chats give the reference's tokens but for near ties" if chats else "no chat was tried"
    return f"""**Red by the gates, behaves** {_judge(backend)}: over texts, with its own cache, the perplexity
is {ratio} times the reference's, the best token the reference's in {top1} of the steps; {answers}.
By the gates it is **{verdict["verdict"]}**: {verdict["reason"]}."""


def _judge(backend: str) -> str:
    if backend == SIMULATOR:
        return "in the toolkit's simulator, which is no board"
    return f"in {backend}, which is no board" if backend.startswith(ONNXRUNTIME) else f"on the board {backend}"
