"""The checks that a run makes of itself, and that they can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, flat, make_examples, make_layout_of, relearned, tiny_llama
from torch.nn.attention import SDPBackend, sdpa_kernel

from sftkit.compile.contract import compiler_switches, step_contract
from sftkit.compile.watch import CompileWatch, records_of
from sftkit.config.schema import CompileConfig, LossConfig
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.reading.rows import ELSEWHERE
from sftkit.data.tokens import chat
from sftkit.data.types import Finding
from sftkit.errors import RecompileError
from sftkit.objectives.objective import LOSS, ModelWithLoss, NextToken, Totals
from sftkit.ops.attention import use_document_attention
from sftkit.reports.values import applies, check_table
from sftkit.tracking.meter import Meter, ShapeCounts
from sftkit.tracking.names import NUM_FLAGS, Flags, StepOutcome
from sftkit.verify import proof, round_trip
from sftkit.verify.documents import DocumentCheck, check_documents, document_checks
from sftkit.verify.proof import compile_checks, compiled_check

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29]
NAMES = (LOSS, *NextToken.measured)
GOOD = DocumentCheck("varlen", 1e-6, loss=2.0, plain_loss=2.0, targets=13, leak=0.0, changed=1.0)


def test_documents_in_a_row_are_isolated_and_the_loss_is_the_mean_over_all_their_targets() -> None:
    check = check_documents(
        ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig())), "reference", torch.device("cpu")
    )
    assert check.leak == 0.0
    assert check.changed > 0.01
    assert check.loss == pytest.approx(check.plain_loss, rel=1e-5)
    assert check.targets == 13
    assert all(row.ok for row in document_checks(check, torch.float32, "reference"))


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (replace(GOOD, leak=0.1), "Documents in a row do not see each other"),
        (replace(GOOD, changed=0.0), "Documents in a row do not see each other"),
        (replace(GOOD, loss=2.01), "Loss equals plain cross entropy"),
        (replace(GOOD, logits_difference=4.5e-2), "Same logits as the plain model"),
    ],
)
def test_each_document_check_fails_on_its_own_fault(check: DocumentCheck, name: str) -> None:
    assert [row.name for row in document_checks(check, torch.float32, "varlen") if not row.ok] == [name]


def test_a_compiled_step_that_computes_something_else_fails_and_one_that_was_not_run_is_not_known() -> None:
    assert compiled_check(4.0001, 4.0, torch.float32).ok
    assert compiled_check(4.1, 4.0, torch.float32).ok is False
    assert compiled_check(None, None, torch.float32).ok is None


def test_isolation_is_not_known_of_a_backend_that_another_one_stood_in_for() -> None:
    by_name = {row.name: row for row in document_checks(GOOD, torch.float32, "flex")}
    row = by_name["Documents in a row do not see each other"]
    assert row.ok is None
    assert "varlen stands in for flex" in row.found
    leaking = document_checks(replace(GOOD, leak=0.1), torch.float32, "flex")
    assert [row.ok for row in leaking] == [True, True, False]


@pytest.mark.parametrize("layout", ["bucketed", "fixed", "dynamic"])
def test_isolation_of_documents_does_not_apply_where_each_row_holds_one(layout: str) -> None:
    *others, row = document_checks(GOOD, torch.float32, "sdpa", layout)
    assert all(other.ok for other in others)
    assert (row.ok, row.found) == (None, "does not apply: each row holds one document")
    assert not applies(asdict(row))
    page = str(check_table([asdict(row)]))
    assert "</svg>does not apply</span>" in page
    assert "not checked" not in page
    (unknown,) = document_checks(GOOD, torch.float32, "sdpa")[2:]
    assert applies(asdict(unknown))
    assert document_checks(GOOD, torch.float32, "varlen", layout)[2].ok, "its kernel was tried"
    assert document_checks(replace(GOOD, leak=0.1), torch.float32, "sdpa", layout)[2].ok is False


def test_masked_documents_must_end_with_a_learned_end_of_turn() -> None:
    examples = make_examples(LENGTHS)
    end = 2
    assert proof.mask_check(examples, [end]).ok is False
    tokens = flat(examples)
    tokens.ids[tokens.offsets[1:] - 1] = end
    assert proof.mask_check(examples, [end]).ok
    tokens.is_target[tokens.offsets[1] - 1] = False
    assert proof.mask_check(examples, [end]).ok is False
    read = Finding("read", f"{ELSEWHERE} (input_ids, labels)", 7, "a:1"), Finding("accepted", chat.UNASKED, 2, "a:3")
    assert "; 7 rows tokenized elsewhere, 2 with targets after no header" in (
        proof.mask_check(replace(examples, findings={"a": read}), [end]).found
    )
    assert "elsewhere" not in proof.mask_check(replace(examples, findings={"a": read[1:]}), [end]).found
    every = relearned(examples, np.ones_like(tokens.is_target))
    assert proof.mask_check(every, [end]).ok is None, "all tokens are learned: there is no mask"


def test_targets_that_reach_the_model_must_be_those_that_are_divided_by() -> None:
    examples = make_examples(LENGTHS)
    batches = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=0)
    meter = Meter(tiny_llama(), NextToken(LossConfig()), batches, cpu_runtime())
    meter.start()
    assert proof.divisor_check(meter.seen_targets, meter.planned_targets).ok is None, "nothing has run"
    outcome = StepOutcome(Totals(NAMES, torch.ones(4)), torch.ones(()), Flags(torch.zeros(NUM_FLAGS)), torch.ones(1))
    for step in batches.steps(0, 2):
        meter.add(step, outcome)
    meter.read()
    assert proof.divisor_check(meter.seen_targets, meter.planned_targets).ok
    meter.add(replace(step, divisor=step.divisor + 1), outcome)
    meter.read()
    assert proof.divisor_check(meter.seen_targets, meter.planned_targets).ok is False


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * self.weight)


@pytest.fixture
def _switches() -> Iterator[None]:
    with compiler_switches(CompileConfig()):
        yield


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize("on_recompile", ["error", "warn"])
def test_a_recompile_that_is_refused_or_counted_fails_its_row(on_recompile: str) -> None:
    torch._dynamo.reset()
    module = Scaled()
    module.compile(backend="eager", dynamic=False)
    watch = CompileWatch()
    module(torch.zeros(2, 4)).sum().backward()
    watch.warm_up_done()
    error: BaseException | None = None
    try:
        with step_contract(on_recompile):
            module(torch.zeros(3, 4)).sum().backward()
    except RecompileError as caught:
        error = caught

    def now() -> dict[str, bool | None]:
        checks = compile_checks(1, watch.evaluations, records_of(watch), error)
        return {row.name: row.ok for row in checks}

    rows = now()
    assert rows["Evaluation compiles nothing"] is None, "there was none"
    with watch.evaluating():
        pass
    assert now()["Evaluation compiles nothing"]
    with watch.evaluating():
        module(torch.zeros(5, 4))
    after = now()
    assert after["Evaluation compiles nothing"] is False
    watch.close()
    assert (error is not None) == (on_recompile == "error")
    assert rows["No recompiles after the warm-up"] is False
    assert rows["The step is compiled"] is True


@pytest.mark.parametrize("kind", ["packed", "bucketed", "dynamic"])
def test_shapes_are_counted_as_they_come_and_others_than_declared_are_found(kind: str) -> None:
    examples = make_examples(LENGTHS)
    layout = make_layout_of(kind, examples.lengths)
    counts = ShapeCounts(layout, parts=1)
    assert proof.shapes_check(counts, layout).ok is None, "nothing has run"
    for step in Batches(StepDataset(examples, layout), seed=0).steps(0, 3):
        counts.add(step)
    total = sum(counts.seen.values())
    assert total == 3 * layout.accumulation
    assert counts.undeclared == 0
    assert proof.shapes_check(counts, layout).ok
    if kind != "dynamic":
        assert sum(v or 0 for k, v in counts.values().items() if "x" in k) == total
    other = make_layout_of("fixed", examples.lengths, row_length=48)
    counts.add(next(iter(Batches(StepDataset(examples, other), seed=0).steps(0, 1))))
    assert counts.undeclared == other.accumulation
    assert proof.shapes_check(counts, layout).ok is False
    assert counts.values()["shape/id"] is None


def test_shares_of_sources_and_rows_that_were_left_out_are_logged() -> None:
    examples = make_examples(LENGTHS)
    source = (examples.lengths < 20).astype("int16")
    counts = {"long": {"truncated": 3, "dropped_too_long": 2}, "short": {"skipped_bad": 1, "dropped_no_target": 4}}
    examples = replace(examples, source=source, source_names=("long", "short"), counts=counts)
    unused = Finding("unused", "column quality", 12, "a:1"), Finding("unused", "message key mood", 1, "a:7")
    examples = replace(examples, findings={"long": unused, "short": (Finding("skipped", "empty answer", 1, "b:3"),)})
    layout = make_layout_of("packed", examples.lengths, batch=8, micro=8)
    batches = Batches(StepDataset(examples, layout), seed=0)
    meter = Meter(tiny_llama(), NextToken(LossConfig()), batches, cpu_runtime())
    meter.start()
    step = next(iter(batches.steps(0, 1)))
    meter.add(
        step, StepOutcome(Totals(NAMES, torch.ones(4)), torch.ones(()), Flags(torch.zeros(NUM_FLAGS)), torch.ones(1))
    )
    values = meter.read()
    share = examples.lengths[source == 0].sum() / examples.lengths.sum()
    assert values["data/share/long"] == pytest.approx(share)
    assert values["data/share/short"] == pytest.approx(1 - share)
    assert (values["data/dropped_rows"], values["data/truncated_rows"]) == (7, 3)
    assert values["data/unused_columns"] == 2
    assert values["data/target_pct"] == pytest.approx(100 * examples.num_targets.sum() / examples.lengths.sum())
    assert values["perf/step_seconds"] > 0
    assert (values["perf/host_syncs"], values["mem/reserved_gib"]) == (None, None), "there is no device to wait for"


def test_a_checkpoint_gives_the_bits_of_the_run_and_a_changed_one_does_not(tmp_path: Path) -> None:
    model = tiny_llama()
    use_document_attention(model)  # as in training
    recorded = json.loads(json.dumps(round_trip.logits_of(model)))
    model.save_pretrained(tmp_path)
    assert round_trip.verify_checkpoint(tmp_path, recorded).ok
    with torch.no_grad():
        model.lm_head.weight[5, 3] += 1e-3
    model.save_pretrained(tmp_path)
    assert not round_trip.verify_checkpoint(tmp_path, recorded).ok


def test_the_logits_of_a_run_do_not_depend_on_the_attention_kernels_that_it_prefers() -> None:
    model = tiny_llama()
    found = []
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):  # a run with backend sdpa sets what it prefers
        with sdpa_kernel(kernel):
            found.append(round_trip.logits_of(model)["sha256"])
    assert found[0] == found[1]
