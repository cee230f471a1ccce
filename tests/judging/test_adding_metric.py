"""A metric is a file in `judging/measures`, and its limits: nothing else is touched."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvgate.judging import measures
from kvgate.judging.measure import Measure
from kvgate.report import columns

ROOT = Path(__file__).parents[2]
NEW = '''
"""Word errors: tokens of the free run to be put in, left out or exchanged, of the reference's."""

from kvgate.judging.column import Column, figure
from kvgate.judging.gate import FREE, Gate, level
from kvgate.judging.measure import Measure
from kvgate.judging.records import finding
from kvgate.judging.wording import percent

THRESHOLDS = {"word_errors": {"$ref": "#/$defs/levels", "description": "Edits of the free run's tokens."}}


def program(whole):
    if "free/tokens" not in whole.seen:
        return {"word_errors": None}
    got, want = whole.seen["free/tokens"].tolist(), whole.trace.tokens[whole.trace.prompt :].tolist()
    row = list(range(len(want) + 1))
    for n, token in enumerate(got):
        before, row = row, [n + 1]
        for m, other in enumerate(want):
            row.append(min(row[m] + 1, before[m + 1] + 1, before[m] + (token != other)))
    return {"word_errors": {"edits": row[-1], "of": len(want)}}


def gate(program, metrics, thresholds):
    found = metrics["word_errors"]
    if found is None:
        return []
    value, limits = found["edits"] / found["of"], thresholds["word_errors"]
    verdict = level(value, limits)
    at = metrics["free"]["diverged"]
    first = {"step": at["position"], "position": at["position"]} if verdict != "pass" and at else {}
    text = f"word errors {percent(value)}, allowed {percent(limits['pass'])}"
    return [Gate("word_errors", verdict, text, program, FREE, value, first)]


def check(body, arrays, limit):
    edits = (body["word_errors"] or {"edits": 0})["edits"]
    said = finding("differs", f"free: {edits} word errors", gate="word_errors", history=FREE)
    return {"word_errors": edits}, [said] if edits else []


def figures(row):
    found = [m["word_errors"] for m in row.metrics.values() if m["word_errors"]]
    return {"word_errors": sum(x["edits"] for x in found) / sum(x["of"] for x in found)} if found else {}


MEASURE = Measure(
    name="word_errors",
    order=65,
    program=program,
    gate_program=gate,
    check=check,
    figures=figures,
    columns=(Column("word_errors", figure("word_errors"), percent),),
    optional=True,
    terminal={"word_errors": "WER"},
    bundle={"word_errors": "word errors"},
    words={"`word_errors`": "edits of the free run's tokens, of the reference's"},
)
'''
LIMITS = {"word_errors": {"pass": 0.05, "warn": 0.1}}
# What a copy of the package says, as JSON. argv: a folder, the limits of the config.
JUDGED = """
import json, sys
from pathlib import Path
import numpy as np, synthetic
from kvgate.jobs import record
from kvgate.judging import compare
from kvgate.report import bundle_text
folder, limits = Path(sys.argv[1]), synthetic.THRESHOLDS | json.loads(sys.argv[2])
of = synthetic.trace()
def row(name, seen):
    results = synthetic.Results(folder / name)
    results.verify("capital", of, seen)
    found = {"verdict": results.judge(limits), "metrics": record.read(results.path("verify"))["programs"]["capital"]}
    found["table"] = synthetic.tabulated(folder / name, [synthetic.ROW])
    facts = {"row": synthetic.ROW, "artifact": "model.onnx", "parts": {}, "pieces": []}
    found["readme"] = bundle_text.readme(found["verdict"], facts, 23, "none")
    return found
right, wrong = synthetic.observation(of), synthetic.observation(of)
wrong["free/tokens"][3] += 1
wrong["free/diverged"] = np.array(3)
body = {"right": row("right", right), "wrong": row("wrong", wrong)}
body["check"] = compare.differences(synthetic.contract(), of, wrong)
print(json.dumps(body))
"""
KEYS = """
import json, sys
from pathlib import Path
import yaml
from kvgate.planning import config, config_page, plan
base, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
tiny = yaml.safe_load((base / "tests/workflow/tiny.yaml").read_text())
try:
    nodes = plan.Plan(base, tiny | {"thresholds": limits}).nodes()
    codes = {x.stage: json.loads(x.key)["code"]["digest"] for x in nodes}
    print(json.dumps({"codes": codes, "page": config_page.render()}))
except config.ConfigError as why:
    print(json.dumps({"error": str(why)}))
"""


class Package:
    """A copy of the package, as a user's checkout has it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "workflow", root / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "LICENSE", root)

    def add(self, text: str = NEW) -> None:
        (self.root / "workflow/kvgate/judging/measures/word_errors.py").write_text(text)

    def run(self, program: str, *args: Any) -> Any:
        paths = f"{self.root / 'workflow'}{os.pathsep}{ROOT / 'tests'}"
        env = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def planned(self, limits: dict[str, Any]) -> dict[str, Any]:
        return self.run(KEYS, str(ROOT), json.dumps(limits))


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path / "checkout")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A right row and one with another token, of a package with the new file, and without it."""
    root = tmp_path_factory.mktemp("adding")
    found = Package(root / "checkout")
    before = found.run(JUDGED, str(root / "before"), "{}")
    found.add()
    return {"before": before, **found.run(JUDGED, str(root / "after"), json.dumps(LIMITS))}


def test_it_is_in_metrics_json_beside_what_was_there(judged):
    for name, edits in (("right", 0), ("wrong", 1)):
        metrics = judged[name]["metrics"]
        assert metrics["word_errors"] == {"edits": edits, "of": 19}
        del metrics["word_errors"]
        assert metrics == judged["before"][name]["metrics"]


def test_it_gates_in_its_order(judged):
    gates = [x["name"] for x in judged["right"]["verdict"]["gates"]]
    assert gates[-2:] == ["word_errors", "tokens"]
    assert [x for x in gates if x != "word_errors"] == [
        x["name"] for x in judged["before"]["right"]["verdict"]["gates"]
    ]
    assert judged["right"]["verdict"]["reason"] == "all 10 gates hold"
    assert judged["before"]["right"]["verdict"]["reason"] == "all 9 gates hold"


def test_a_gate_that_holds_less_bad_is_not_the_reason(judged):
    verdict = judged["wrong"]["verdict"]
    broken = {x["name"]: x["verdict"] for x in verdict["gates"] if x["verdict"] != "pass"}
    assert broken == {"word_errors": "warn", "tokens": "fail"}
    assert verdict["reason"] == judged["before"]["wrong"]["verdict"]["reason"]


def test_its_words_are_the_reason_where_its_order_is_the_lower(package, tmp_path):
    """The free run's first other token breaks two gates at one place."""
    package.add()
    limits = {"word_errors": {"pass": 0.01, "warn": 0.02}}
    verdict = package.run(JUDGED, str(tmp_path / "results"), json.dumps(limits))["wrong"]["verdict"]
    assert (verdict["verdict"], verdict["first"]["gate"], verdict["first"]["position"]) == ("fail", "word_errors", 7)
    assert "word errors 5.26 %, allowed 1.00 % at position 7, free run of capital" in verdict["reason"]
    package.add(NEW.replace("order=65", "order=75"))
    verdict = package.run(JUDGED, str(tmp_path / "later"), json.dumps(limits))["wrong"]["verdict"]
    assert verdict["first"]["gate"] == "tokens"


def test_the_table_and_the_bundle_show_it(judged):
    table, before = judged["right"]["table"], judged["before"]["right"]["table"]
    (row,), (old,) = table["rows"], before["rows"]
    assert row["word_errors"] == "0.0" and "word_errors" not in old
    assert {k for k in old if row[k] != old[k]} == {"reason"}  # of ten gates instead of nine
    assert list(row).index("word_errors") == list(row).index("top1") + 1
    assert judged["wrong"]["table"]["rows"][0]["word_errors"] == str(1 / 19)
    assert "WER" in table["announce"] and "WER" not in before["announce"]


def test_the_check_holds_a_graph_to_it(judged):
    facts, found = judged["check"]
    assert facts["word_errors"] == 1 and "word_errors" in {x.get("gate") for x in found}
    assert "word_errors" not in judged["before"]["check"][0]


def test_the_bundle_s_readme_has_its_words(judged):
    assert "| word errors | 0.0000 % |" in judged["right"]["readme"]
    assert "| word errors | 5.26 % |" in judged["wrong"]["readme"]


def test_planning_knows_its_limits(package):
    unknown = package.planned(LIMITS)["error"]
    assert unknown.startswith("thresholds: got the unknown key word_errors, known: behaviour, disturbed, kv_l2, ")
    package.add()
    assert package.planned({})["error"] == "thresholds: lacks word_errors"
    above = package.planned({"word_errors": {"pass": 0.2, "warn": 0.1}})["error"]
    assert above == "thresholds.word_errors.pass: got 0.2, allowed: at most warn, 0.1"
    page = package.planned(LIMITS)["page"]
    assert "| `word_errors` | object | required | Edits of the free run's tokens. |" in page
    package.add(NEW.replace('"description": "Edits', '"default": {"pass": 0.0, "warn": 0.1}, "description": "Edits'))
    assert "error" not in package.planned({})


def test_a_changed_measure_is_another_code_of_what_judges_and_of_nothing_else(package):
    """So the rows are judged again, and a checkpoint is not fetched again."""
    before = package.planned({})["codes"]
    package.add()
    added = package.planned(LIMITS)["codes"]
    package.add(NEW.replace("(token != other)", "2 * (token != other)"))
    changed = package.planned(LIMITS)["codes"]
    package.add(f"# why\n{NEW}")
    assert package.planned(LIMITS)["codes"] == added
    for a, b in ((before, added), (added, changed)):
        assert {stage for stage in a if a[stage] != b[stage]} == {"check", "verify", "judge", "tabulate"}
    shipped = package.root / "workflow/kvgate/judging/measures/kv.py"
    shipped.write_text(shipped.read_text().replace("OVER = 0.01", "OVER = 0.02"))
    moved = package.planned(LIMITS)["codes"]
    assert {stage for stage in moved if moved[stage] != added[stage]} == {"check", "verify", "judge", "tabulate"}


# What is shipped


def test_two_measures_of_one_place_or_name_are_refused(monkeypatch):
    def of(*found: Measure) -> None:
        modules = {f"{measures.__name__}.m{n}": type("module", (), {"MEASURE": x}) for n, x in enumerate(found)}
        monkeypatch.setattr(
            measures.pkgutil, "iter_modules", lambda path: [type("m", (), {"name": k[-2:]}) for k in modules]
        )
        monkeypatch.setattr(measures, "import_module", modules.get)
        measures.every.__wrapped__()

    of(Measure("a", 1), Measure("b", 2))
    with pytest.raises(ValueError, match="measures: a and b have the order 1, allowed: one measure each"):
        of(Measure("a", 1), Measure("b", 1))
    with pytest.raises(ValueError, match="measures: got the names a, a, allowed: each once"):
        of(Measure("a", 1), Measure("a", 2))


def test_what_another_measure_gives_already_is_refused():
    found = {"kv": 1}
    measures.add(found, Measure("mine", 1), {"words": 2})
    assert found == {"kv": 1, "words": 2}
    with pytest.raises(ValueError, match="measure mine: got 'kv', allowed: a name that nothing else has"):
        measures.add(found, Measure("mine", 1), {"kv": 3})


def test_every_column_of_the_terminal_and_the_bundle_is_one_of_the_table():
    known = [x.name for x in columns.every()]
    assert len(set(known)) == len(known)
    for of in measures.every():
        assert {*of.terminal, *of.bundle} <= {x.name for x in of.columns}


def row(names: str, meaning: str) -> str:
    return f"| {names} | {meaning} |"


def test_the_readme_has_every_measure_s_words():
    text = (ROOT / "README.md").read_text()
    rows = [row(*x) for of in measures.every() for x in of.words.items()]
    rows += [row(f"`{of.name}`", " | ".join(of.broke)) for of in measures.every() if of.broke]
    assert [x for x in rows if x not in text] == []


def test_every_measure_that_gates_says_what_broke():
    none = Measure("", 0)
    gates = {of.name for of in measures.every() if (of.gate, of.gate_program) != (none.gate, none.gate_program)}
    assert gates == {of.name for of in measures.every() if of.broke}


def test_every_column_has_words():
    """`a_...` are all that begin so; `a_0` ... `a_end` those between."""
    for of in measures.every():
        said = " ".join(of.words)
        starts = [x.strip("`").removesuffix("...") for x in said.split() if x.endswith("...`")]
        for column in (x.name for x in of.columns):
            spelled = f"`{column}`" in said or f"{column}_" in starts or any(column.startswith(x) for x in starts)
            assert spelled or (of.name == "tokens" and column.startswith("tokens_")), column
