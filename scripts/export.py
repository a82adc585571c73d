"""Write the model of a run into a folder that others load, compare what plain transformers answers there, and say how
to serve it.

.venv/bin/python scripts/export.py runs/default/sft --out exported/sft
.venv/bin/python scripts/export.py runs/lora/sft --out exported/merged --merge --dtype bf16
.venv/bin/python scripts/export.py runs/lora/sft --out exported/adapter          the adapter alone, as peft has it
.venv/bin/python scripts/export.py runs/moe/sft --out exported/adapter --per-expert    for servers: a pair per expert
"""

from sftkit.runtime.script import script


def main() -> None:
    """Export a model."""
    from sftkit.config.commands import Parser, path, path_or_id
    from sftkit.config.terminal import print_text
    from sftkit.export import check_export
    from sftkit.rundir.names import newest_run
    from sftkit.runtime.hub import find_model

    parser = Parser(__doc__)
    parser.add_argument("run", nargs="?", type=path_or_id, help="run, step directory or model; default: the newest run")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="the new folder")
    parser.add_argument("--merge", action="store_true", help="add an adapter to its model, in fp32, and write that")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="precision of weights; default: as stored")
    parser.add_argument("--max-shard", default="5GB", metavar="SIZE", help="largest file of weights; default: 5GB")
    parser.add_argument(
        "--onto",
        choices=("full", "nf4"),
        help="what --merge adds an adapter to: the weights of its model (default; what servers and `make chat` add it "
        "to), or what NF4 holds of them, as dense weights: the model that a run with adapter.base=nf4 has trained",
    )
    parser.add_argument(
        "--per-expert", action="store_true", help="of an adapter of experts: a pair for each matrix of each expert"
    )
    args = parser.parse_args()
    folder = find_model(args.run or newest_run())
    options = {name: getattr(args, name) for name in ("merge", "dtype", "max_shard", "onto", "per_expert")}
    check_export(folder, args.out, **options)  # what is wrong is rejected here, before torch is imported

    from sftkit.export.export import export
    from sftkit.runtime.start import quiet_libraries

    quiet_libraries()
    for line in export(folder, args.out, **options):
        print_text(line)


if __name__ == "__main__":
    script(main)
