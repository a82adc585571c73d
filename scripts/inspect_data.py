"""Look at the data of a recipe before training: lengths, targets, padding of each layout, coloured samples. No GPU.

make inspect RECIPE=recipes/qwen3_0_6b/sft.yaml
python scripts/inspect_data.py recipes/default/sft.yaml data.max_length=1024
"""

from functools import partial

from sftkit.recipe import load_config


def main() -> None:
    cfg = load_config(__doc__)

    from contextlib import nullcontext

    from rich.console import Console

    from sftkit import inspection
    from sftkit.data import loader, sources, text
    from sftkit.model import inherit, load_tokenizer, new_tokenizer
    from sftkit.runtime import quiet_libraries

    quiet_libraries()
    training = cfg.model.train_tokenizer
    tokenizer = (
        new_tokenizer(cfg.model, training, cfg.data.train, cfg.data.on_bad_row)
        if training
        else load_tokenizer(cfg.model)
    )
    max_length, _ = inherit(cfg.model, cfg.data.max_length, tokenizer, "float32")

    tokenize = partial(
        text.tokenize_any,
        tokenizer=tokenizer,
        max_length=max_length,
        too_long=cfg.data.too_long,
        targets="assistant",
    )
    examples, _ = loader.load_examples(cfg.data, tokenize, nullcontext())

    console = Console(highlight=False)
    console.print("\n".join(sources.describe(examples)), markup=False)
    console.print("targets of conversations as chat_sft.py learns them; mid_train.py learns every token")
    console.print()
    console.print(inspection.length_histogram(examples), markup=False)
    console.print()
    console.print(inspection.layout_table(examples, cfg.data, cfg.train, max_length))
    console.print("[green underline]targets[/] [dim]context[/]")
    for sample in inspection.coloured(examples, tokenizer, count=3):
        console.print(sample)


if __name__ == "__main__":
    from sftkit.runtime import script

    script(main)
