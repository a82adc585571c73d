"""Inspect the data of a recipe before training: targets, dropped rows, cost. No GPU and no weights are needed.
Tokenized data stays in the cache, where training finds it.

.venv/bin/python scripts/inspect_data.py recipes/default/sft.yaml data.max_length=1024 --preview 5 --html look.html
.venv/bin/python scripts/inspect_data.py recipes/default/sft.yaml --gpu-gib 80 --json preflight.json
.venv/bin/python scripts/inspect_data.py my_recipe.yaml --stage mid
.venv/bin/python scripts/inspect_data.py recipes/llama_3_1_8b/sft.yaml --config_file accelerate_configs/fsdp2.yaml \
--gpu-gib 79
"""

import json

from sftkit.runtime.script import script


def main() -> None:
    """Inspect the data, print the findings, and write the requested files."""
    from sftkit.preflight.inputs import parse

    cfg, flags = parse(__doc__)  # invalid arguments are rejected here, before torch is imported

    from sftkit.config.tables import stage_of_recipe
    from sftkit.config.terminal import print_text
    from sftkit.config.topology import machines_of
    from sftkit.data.batches.epoch import plan_epoch
    from sftkit.data.batches.pack import make_layout
    from sftkit.launch.layouts import advice
    from sftkit.models.load import resolve_max_length
    from sftkit.models.structure import positions
    from sftkit.preflight import analysis
    from sftkit.preflight import terminal as inspection
    from sftkit.preflight.terminal import page
    from sftkit.runtime.start import quiet_libraries

    quiet_libraries()

    # The start of a run: its tokenizer, and the sizes of its model without the weights.
    tokenizer = analysis.tokenizer_of(cfg.model, cfg.data)
    precision = analysis.gpu_precision(cfg.train)
    orig_model = analysis.meta_model(cfg.model, tokenizer, precision, cfg.train.freeze, cfg.adapter, cfg.adapters)
    precision = analysis.precision_text(cfg.train)
    longest = positions(orig_model) if orig_model else None
    max_length, start = resolve_max_length(cfg.model, cfg.data.max_length, tokenizer, precision, longest)
    print_text(start)

    # Its documents and their steps.
    stage = flags.stage or stage_of_recipe(flags.recipe)
    print_text(inspection.stage_text(stage, by_name=flags.stage is None))
    examples, validation = analysis.prepared_examples(cfg.data, stage, tokenizer, max_length)
    lengths, encoded = examples.lengths, examples.encoded
    layout = make_layout(cfg.data, cfg.train, lengths, max_length, flags.topology.row_ranks, encoded=encoded)
    epoch = plan_epoch(lengths, layout, cfg.run.seed, epoch=0)
    plan = analysis.memory_plan(cfg, orig_model, layout, flags.gpu_gib, flags.topology)
    file, gpu_bytes = flags.config_file, plan and plan.total_bytes
    # a single process has no accelerate config
    if file and (line := advice(cfg, flags.topology, gpu_bytes, file.name, machines_of(file))):
        print_text(line)

    data = {"examples": examples, "validation": validation, "layout": layout, "epoch": epoch}
    found = analysis.analyse(cfg, tokenizer, **data, orig_model=orig_model, plan=plan)
    samples = inspection.previews(examples, tokenizer, flags.preview)
    inspection.print_preflight(found, samples)
    if flags.html:
        flags.html.write_text(page(f"Before training: {flags.recipe}, {stage}", found, samples), encoding="utf-8")
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    script(main)
