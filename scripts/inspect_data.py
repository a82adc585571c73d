"""Look at the data of a recipe before training: what is learned, what is dropped, what it will cost. No GPU, no weights.

make inspect RECIPE=recipes/qwen3_0_6b/sft.yaml
python scripts/inspect_data.py recipes/default/sft.yaml data.max_length=1024 --preview 5 --html look.html
python scripts/inspect_data.py recipes/default/sft.yaml --gpu-gib 80 --json preflight.json
python scripts/inspect_data.py my_recipe.yaml --stage mid
"""

import argparse
import sys
from pathlib import Path

from sftkit.config.load import load_config


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument(
        "--stage",
        choices=("base", "mid", "sft"),
        help="what it learns is shown; by the recipe's name: base*.yaml, mid*.yaml, otherwise sft",
    )
    parser.add_argument("--preview", metavar="N", type=number, default=3, help="documents to show with their masks; 3")
    parser.add_argument("--html", metavar="FILE", type=new_file, help="all of it as one HTML file, without network")
    parser.add_argument(
        "--json", metavar="FILE", type=new_file, help="the numbers: what training writes to preflight.json"
    )
    parser.add_argument("--gpu-gib", metavar="GIB", type=size, help="memory of the GPU that it will run on; this one's")
    args, sys.argv[1:] = parser.parse_known_args()
    cfg = load_config(f"{__doc__}\n{parser.format_help().strip()}")  # the words that are left: recipe and key=value

    import json
    from contextlib import nullcontext

    from rich.console import Console

    from sftkit.data import loader, stages
    from sftkit.data.pack import make_layout, plan_epoch
    from sftkit.models.load import inherit, load_tokenizer, new_tokenizer
    from sftkit.models.structure import positions
    from sftkit.preflight import look as preflight
    from sftkit.preflight import terminal as inspection
    from sftkit.preflight.page import page
    from sftkit.runtime.start import quiet_libraries

    quiet_libraries()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    training = cfg.model.train_tokenizer
    tokenizer = (
        new_tokenizer(cfg.model, training, cfg.data.train, cfg.data.on_bad_row)
        if training
        else load_tokenizer(cfg.model)
    )
    precision = inspection.gpu_precision(cfg)
    orig_model = inspection.shell_model(cfg.model, tokenizer, precision)
    longest = positions(orig_model) if orig_model is not None else None
    max_length, inherited = inherit(cfg.model, cfg.data.max_length, tokenizer, precision, longest)
    console.print(inherited, markup=False, soft_wrap=True)

    # Tokenized as the stage's own script does, which then finds it in the cache.
    stage = args.stage or stages.stage_of(sys.argv[1])
    console.print(inspection.stage_text(stage, args.stage is None), markup=False, soft_wrap=True)
    _, tokenize_of = stages.STAGES[stage]
    tokenize = tokenize_of(cfg.data, tokenizer, max_length)
    examples, validation = loader.load_examples(cfg.data, tokenize, nullcontext())
    layout = make_layout(cfg.data, max_length, cfg.train, world_size=1, lengths=examples.lengths)
    epoch = plan_epoch(examples.lengths, layout, cfg.run.seed, epoch=0)
    plan = inspection.memory_plan(cfg, orig_model, layout, args.gpu_gib)

    found = preflight.look(cfg, tokenizer, examples, validation, layout, epoch, orig_model, plan)
    samples = inspection.previews(examples, tokenizer, args.preview)
    inspection.show(console, found, samples)
    if args.html:
        args.html.write_text(page(f"Before training: {sys.argv[1]}, {stage}", found, samples), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")


def number(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word}: how many documents? Take 0 or more, say 3")
    return int(word)


def size(word: str) -> float:
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise argparse.ArgumentTypeError(f"{word}: GiB of a GPU, more than 0, say 80")
    return gib


def new_file(word: str) -> Path:
    path = Path(word)
    if path.is_dir() or not path.parent.is_dir():
        what = f"{word} is a folder" if path.is_dir() else f"{word}: there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{what}; name a file in a folder that exists")
    return path


if __name__ == "__main__":
    from sftkit.runtime.script import script

    script(main)
