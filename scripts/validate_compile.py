"""Does compiling pay on this recipe, and does it change anything? Trains it eagerly and compiled, and judges the runs.

make validate RECIPE=recipes/qwen3_0_6b/sft.yaml
python scripts/validate_compile.py recipes/qwen3_0_6b/sft.yaml --layouts packed bucketed --processes 1 4 --steps 100

Every run has the same data, seed and steps, processes of its own and empty compiler caches. One more eager run with
another seed says how far apart two runs are anyway. The ledger says what earlier commits evaluated to. Exit code 1 if
any criterion fails.

python scripts/validate_compile.py --judge runs/validate/sft/validation.json judges earlier runs again.
"""

import argparse
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="YAML of the stage that is trained")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    parser.add_argument("--script", default="scripts/chat_sft.py", help="the stage (scripts/chat_sft.py)")
    parser.add_argument("--layouts", nargs="+", help="packed, bucketed, fixed, dynamic; default: the recipe's own")
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[1], help="GPUs (or CPU processes) of the runs; default: 1"
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (100)")
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that count in no speed and no loss (10)")
    parser.add_argument("--window", type=int, default=5, help="steps between logged lines (5)")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds that one run may take (3600)")
    parser.add_argument("--judge", type=Path, metavar="VALIDATION.json", help="train nothing: judge these earlier runs")
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help="earlier results (benchmarks/ledger.jsonl if there)"
    )
    parser.add_argument(
        "--record", action="store_true", help="append what was found to the ledger if everything passes"
    )
    parser.add_argument("--out", type=Path, help="a new folder (runs/validate/RECIPE-TIME)")
    args = parser.parse_intermixed_args()
    if (args.recipe is None) == (args.judge is None):
        parser.error("name a recipe, or earlier runs with --judge")

    from sftkit.config.load import fail, read_config
    from sftkit.errors import ConfigError
    from sftkit.experiments.validate.cases import Plan
    from sftkit.experiments.validate.ledger import open_ledger, record
    from sftkit.experiments.validate.page import markdown
    from sftkit.experiments.validate.run import judge_again, validate

    try:
        ledger = open_ledger(args.ledger, args.record)
        if args.judge:
            result, out = judge_again(args.judge, ledger), args.judge.parent
        else:
            cfg = read_config(args.recipe, args.overrides, world_size=1)
            plan = Plan(
                recipe=args.recipe,
                script=args.script,
                layouts=tuple(dict.fromkeys(args.layouts or [cfg.data.layout])),
                processes=tuple(sorted(set(args.processes))),
                steps=args.steps,
                warm_up=args.warm_up,
                window=args.window,
                overrides=tuple(args.overrides),
                timeout_seconds=args.timeout,
            )
            name = "-".join(Path(args.recipe).with_suffix("").parts[-2:])
            out = args.out or Path("runs/validate") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
            result = validate(plan, out, ledger)
        print(f"\n{markdown(result)}\nresult: {out}/validation.html")
        if ledger and ledger.records:
            print(record(result, ledger.path))
    except ConfigError as error:
        fail(str(error))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
