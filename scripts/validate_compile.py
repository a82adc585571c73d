"""Check whether compiling a recipe makes it faster and changes its results: train it eagerly and compiled, and judge
the runs.

.venv/bin/python scripts/validate_compile.py recipes/qwen3_0_6b/sft.yaml --layouts packed bucketed --processes 1 4 \
--steps 100

Every run has the same data, seed and steps, its own processes and empty compiler caches. One more eager run with
another seed shows how much two runs differ anyway. The ledger holds the evaluations of earlier commits. Exit code 1
if any criterion fails.

.venv/bin/python scripts/validate_compile.py --judge runs/validate/sft/validation.json judges earlier runs again.
"""

import sys

from sftkit.config.commands import ROOT
from sftkit.runtime.script import script


def main() -> int:
    """Run the cases of a plan, judge them, and return the exit code."""
    sys.path.insert(0, str(ROOT))  # labs is next to the scripts and is not installed as a module

    from labs.validate.run import parse, results_dir, validation_plan

    args = parse(__doc__)

    from labs.validate.run import judge_again, run_validation
    from labs.validate.verdicts import criteria_passed, markdown_page, open_ledger, record_validation, send_result
    from sftkit.config.load import read_config
    from sftkit.config.terminal import print_text

    ledger = open_ledger(args.ledger, records=args.record)
    if args.judge:
        result, out = judge_again(args.judge, ledger), args.judge.parent
    else:
        plan, out = validation_plan(args), results_dir(args)
        result = run_validation(plan, out, ledger)
        if line := send_result(result, out, read_config(plan.recipe, plan.overrides, world_size=1).log):
            print_text(line)
    print_text(f"\n{markdown_page(result)}\nresult: {out}/validation.html")
    if ledger and ledger.records:
        print_text(record_validation(result, ledger.path))
    print_text(criteria_passed(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    script(main)
