"""Without its guard a fault goes through: each guard is taken away, and the test of a fault that it is there for fails.

So a fault of this folder is not red by chance, for what another guard would have said.
"""

import inspect
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import test_artifact_faults as artifacts
import test_comparison_faults as comparisons
import test_file_faults as files
import test_graph_faults as graphs
import test_host_faults as hosts
import test_input_faults as inputs
from kvgate.checkpoint import gguf_file, held, stored
from kvgate.jobs import record, store
from kvgate.jobs.job import Job
from kvgate.judging import compare, errors, gate, gates, judged, metrics, symptoms
from kvgate.planning import config as configs
from kvgate.report import bundle_row
from kvgate.sources import folder
from kvgate.stages import build, check, trace
from kvgate.strategies import host

Off = Callable[[pytest.MonkeyPatch], Any]


def nothing(owner: Any, name: str, gives: Any = None) -> Off:
    """The function finds nothing."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **more: gives)


def unlimited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(check, "LIMIT", math.inf)


def unsealed(patch: pytest.MonkeyPatch) -> None:
    """A record is believed whatever its seal says."""

    def opened(data: bytes) -> tuple[dict[str, Any], bool]:
        body = json.loads(data)
        body.pop("sealed", None)
        return body, True

    patch.setattr(record, "_opened", opened)


def of(table: Any, name: str) -> dict[str, Any]:
    plant, place = table.all[name]
    return {"plant": plant, "place": place}


CHECKED = graphs.test_the_check_names_the_first_place
FED = hosts.test_the_check_names_the_first_place
JUDGED = artifacts.test_the_verdict_names_the_first_place
COUNTED = comparisons.test_the_verdict_says_how_much_was_compared
OPENED = files.test_who_opens_a_damaged_file_names_it
FETCHED = inputs.test_a_checkpoint_is_refused_by_name
GUARDS: dict[str, tuple[Off, Any, dict[str, Any]]] = {
    "the check's limit": (unlimited, CHECKED, of(graphs.fault, "a_window_is_ignored")),
    "the check's limit, of the host half": (unlimited, FED, of(hosts.fault, "the_slots_wrap_at_half_the_capacity")),
    "the check's figures": (
        nothing(errors.Errors, "first", []), CHECKED, of(graphs.fault, "a_norm_has_another_epsilon"),
    ),
    "the heads' order": (nothing(symptoms, "_heads"), CHECKED, of(graphs.fault, "heads_of_the_key_are_permuted")),
    "the axes' order": (nothing(metrics, "permuted"), JUDGED, of(artifacts.fault, "a_value_has_another_layout")),
    "other tensors": (nothing(symptoms, "_others", ()), JUDGED, of(artifacts.fault, "the_slot_before_is_given_back")),
    "strange values": (nothing(symptoms, "odd", []), JUDGED, of(artifacts.fault, "logits_are_infinite")),
    "slots as fed": (
        nothing(host, "relative_change", 0.0), CHECKED, of(graphs.fault, "other_slots_come_back_with_another_scale"),
    ),
    "a gate": (nothing(gate, "level", "pass"), JUDGED, of(artifacts.fault, "one_key_is_off_by_two_percent")),
    "the count of steps": (
        nothing(compare, "counted", {}), COUNTED, of(comparisons.short, "the_free_run_stopped_early"),
    ),
    "the last slot": (nothing(gates, "capacity", []), comparisons.test_a_cache_that_no_text_fills_is_not_passed, {}),
    "finite limits": (
        nothing(configs, "_check_plain"), comparisons.test_a_limit_that_holds_nothing_is_no_limit,
        {"gate": "kv_l2", "value": math.nan},
    ),
    "files held to records": (
        lambda patch: patch.setattr(Job, "file", lambda job, label, name, *_: job.inputs[label].parent / name), OPENED,
        {"stage": "export", "file": "weights.bin", "opener": "build", "damage": files.flipped},
    ),
    "the checkpoint held to its manifest": (
        lambda patch: patch.setattr(Job, "checkpoint", lambda job: job.inputs["fetch"].parent), OPENED,
        {"stage": "fetch", "file": "model.safetensors", "opener": "prepare", "damage": files.flipped},
    ),
    "the seal of records": (
        unsealed, files.test_who_reads_an_edited_record_names_it, {"stage": "verify", "since": "judge"},
    ),
    "what a bundle takes": (
        lambda patch: patch.setattr(bundle_row.Source, "held", lambda self, got=None: str(self.sha256)),
        files.test_a_file_that_changed_is_not_shipped, {"stage": "build", "file": "model.rknn"},
    ),
    "a verdict and its gates": (
        nothing(judged, "contradiction", ""), files.test_a_verdict_that_its_gates_contradict_is_not_believed, {},
    ),
    "the artifact's custom string": (
        lambda patch: patch.setattr(build, "_stored", lambda job, source, key: store.get(job.results, key, job.folder)),
        files.test_an_entry_of_another_row_that_says_this_rows_key, {},
    ),
    "the second reading of weights": (
        nothing(held, "hold", {}), FETCHED, of(inputs.folder, "a_weight_has_no_place"),
    ),
    "the dtypes of weights": (
        lambda patch: patch.setattr(stored, "_TYPES", {**stored._TYPES, "F8_E4M3": "u1"}), FETCHED,
        of(inputs.folder, "weights_are_float8_and_nothing_says_so"),
    ),
    "adapters": (nothing(folder, "_no_adapter"), FETCHED, of(inputs.folder, "an_adapter_lies_beside_the_model")),
    "a whole GGUF file": (
        nothing(gguf_file.File, "check"), inputs.test_a_gguf_file_is_refused_by_name,
        of(inputs.file, "two_parts_one_after_the_other"),
    ),
    "special tokens in a prompt": (
        nothing(trace, "_steering", set()), inputs.test_a_text_is_refused_by_name,
        of(inputs.text, "a_prompt_holds_a_special_token"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
def test_without_its_guard_a_fault_goes_through(request, monkeypatch, guard):
    off, test, given = GUARDS[guard]
    fixtures = [x for x in inspect.signature(test).parameters if x not in given]
    given = given | {name: request.getfixturevalue(name) for name in fixtures}
    off(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**given)
