"""Inspect the data of a recipe before training: targets, dropped rows, cost. No GPU and no weights are needed.
Tokenized data stays in the cache, where training finds it.

.venv/bin/python scripts/inspect_data.py recipes/default/sft.yaml data.max_length=1024 --preview 5 --html look.html
.venv/bin/python scripts/inspect_data.py recipes/default/sft.yaml --gpu H100 --json preflight.json
.venv/bin/python scripts/inspect_data.py my_recipe.yaml --stage mid
.venv/bin/python scripts/inspect_data.py recipes/llama_3_1_8b/sft.yaml --config_file accelerate_configs/fsdp2.yaml \
--gpu A100
"""

import json

from sftkit.runtime.script import script


def main() -> None:
    """Inspect the data, print the findings, and write the requested files."""
    from sftkit.preflight.flags import parse

    cfg, flags = parse(__doc__)  # invalid arguments are rejected here, before torch is imported

    from sftkit.config.terminal import print_text
    from sftkit.config.topology import machines_of
    from sftkit.data.tokens.sources import stage_rule
    from sftkit.launch.layouts import advice
    from sftkit.models.load import resolve_max_length
    from sftkit.models.structure import positions
    from sftkit.preflight import analysis
    from sftkit.preflight import terminal as inspection
    from sftkit.runtime.hardware import gpu_here
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

    print_text(inspection.stage_text(flags.stage, is_asked=flags.is_asked))
    tokenize = stage_rule(flags.stage)(cfg.data, tokenizer, max_length)
    if cfg.adapters:
        from sftkit.train.several import data_of_several  # most recipes have one adapter or none

        data = data_of_several(cfg, tokenize, orig_model)
    else:
        data = analysis.data_of(cfg, tokenize, flags.topology.row_ranks)
    plan = analysis.memory_plan(cfg, orig_model, data["layout"], flags.gpu_gib, flags.topology)
    file, gpu_bytes = flags.config_file, plan and plan.total_bytes  # a single process has no file
    if file and (line := advice(cfg, flags.topology, gpu_bytes, file.name, machines_of(file))):
        print_text(line)

    found = analysis.analyse(cfg, tokenizer, **data, orig_model=orig_model, plan=plan, card=flags.gpu or gpu_here())
    samples = inspection.previews(data["examples"], tokenizer, flags.preview)
    inspection.print_preflight(found, samples)
    if flags.html:
        flags.html.write_text(
            inspection.page(f"Before training: {flags.recipe}, {flags.stage}", found, samples), encoding="utf-8"
        )
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    script(main)
