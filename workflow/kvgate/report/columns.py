"""The columns of the table, their order and how people read them, and a row in one line. Standard library only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvgate.judging import behaviour
from kvgate.judging.wording import TIMES, percent

STEPS = ("0", "1", "2", "3", "16", "end")  # generated steps, as compare.TOKEN_STEPS has them


def _get(*path: str) -> Callable[[Mapping[str, Any]], Any]:
    def get(verdict: Mapping[str, Any]) -> Any:
        value: Any = verdict
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    return get


def _verdict(verdict: Mapping[str, Any]) -> str:
    return f"{verdict['verdict']} (stale)" if verdict.get("stale") else str(verdict["verdict"])


def _cpu(verdict: Mapping[str, Any]) -> Any:
    found = _get("figures", "cpu_operators")(verdict)
    return None if found is None else sum(found.values())


def _top1(verdict: Mapping[str, Any]) -> str | None:
    f = verdict["figures"]
    return f"{f['top1_equal']}/{f['top1_of']}" if f.get("top1_of") else None


def _behaves(verdict: Mapping[str, Any]) -> str | None:
    found = _get("figures", "behaviour", "behaves")(verdict)
    return None if found is None else "yes" if found else "no"


def _risks(verdict: Mapping[str, Any]) -> str:
    return "; ".join(verdict["risks"])


def _mib(value: float) -> str:
    return f"{value / 2**20:.1f}"


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Column = tuple[str, Callable[[Mapping[str, Any]], Any], Callable[[Any], str]]

# Name in the .tsv (raw values), where it is in a verdict, how people read it (.md). Ratios are shown in percent.
COLUMNS: tuple[Column, ...] = (
    *((name, _get("row", name), str) for name in ("model", "weights", "strategy")),
    ("form", _get("figures", "form"), str),
    *((name, _get("row", name), str) for name in ("platform", "quant")),
    ("dtype", _get("figures", "dtype"), str),  # as the artifact was built, whatever the quant's name
    ("backend", _get("row", "backend"), str),
    ("verdict", _verdict, str),
    ("reason", _get("reason"), str),
    ("kv_l2_median", _get("figures", "kv_median"), percent),
    ("kv_l2_worst", _get("figures", "kv_worst", "value"), percent),
    ("kv_l2_over_1_percent", _get("figures", "kv_over"), percent),
    ("kv_worst_layer", _get("figures", "kv_worst", "layer"), str),
    ("kv_worst_tensor", _get("figures", "kv_worst", "tensor"), str),
    ("kv_worst_position", _get("figures", "kv_worst", "position"), str),
    ("kv_worst_history", _get("figures", "kv_worst", "history"), str),
    ("state_l2_median", _get("figures", "state_median"), percent),
    ("state_l2_worst", _get("figures", "state_worst", "value"), percent),
    ("state_worst", _get("figures", "state_worst", "state"), str),
    ("state_worst_position", _get("figures", "state_worst", "position"), str),
    ("logits_l2_median", _get("figures", "logits_median"), percent),
    ("logits_l2_worst", _get("figures", "logits_worst", "value"), percent),
    ("logits_raw_l2_median", _get("figures", "raw_median"), percent),
    ("logits_raw_l2_worst", _get("figures", "raw_worst", "value"), percent),
    ("kv_l2_float16", _get("figures", "float16", "kv_l2"), percent),
    ("state_l2_float16", _get("figures", "float16", "state_l2"), percent),
    ("logits_l2_float16", _get("figures", "float16", "logits_l2"), percent),
    ("sqnr_db", _get("figures", "sqnr_db"), lambda v: f"{v:.1f}"),
    ("top1", _top1, str),
    *((f"tokens_{n}", _get("figures", "tokens", n), str) for n in STEPS),
    ("diverged_program", _get("figures", "diverged", "program"), str),
    ("diverged_step", _get("figures", "diverged", "step"), str),
    ("diverged_margin", _get("figures", "diverged", "margin"), _text),
    ("diverged_error", _get("figures", "diverged", "error"), _text),
    ("behaves", _behaves, str),
    ("ships", lambda v: behaviour.ships(v) or None, str),
    ("perplexity", _get("figures", "behaviour", "perplexity"), _text),
    ("perplexity_reference", _get("figures", "behaviour", "reference"), _text),
    ("perplexity_ratio", _get("figures", "behaviour", "ratio"), lambda v: f"{v:.3f}"),
    ("kl", _get("figures", "behaviour", "kl"), _text),
    ("top1_text", _get("figures", "behaviour", "top1"), percent),
    ("cpu_operators", _cpu, str),
    ("rows", _get("figures", "rows"), str),
    ("predicted_cycles", _get("figures", "cycles"), str),
    ("first_token_cycles", _get("figures", "first_token_cycles"), str),
    ("prefill_tokens", _get("figures", "prefill_tokens"), str),
    ("predicted_traffic_bytes", _get("figures", "traffic_bytes"), str),
    ("weight_bytes", _get("figures", "weight_bytes"), str),
    ("history_bytes", _get("figures", "history_bytes"), str),
    ("delta_bytes", _get("figures", "delta_bytes"), str),
    ("artifact_bytes", _get("figures", "artifact_bytes"), str),
    ("simulator", _get("figures", "simulator_verdict"), str),
    ("tokens_per_second", _get("figures", "tokens_per_second"), lambda v: f"{v:.2f}"),
    *((f"{name}_ms", _get("figures", f"{name}_ms"), lambda v: f"{v:.2f}") for name in TIMES),
    ("clock_state", _get("figures", "clock_state"), str),
    ("risks", _risks, str),
)

# The columns that differ in the .md: a title with the unit, and the value in it.
UNITS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "predicted_cycles": ("predicted Mcycles a token", lambda v: f"{v / 1e6:.1f}"),
    "first_token_cycles": ("predicted Mcycles to the first token of a prompt of 64", lambda v: f"{v / 1e6:.0f}"),
    "predicted_traffic_bytes": ("predicted traffic MiB a token", _mib),
    "weight_bytes": ("weights MiB", _mib),
    "history_bytes": ("history KiB a step", lambda v: f"{v / 1024:.0f}"),
    "delta_bytes": ("returned K/V KiB a step", lambda v: f"{v / 1024:.0f}"),
    "artifact_bytes": ("artifact MiB", _mib),
}


# Columns that a table has only where a row has something there.
_OPTIONAL = tuple(name for name, _, _ in COLUMNS if name.startswith("state_"))


def names(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table of these rows."""
    empty = [name for name in _OPTIONAL if not any(any(cells(v, [name], people=False)) for v in verdicts)]
    return [name for name, _, _ in COLUMNS if name not in empty]


def cells(verdict: Mapping[str, Any], names: Sequence[str], people: bool) -> list[str]:
    """A row's cells. people: rounded and in the units of the .md; else raw, with 6 significant digits. None: empty."""
    known = {name: (get, form) for name, get, form in COLUMNS}
    found = []
    for name in names:
        get, form = known[name]
        value = get(verdict)
        if not people:
            form = str
        elif name in UNITS:
            form = UNITS[name][1]
        found.append("" if value is None else " ".join(form(value).split()))
    return found


def name(row: Mapping[str, str]) -> str:
    """A row's name in a sentence: `smollm2-135m int8 cpu_managed w8a8 rk3576 (simulator)`, plain weights unsaid."""
    weights = "" if row["weights"] == "plain" else f" {row['weights']}"
    return f"{row['model']}{weights} {row['strategy']} {row['quant']} {row['platform']} ({row['backend']})"


def line(verdict: Mapping[str, Any]) -> str:
    """A row in one line, as it finishes: `pass    tiny cpu_managed fp16 rk3576 (simulator): all 9 gates hold`."""
    return f"{verdict['verdict']:<7} {name(verdict['row'])}: {verdict['reason']}"
