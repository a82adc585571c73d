"""Write the model of a run into a folder that others load, compare what plain transformers answers there, and say how
to serve it; or publish such a folder on the Hugging Face hub.

.venv/bin/python scripts/export.py runs/default/sft --out exported/sft
.venv/bin/python scripts/export.py runs/lora/sft --out exported/merged --merge --dtype bf16
.venv/bin/python scripts/export.py runs/lora/sft --out exported/adapter          the adapter alone, as peft has it
.venv/bin/python scripts/export.py runs/moe/sft --out exported/adapter --per-expert    for servers: a pair per expert
.venv/bin/python scripts/export.py exported/sft --push me/my-model               what --yes would publish
"""

from sftkit.runtime.script import script


def main() -> None:
    """Export a model."""
    from pathlib import Path

    from sftkit.config.commands import Parser, path, path_or_id
    from sftkit.config.terminal import print_text
    from sftkit.export import LARGEST_FILE, check_export
    from sftkit.export.push import check_push, push
    from sftkit.rundir.names import newest_run
    from sftkit.runtime.hub import find_model

    parser = Parser(__doc__)
    parser.takes_second_word = "--out"
    parser.add_argument("run", nargs="?", type=path_or_id, help="run, step directory or model; default: the newest run")
    parser.add_argument("--out", type=path, metavar="DIR", help="the new folder")
    parser.add_argument("--merge", action="store_true", help="add an adapter to its model, in fp32, and write that")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="precision of weights; default: as stored")
    parser.add_argument(
        "--max-shard", default=LARGEST_FILE, metavar="SIZE", help="largest file of weights; default: %(default)s"
    )
    parser.add_argument(
        "--onto",
        choices=("full", "nf4"),
        help="what --merge adds an adapter to: the weights of its model (default; what servers and `make chat` add it "
        "to), or what NF4 holds of them, as dense weights: the model that a run with adapter.base=nf4 has trained",
    )
    parser.add_argument(
        "--per-expert", action="store_true", help="of an adapter of experts: a pair for each matrix of each expert"
    )
    parser.add_argument("--push", metavar="ORG/NAME", help="publish the folder on the hub: only shown without --yes")
    parser.add_argument("--private", action="store_true", help="a new repository on the hub is private")
    parser.add_argument("--yes", action="store_true", help="publish now")
    args = parser.parse_args()
    folder = find_model(args.run or newest_run())
    options = {name: getattr(args, name) for name in ("merge", "dtype", "max_shard", "onto", "per_expert")}
    # What is wrong is rejected here, before torch is imported.
    check_export(folder, args.out, **options, push=args.push, private=args.private, yes=args.yes)
    repository = check_push(args.push, private=args.private) if args.yes else None
    if args.out is not None:
        from sftkit.export.export import export
        from sftkit.runtime.start import quiet_libraries

        quiet_libraries()
        for line in export(folder, args.out, **options):
            print_text(line)
    if args.push is not None:
        for line in push(args.out or Path(folder), args.push, repository, private=args.private):
            print_text(line)


if __name__ == "__main__":
    script(main)
