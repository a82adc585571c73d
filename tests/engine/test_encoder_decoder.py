"""Models with an encoder: rows of several documents compute what each document alone does, and none sees another's input."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, flat, make_layout_of, tiny_llama
from made_captioners import CAPTIONER, ENCODER, OWN_POSITIONS, TRANSLATOR, Words, captions, made
from transformers import PreTrainedModel, PreTrainedTokenizerFast, VisionEncoderDecoderModel

from sftkit.checkpoint.resume import identity_differences, run_identity
from sftkit.compile.contract import compile_model, compiler_switches, small_modules, step_contract
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import CompileConfig, DataConfig, LossConfig, OptimConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.collate import OF_TOKENS, Batch, collate
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import BatchShape, make_layout
from sftkit.data.types import EncoderInputs, Examples
from sftkit.engine.reference import documents
from sftkit.engine.step import TrainStep, has_dropout, worst_case_batch
from sftkit.errors import ConfigError, DataError
from sftkit.memory.estimate import EstimateInputs, estimate, kept_elements
from sftkit.memory.plan import encoder_shape_of, shape_of
from sftkit.models import encoders
from sftkit.models.encoders import TextToText, VisionToText, pixels_of
from sftkit.models.kind import CausalLM
from sftkit.models.structure import Work, called, count_parameters, encoder, train_flops
from sftkit.objectives.objective import Caption, ModelWithLoss
from sftkit.ops.attention import unsupported_reason
from sftkit.optim.protocol import build_optimizer, parameter_groups
from sftkit.verify.documents import check_documents

MODELS: dict[str, dict[str, Any]] = {
    "ViT and GPT-2": CAPTIONER,
    "T5": TRANSLATOR,
    "BART": {"model_type": "bart", **OWN_POSITIONS},
    "Marian": {"model_type": "marian", **OWN_POSITIONS},
}
LENGTHS = [9, 4, 13, 6, 2, 11]
ROWS = ((0, 1, 2), (3, 4), (), (5,))


def of(fields: dict[str, Any], backend: str = "reference") -> ModelWithLoss:
    return ModelWithLoss(made(fields), backend, Caption(LossConfig()))


def rows_of(
    examples: Examples, rows: Sequence[tuple[int, ...]], row_length: int = 32, places: int | None = None
) -> Batch:
    slots = sum(map(len, rows)) + len(rows)
    return collate(
        examples,
        tuple(rows),
        BatchShape(row_length, max_docs=slots, max_doc_length=row_length, docs_per_row=places),
        pad_id=1,
    )


def gradients(model: ModelWithLoss) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.orig_model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("layout", ["packed", "a document a row"])
def test_losses_and_gradients_are_those_of_each_document_alone_in_plain_transformers(
    fields: dict[str, Any], layout: str
) -> None:
    model = of(fields)
    examples = captions(model.orig_model, LENGTHS, shared=True)
    rows = ROWS if layout == "packed" else [(i,) for i in range(len(LENGTHS))]
    batch = rows_of(examples, rows, places=4 if layout == "packed" else 1)
    sums = model(batch)
    sums.loss.backward()
    ours = gradients(model)
    plain = torch.zeros(())
    for inputs, targets, *_ in documents(batch):
        logits = model.kind.plain_logits(model.orig_model, inputs)[0]
        plain = plain + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    plain.backward()
    theirs = gradients(model)
    torch.testing.assert_close(sums.loss, plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}", atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_tokens_and_input_of_one_document_change_no_bit_of_the_others(fields: dict[str, Any]) -> None:
    model = of(fields)
    batch = rows_of(captions(model.orig_model, LENGTHS), ROWS, places=4)
    changed = dict(batch.inputs)
    ids = changed["input_ids"] = batch.inputs["input_ids"].clone()
    ids[0, 9:13] = (ids[0, 9:13] + 1) % 64  # the second document of the first row
    for name in changed.keys() - set(OF_TOKENS):
        changed[name] = batch.inputs[name].clone()
        changed[name][1] = changed[name][1].flip(-1)
    with torch.no_grad():
        before = model.hidden_states(batch, "reference")
        after = model.hidden_states(replace(batch, inputs=changed), "reference")
        alone = dict(batch.inputs, input_ids=batch.inputs["input_ids"])
        for name in alone.keys() - set(OF_TOKENS):
            alone[name] = changed[name]
        looked = model.hidden_states(replace(batch, inputs=alone), "reference")
    own = torch.zeros_like(batch.doc_ids, dtype=torch.bool)
    own[0, 9:13] = True
    real = batch.doc_ids >= 0
    assert torch.equal(before[real & ~own], after[real & ~own])
    assert (before[own] != after[own]).any(-1).all()
    assert (before[own] != looked[own]).any(-1).all()  # also of another input alone


def test_before_the_first_step_a_run_finds_the_same() -> None:
    found = check_documents(of(CAPTIONER), "reference", torch.device("cpu"))
    assert found.logits_difference < 1e-6
    assert found.leak == 0.0 < found.changed


@pytest.mark.parametrize("kind", ["fixed", "bucketed", "packed", "dynamic"])
def test_every_batch_of_a_layout_has_a_declared_shape_and_the_same_places_for_inputs(kind: str) -> None:
    model = of(CAPTIONER)
    lengths = (LENGTHS * 12)[:70]
    examples = captions(model.orig_model, lengths)
    data = DataConfig(train=(), layout=kind, num_buckets=2 if kind == "bucketed" else None)  # type: ignore[arg-type]
    train = TrainConfig(global_batch_size=4, micro_batch_size=2)
    layout = make_layout(data, train, examples.lengths, 32, encoded=True)
    seen, used, places = set(), 0, 0
    for step in Batches(StepDataset(examples, layout, pad_id=1), seed=0).steps(0, 12):
        for batch in step.micro_batches:
            pixels = batch.inputs["pixel_values"]
            assert layout.declares(*batch.shape)
            assert len(pixels) == batch.shape[0] * layout.docs_per_row
            seen.add((batch.shape, len(pixels)))
            places += len(pixels)
        used += len(step.document_lengths)
    if kind != "dynamic":
        expected = {(shape, shape[0] * layout.docs_per_row) for shape in layout.shapes}
        assert seen <= expected
        made_up = worst_case_batch(cpu_runtime(), model.orig_model, layout, *layout.shapes[0])
        assert len(made_up.inputs["pixel_values"]) == layout.shapes[0][0] * layout.docs_per_row
    if kind == "packed":
        assert layout.docs_per_row > 1
        assert used > 0.8 * places


MARKED: dict[str, Any] = {"dynamic": "marked", "scope": "model", "fullgraph": True}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("packed", {"backend": "aot_eager"}),
        # The row length of texts; pictures have one size, which the encoder compares with its config.
        pytest.param("dynamic", {"backend": "eager", **MARKED}, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_step_computes_what_the_eager_one_does_and_compiles_nothing_more(
    kind: str, settings: dict[str, Any]
) -> None:
    rt, config = cpu_runtime(), CompileConfig(**settings)
    eager, model = of(CAPTIONER), of(CAPTIONER)
    examples = captions(model.orig_model, LENGTHS * 6)
    layout = make_layout_of(kind, examples.lengths)
    layout = replace(layout, docs_per_row=3 if kind == "packed" else 1, encoded=True)
    with compiler_switches(config, 1.0, 8, dynamic_layout=layout.dynamic):
        compile_model(model.orig_model, config, dynamic_layout=layout.dynamic)
        watch = CompileWatch()
        for shape in layout.shapes:
            model(worst_case_batch(rt, model.orig_model, layout, *shape)).loss.backward()
        model.zero_grad()
        watch.warm_up_done()
        with step_contract("error", watch.graph_break_reasons()):
            for step in Batches(StepDataset(examples, layout, pad_id=1), seed=0).steps(0, 3):
                for batch in step.micro_batches:
                    ours, plain = model(batch), eager(batch)
                    torch.testing.assert_close(ours.loss, plain.loss)
                    ours.loss.backward()
                    plain.loss.backward()
        counts = watch.counts()
        watch.close()
    assert counts["compile/recompiles"] == counts["compile/graph_breaks"] == 0
    theirs = gradients(eager)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, theirs[name], atol=1e-4, rtol=1e-4)


def test_captions_can_be_learned_from_their_pictures() -> None:
    torch.manual_seed(0)
    rt, model = cpu_runtime(), of(CAPTIONER)
    examples = captions(model.orig_model, [5] * 8)
    flat(examples).ids[flat(examples).offsets[:-1]] = 0  # all begin alike, so what follows is in the picture alone
    layout = make_layout_of("packed", examples.lengths, batch=2, micro=2)
    layout = replace(layout, docs_per_row=4, encoded=True)
    optimizer = build_optimizer(model.orig_model, OptimConfig(name="adamw"))
    losses = []
    for step in Batches(StepDataset(examples, layout, pad_id=1), seed=0).steps(0, 80):
        outcome = TrainStep(model, optimizer, model.objective, rt, max_grad_norm=1.0).step(step, 5e-3)
        losses.append(float(outcome.sums["nll"]) / step.num_targets)
    assert losses[0] > 3.5
    assert losses[-1] < 0.1  # without pictures all of them are as likely: ln 8 / 5 = 0.42 at least


def test_what_the_encoder_computes_is_counted_by_its_own_positions() -> None:
    orig_model = made(CAPTIONER)
    counted = count_parameters(orig_model)
    vit, gpt2 = encoder(orig_model), orig_model.decoder
    assert isinstance(vit, PreTrainedModel)
    assert len(called(orig_model)) == 3
    tables = vit.embeddings.cls_token.numel() + vit.embeddings.position_embeddings.numel()
    pooler = sum(p.numel() for p in vit.pooler.parameters())
    between = sum(p.numel() for p in orig_model.enc_to_dec_proj.parameters())
    keys = sum(p.numel() for h in gpt2.transformer.h for p in h.crossattention.c_attn.parameters())
    assert counted.encoder == sum(p.numel() for p in vit.parameters()) - tables - pooler + between + keys
    everything = gpt2.transformer.wpe.weight.numel() + tables + pooler
    assert counted.encoder + counted.body + counted.head == counted.total - everything
    length = 10
    flops = train_flops(orig_model, Work(7, 5, 100, 3, length)) - train_flops(orig_model, Work(7, 5, 100))
    assert flops == 6 * counted.encoder * 3 * length + 12 * 32 * 2 * 7 * length + 12 * 24 * 2 * 3 * length**2


def test_an_embedding_that_a_translator_shares_counts_as_its_head_alone_and_heads_may_be_wider_than_the_model() -> None:
    orig_model = made({**TRANSLATOR, "d_kv": 24})  # 2 heads of 24, hidden size 32
    counted = count_parameters(orig_model)
    assert orig_model.lm_head.weight is orig_model.shared.weight
    relative = {n for n, m in orig_model.named_modules() if n.endswith("relative_attention_bias")}
    sizes = {n: p.numel() for n, p in orig_model.named_parameters() if n.rpartition(".")[0] not in relative}
    looked = sum(size for n, size in sizes.items() if re.search(r"EncDecAttention\.[kv]\.", n))
    assert counted.head == orig_model.shared.weight.numel()
    assert counted.encoder == looked + sum(size for n, size in sizes.items() if n.startswith("encoder."))
    assert counted.body + counted.encoder + counted.head == sum(sizes.values())
    more = train_flops(orig_model, Work(0, 0, 0, 3, 10))
    assert more == 6 * counted.encoder * 3 * 10 + 12 * 2 * 24 * 2 * 3 * 10**2


@pytest.mark.parametrize("scope", ["block", "model"])
def test_a_pooler_is_neither_computed_nor_compiled_and_stays_in_the_checkpoint(scope: Any, tmp_path: Path) -> None:
    orig_model = made(CAPTIONER)
    vit = encoder(orig_model)
    assert isinstance(vit, PreTrainedModel)
    pixels = torch.rand(2, *pixels_of(orig_model.config)[:3])
    before = {name: p.clone() for name, p in orig_model.state_dict().items()}
    orig_model.save_pretrained(tmp_path)
    plain, told = VisionEncoderDecoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert plain.state_dict().keys() == before.keys()
    assert plain.encoder(pixels).pooler_output is not None
    expected = plain.encoder(pixels).last_hidden_state
    if scope == "block":
        assert vit.pooler not in small_modules(orig_model)
    compile_model(orig_model, CompileConfig(scope=scope, backend="aot_eager"))
    found = vit(pixel_values=pixels)
    assert found.pooler_output is None
    torch.testing.assert_close(found.last_hidden_state, expected)
    torch._dynamo.reset()


def test_all_but_a_pooler_is_trained_and_positions_do_not_decay() -> None:
    orig_model = made(CAPTIONER)
    frozen = {name for name, p in orig_model.named_parameters() if not p.requires_grad}
    assert frozen == {"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"}
    groups = parameter_groups(orig_model, OptimConfig(name="adamw", weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    embeddings = orig_model.encoder.embeddings
    assert decay[id(embeddings.position_embeddings)] == decay[id(embeddings.cls_token)] == 0.0
    assert decay[id(embeddings.patch_embeddings.projection.weight)] == 0.1
    assert orig_model.decoder.lm_head.weight is orig_model.decoder.transformer.wte.weight


def test_kernels_without_relative_positions_are_refused_for_t5() -> None:
    orig_model, layout = made(TRANSLATOR), make_layout_of("packed", LENGTHS)
    for backend in ("varlen", "sdpa", "flex"):
        found = unsupported_reason(backend, orig_model, layout, torch.device("cpu"), compiled=True)
        assert found is not None
        assert "no relative positions" in found
    assert unsupported_reason("reference", orig_model, layout, torch.device("cpu"), compiled=True) is None


def test_an_input_that_several_documents_share_is_kept_once() -> None:
    examples = captions(made(CAPTIONER), LENGTHS, shared=True)
    assert examples.encoder_inputs is not None
    batch = rows_of(examples, [(0, 1), (4,)], places=3)
    pixels, stored = batch.inputs["pixel_values"].numpy(), examples.encoder_inputs.arrays["pixel_values"]
    assert np.array_equal(pixels[0], stored[0])
    assert np.array_equal(pixels[1], stored[0])
    assert np.array_equal(pixels[3], stored[2])
    assert not pixels[[2, 4, 5]].any()


_SWIN = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}


@pytest.mark.parametrize(
    ("encoder", "size", "told"),
    [
        (ENCODER, 12, ""),
        (ENCODER, 14, "the last 2 rows and the last 2 columns"),
        (ENCODER, [12, 15], "the last 3 columns"),
        (ENCODER | {"model_type": "siglip_vision_model"}, 14, "the last 2 rows and the last 2 columns"),
        (_SWIN, 14, ""),
    ],
)
def test_pixels_that_are_in_no_patch_are_warned_of(
    encoder: dict[str, Any], size: int | list[int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    orig_model = made(CAPTIONER | {"encoder": encoder | {"image_size": size}})
    warned = [record.getMessage() for record in caplog.records if "does not see" in record.getMessage()]
    assert len(warned) == bool(told)
    assert all(f"the encoder does not see {told};" in line for line in warned)
    # What is said is what the encoder does.
    picture = torch.rand(1, *pixels_of(orig_model.config)[:3])
    changed = picture.clone()
    changed[..., -1] += 1
    with torch.no_grad():
        encoder_of = orig_model.eval().get_encoder()
        seen, other = (encoder_of(pixel_values=one).last_hidden_state for one in (picture, changed))
    assert torch.equal(seen, other) == bool(told)


def test_what_the_encoder_takes_is_part_of_the_memory_plan() -> None:
    orig_model = made(CAPTIONER)
    layout = replace(make_layout_of("packed", LENGTHS), docs_per_row=4, encoded=True)
    shape = shape_of(orig_model)
    assert shape is not None
    with_encoder = EstimateInputs(
        shape, layout, "adamw", "bf16", 4096, 1.0, True, False, encoder=encoder_shape_of(orig_model)
    )
    assert with_encoder.encoder is not None
    assert (with_encoder.encoder.hidden, with_encoder.encoder.blocks, shape.hidden) == (24, 2, 32)
    rows = layout.shapes[-1][0]
    found = replace(with_encoder, encoded_length=10)
    assert found.encoded == rows * 4 * 10
    more = estimate(found).activations - estimate(replace(found, layout=replace(layout, docs_per_row=2))).activations
    kept = kept_elements(replace(found, shape=with_encoder.encoder))
    assert more == pytest.approx(2 * rows * 2 * 10 * (2 * kept + 2 * 2 * shape.key), rel=0.01)  # 2 bytes, 2 places less


def test_texts_for_an_encoder_are_cut_filled_and_kept_once(tokenizer: PreTrainedTokenizerFast) -> None:
    given = ["What is the capital of France?", "She sells", "What is the capital of France?"]
    examples = replace(captions(made(TRANSLATOR), [4, 4, 4]), encoder_sources=given, encoder_inputs=None)
    found = TextToText().with_inputs(made(TRANSLATOR), tokenizer, examples, 6, DataConfig(train=())).encoder_inputs
    assert found is not None
    ids, mask = found.arrays["encoder_input_ids"], found.arrays["encoder_attention_mask"]
    assert (ids.shape, mask.shape, found.index.tolist()) == ((2, 6), (2, 6), [0, 1, 0])
    for i, text in enumerate(given[:2]):
        assert ids[i][mask[i]].tolist() == tokenizer(text)["input_ids"][:6]
    with pytest.raises(DataError, match=r"its rows have no text to encode"):
        TextToText().with_inputs(
            made(TRANSLATOR), tokenizer, replace(examples, encoder_sources=()), 6, DataConfig(train=())
        )


def test_dropout_of_an_encoder_is_seen() -> None:
    orig_model = made(CAPTIONER)
    assert not has_dropout(orig_model)
    orig_model.config.encoder.attention_probs_dropout_prob = 0.1
    assert has_dropout(orig_model)


def test_a_causal_model_is_told_what_could_read_its_pictures() -> None:
    examples = replace(captions(made(CAPTIONER), [4]), encoder_sources=["a.png"])
    with pytest.raises(DataError, match=r"llama has no encoder for a.png: choose a model with an encoder"):
        CausalLM().with_inputs(tiny_llama(), None, examples, 32, DataConfig(train=()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topology", "train", "refused"),
    [
        (
            Topology(shards=2, sharded=True),
            TrainConfig(),
            r"trained as replicas: start it with accelerate_configs/ddp.yaml",
        ),
        (Topology(context=2, sharded=True), TrainConfig(), r"FSDP2, tensor and context parallelism and pipelines"),
        (
            Topology(stages=2),
            TrainConfig(engine="pipeline"),
            r"ddp.yaml.* train.engine=blocks; .* and pipelines do not support it",
        ),
        (Topology(), TrainConfig(fp8="rowwise"), r"train.fp8=rowwise: vision-encoder-decoder has an encoder"),
    ],
)
def test_what_is_not_supported_is_refused(topology: Topology, train: TrainConfig, refused: str) -> None:
    orig_model = made(CAPTIONER)
    with pytest.raises(ConfigError, match=refused):
        VisionToText().check(orig_model, topology, train)
    VisionToText().check(orig_model, Topology(replicas=2), TrainConfig())


def test_pictures_are_normalised_as_the_config_says_and_a_checkpoint_says_the_same() -> None:
    orig_model, kind = made(CAPTIONER), VisionToText()
    orig_model.config.encoder.image_mean, orig_model.config.encoder.image_std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    pixels = torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    found = kind.plain_inputs(orig_model, {"pixel_values": pixels})["pixel_values"]
    mean, std = torch.tensor([0.1, 0.2, 0.3])[:, None, None], torch.tensor([0.5, 0.6, 0.7])[:, None, None]
    torch.testing.assert_close(found, (pixels / 255 - mean) / std)
    said = json.loads(kind.files(orig_model)["preprocessor_config.json"])
    assert (said["image_mean"], said["image_std"]) == ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    assert said["size"] == {"height": 12, "width": 12}


@pytest.mark.parametrize(
    ("said", "of_255"),
    [
        ({"image_mean": [0.4] * 3, "image_std": [0.2] * 3}, (255 / 255 - 0.4) / 0.2),
        ({"do_normalize": False, "image_mean": [0.4] * 3, "image_std": [0.2] * 3}, 1.0),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}, 1.0),
        ({"rescale_factor": 1 / 127.5, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, 3.0),
    ],
    ids=["mean and std", "no normalising", "no rescaling", "other rescaling"],
)
@pytest.mark.parametrize("nested", [False, True], ids=["preprocessor_config.json", "processor_config.json"])
def test_pixels_of_a_loaded_model_are_those_of_the_image_processor_beside_it(
    tmp_path: Path, said: dict[str, Any], of_255: float, nested: bool
) -> None:
    name, content = (
        ("processor_config.json", {"image_processor": said}) if nested else ("preprocessor_config.json", said)
    )
    (tmp_path / name).write_text(json.dumps(content))
    orig_model = beside(tmp_path)
    white = torch.full((1, 3, 12, 12), 255, dtype=torch.uint8)
    found = VisionToText().plain_inputs(orig_model, {"pixel_values": white})["pixel_values"]
    torch.testing.assert_close(found, torch.full_like(found, of_255))


def test_the_image_processor_of_a_model_of_the_hub_is_asked_for_at_the_same_commit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def known(_: Any, path: str, **where: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append((path, where))
        return {"image_mean": [0.1] * 3, "image_std": [0.2] * 3}, {}

    monkeypatch.setattr(encoders, "hub_answers", lambda: True)
    monkeypatch.setattr(encoders.ImageProcessingMixin, "get_image_processor_dict", classmethod(known))
    assert encoders.pixels_of(beside("some/captioner").config).mean == (0.1, 0.1, 0.1)
    assert asked == [("some/captioner", {"revision": "ab12", "local_files_only": False})]
    monkeypatch.undo()
    monkeypatch.setattr(encoders, "hub_answers", lambda: False)
    assert encoders.pixels_of(beside("some/captioner").config).mean == (0.5, 0.5, 0.5)
    assert (
        "some/captioner has no preprocessor_config.json, so pixels are normalised with mean and std 0.5" in caplog.text
    )


def beside(path: Path | str) -> PreTrainedModel:
    """A captioner as if it were loaded from there."""
    orig_model = made(CAPTIONER)
    orig_model.name_or_path, orig_model.config._commit_hash = str(path), None if isinstance(path, Path) else "ab12"
    VisionToText().prepare(orig_model, Words())  # type: ignore[arg-type]
    return orig_model


def test_pictures_may_move_to_another_folder_and_texts_may_not_change(tokenizer: PreTrainedTokenizerFast) -> None:
    layout = make_layout_of("packed", LENGTHS)

    def identity(fields: dict[str, Any], folder: str) -> dict[str, Any]:
        orig_model = made(fields)
        given = [f"{folder}/{i}.png" for i in range(len(LENGTHS))]
        found = run_identity(
            orig_model, tokenizer, replace(captions(orig_model, LENGTHS), encoder_sources=given), layout
        )
        return dict(json.loads(json.dumps(found)))

    assert identity_differences(identity(CAPTIONER, "old"), identity(CAPTIONER, "/new/place")) == []
    (line,) = identity_differences(identity(TRANSLATOR, "old"), identity(TRANSLATOR, "/new/place"))
    assert line.startswith("data.given: ")


def test_another_picture_under_the_same_name_is_other_data(tokenizer: PreTrainedTokenizerFast) -> None:
    orig_model = made(CAPTIONER)
    examples = replace(captions(orig_model, LENGTHS), encoder_sources=[f"{i}.png" for i in range(len(LENGTHS))])
    assert examples.encoder_inputs is not None
    pixels = examples.encoder_inputs.arrays["pixel_values"].copy()
    pixels[3] = 255 - pixels[3]
    changed = replace(examples, encoder_inputs=EncoderInputs({"pixel_values": pixels}, examples.encoder_inputs.index))
    layout = make_layout_of("packed", LENGTHS)
    there, same, here = (run_identity(orig_model, tokenizer, one, layout) for one in (examples, examples, changed))
    there = json.loads(json.dumps(there))
    assert identity_differences(there, same) == []
    (line,) = identity_differences(there, here)
    assert line.startswith("data.encoded: ")
