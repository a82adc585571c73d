"""Which causal language models of transformers a run accepts: a tiny model of each model_type goes through the checks
that a run makes of itself, on a CPU in fp32, eagerly.

python -m labs.families [--out FILE] [MODEL_TYPE ...]     without a model_type all of them, and docs/families.md

With another transformers in PYTHONPATH and --out benchmarks/families/results_newer.json: what differs there.

benchmarks/families/overrides.yaml has the fields that a tiny config of a family needs beside SIZES.
"""

from __future__ import annotations

import json
import logging
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoConfig, PretrainedConfig

from labs.pages import write
from labs.tables import markdown_table
from sftkit.checkpoint.states import check_saved_names
from sftkit.config.commands import Parser
from sftkit.config.schema import LossConfig, OptimConfig
from sftkit.config.terminal import print_text
from sftkit.data.batches.collate import collate
from sftkit.data.batches.pack import BatchShape, Layout
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.models.hybrids import mixes_tokens
from sftkit.models.kind import CausalLM, kind_of
from sftkit.models.load import from_config, trained_config
from sftkit.models.structure import (
    decoder,
    embedding_of,
    inference,
    output_projection,
    use_document_lengths,
    vocab_size,
)
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.attention import plain_attention
from sftkit.optim.protocol import build_optimizer
from sftkit.verify.documents import check_documents, document_checks

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks/families"
RESULTS = FOLDER / "results.json"
NEWER = FOLDER / "results_newer.json"
LARGEST = 20_000_000
"Parameters of a tiny model: at most."
ROWS = Layout("packed", (1024,), 1, 1, 1, max_length=512, max_doc_length=512, docs_per_row=8)
"Longer than the chunks that layers compute in."
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "sliding_window": 16,
    # Experts and latent attention.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"Fields of a tiny config, as far as a family has them."
NO_DROPOUT = re.compile(r"drop(out|_rate|_prob)?$|_pdrop$|^dropout|layerdrop")
HEAD = "its head is more than a linear layer"
REASONS = {
    r"unexpected keyword argument 'documents'|attention needs `documents`": "its layers pass no keyword arguments on",
    r"a layer of type (.*?) carries": "layers that sftkit cannot keep apart by document: {}",
    r"the layer \S+ \((.*)\) carries": "{}",
    r"(the convolution \S+) carries": "{} carries tokens from one document to the next",
    r"scaled_dot_product_attention yet": "transformers has no SDPA for it",
    r"no linear output projection": "no linear output projection",
    r"Linear\.forward\(\) got an unexpected": HEAD,
    r"Unrecognized configuration class": "transformers makes no causal model of its text config",
    r"is not supported: (it does not take its attention .*)": "{}",
    r"is not supported: (its layers add numbers of their own to the scores)": "{}",
    r"is not supported with sliding_window=.* in its mask alone": "its sliding window is in transformers' mask alone",
    r"is not supported: (the logits of its own forward pass) and sftkit's differ": "{} differ from sftkit's",
}
"By pattern of an error: the reason in the table, with the group that was found."


def tiny_fields(config_class: type[PretrainedConfig], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a tiny config of a class, and of the configs inside it.

    Args:
        given: fields of the family, which count more; a mapping for a config inside.
    """
    default = config_class()
    fields = default.to_dict()
    found = {config_class.attribute_map.get(name, name): value for name, value in SIZES.items()}
    found = {name: value for name, value in found.items() if name in fields}
    if "qk_rope_head_dim" in fields:  # latent attention: as many heads of keys, whose size is another field
        found = {name: value for name, value in found.items() if name not in ("head_dim", "num_key_value_heads")}
        found["num_key_value_heads"] = 4
    found |= {name: 0.0 for name, value in fields.items() if NO_DROPOUT.search(name) and isinstance(value, float)}
    # A list with an entry for each layer: one layer of each type, the last with full attention.
    depth = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = {n: v for n, v in fields.items() if isinstance(v, list) and v and len(v) == fields.get(depth)}
    if layers:
        types = {n: sorted({*map(str, v)}, key="full_attention".__eq__) for n, v in layers.items()}
        found[depth] = max([2, *map(len, types.values())])
        found |= {
            n: [one[0]] * (found[depth] - len(one)) + one for n, one in types.items() if isinstance(layers[n][0], str)
        }
    for name in config_class.sub_configs:
        if isinstance(inside := getattr(default, name, None), PretrainedConfig):
            found[name] = tiny_fields(type(inside), given.get(name) or {}) | {"model_type": inside.model_type}
    return found | {name: value for name, value in given.items() if name not in config_class.sub_configs}


def model_types() -> list[str]:
    """Return the model types of transformers' causal language models."""
    return sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def outcome(model_type: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run says of a tiny model of this type: accepted, the class, and why not."""
    found: dict[str, Any] = {"model_type": model_type, "accepted": False, "class": None, "reason": None}
    given = dict(overrides.get(model_type) or {})
    if reason := given.pop("reason", None):  # it has no tiny config
        return found | {"reason": reason}
    began = time.perf_counter()
    try:
        fields = tiny_fields(transformers.CONFIG_MAPPING[model_type], given)
        found |= _checked(trained_config(AutoConfig.for_model(model_type, **fields)))
    except Exception as error:  # a ConfigError, or what a run would end with: a fault of ours until it has a name
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        found["reason"] = _reason(found["error"])
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def _reason(error: str) -> str:
    for pattern, reason in REASONS.items():
        if matched := re.search(pattern, error):
            return reason.format(*filter(None, matched.groups()))
    return error.removeprefix("ConfigError: ")


def _checked(config: PretrainedConfig) -> dict[str, Any]:
    torch.manual_seed(0)
    if not isinstance(kind_of(config), CausalLM):
        return {"reason": "has an encoder: trained as a model that reads and writes text"}
    # Without attention there is no SDPA to miss.
    with torch.device("meta"):
        made = kind_of(config).auto_class.from_config(config, attn_implementation="eager")
    size = sum(p.numel() for p in made.parameters())
    assert size <= LARGEST, f"not tiny: {size:,} parameters"
    if mixer := mixes_tokens(made):
        raise ConfigError(f"{mixer} carries tokens from one document to the next")
    orig_model = from_config(config, torch.float32)
    use_document_lengths(orig_model)
    if orig_model._can_set_experts_implementation():
        orig_model.set_experts_implementation("batched_mm")
    # The padding token of a new model has a row of zeros, where Gemma 3n has no gradient; that of a start has numbers.
    with torch.no_grad():
        embedding_of(orig_model)[SIZES["pad_token_id"]] = 0.02
    model = ModelWithLoss(orig_model.train(), "reference", NextToken(LossConfig()))
    try:
        check = check_documents(model, "reference", torch.device("cpu"), ROWS)
    except ConfigError:
        if _head_is_more(orig_model):
            raise ConfigError(HEAD) from None
        raise
    if failed := [row for row in document_checks(check, torch.float32, "reference") if row.ok is False]:
        return {"reason": f"{failed[0].name}: {failed[0].found}"}
    check_saved_names(orig_model)
    return {"accepted": True, "class": type(orig_model).__name__, **_step(model)}


def _head_is_more(orig_model: Any) -> bool:
    """Return whether the input of the output projection is not the output of the decoder."""
    seen: list[torch.Tensor] = []
    hooks = [
        output_projection(orig_model).register_forward_pre_hook(lambda _, given: seen.append(given[0])),
        decoder(orig_model).register_forward_hook(lambda _, __, out: seen.append(out[0])),
    ]
    with plain_attention(orig_model), inference(orig_model):
        orig_model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return len(seen) == 2 and (seen[0].shape != seen[1].shape or not torch.equal(*seen))


def _step(model: ModelWithLoss) -> dict[str, Any]:
    """Return the losses around a training step of packed documents."""
    sizes = (9, 14, 5)
    ids = torch.randint(3, vocab_size(model.orig_model), (sum(sizes) + 3,)).numpy()
    batch = collate(Examples.of(ids, sizes), ((0, 1, 2),), BatchShape(32, max_docs=4, max_doc_length=32))
    optimizer = build_optimizer(model.orig_model, OptimConfig(name="adamw", lr=1e-3))
    losses = []
    for _ in range(2):
        loss = model(batch).loss
        loss.backward()
        optimizer.update(1e-3, torch.ones(()))
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()) / sum(sizes), 3))
    assert losses[1] < losses[0], f"a training step does not lower the loss: {losses}"
    return {"losses": losses}


def outcomes(types: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what a run says of each type."""
    overrides = yaml.safe_load((FOLDER / "overrides.yaml").read_text()) or {}
    for model_type in types:
        yield outcome(model_type, overrides)


def table(name: str) -> str:
    """Return the table of a page: `accepted`, `rejected`, or `newer`, where a newer transformers says otherwise."""
    recorded = json.loads(RESULTS.read_text())
    if name == "newer":
        known = {row["model_type"]: row["accepted"] for row in recorded["rows"]}
        newer = json.loads(NEWER.read_text())
        others = [row for row in newer["rows"] if known.get(row["model_type"]) != row["accepted"]]
        return f"transformers {newer['transformers']}:\n\n{_by_reason('outcome', others)}"
    rows = [row for row in recorded["rows"] if row["accepted"] == (name == "accepted")]
    count = f"{len(rows)} of the {len(recorded['rows'])} model types of transformers {recorded['transformers']}:"
    if name == "rejected":
        return f"{count}\n\n{_by_reason('because', rows)}"
    types = ", ".join(f"`{row['model_type']}`" for row in rows)
    return f"{count}\n\n{textwrap.fill(types, 132, break_long_words=False, break_on_hyphens=False)}"


def _by_reason(head: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each reason, or for those that are accepted."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["reason"] or "accepted", []).append(f"`{row['model_type']}`")
    return markdown_table([head, "`model_type`"], [[key, ", ".join(types)] for key, types in sorted(groups.items())])


def main() -> None:
    """Check the types that the command line names, and write the page if it names none."""
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, help="results as JSON; without types the file of the page")
    parser.add_argument("types", nargs="*")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for row in outcomes(given.types or model_types()):
        rows.append(row)
        print_text(f"{row['model_type']}: {'accepted' if row['accepted'] else row['reason']}")
    out = given.out or (None if given.types else RESULTS)
    if out is not None:
        out.write_text(json.dumps({"transformers": transformers.__version__, "rows": rows}, indent=1) + "\n")
    if not given.types and given.out is None:
        write({"docs/families.md": table})


if __name__ == "__main__":
    main()
