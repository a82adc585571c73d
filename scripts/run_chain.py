"""Run the whole chain of recipes in one folder: base -> mid -> chat SFT -> evaluate, then a summary.

.venv/bin/python scripts/run_chain.py recipes/default                       a small model that learns, in some minutes
.venv/bin/python scripts/run_chain.py recipes/smoke                         a tiny model, for a first look
.venv/bin/python scripts/run_chain.py recipes/default train.max_steps=100   overrides go to all stages
"""

import sys
import time

from sftkit.runtime.script import script


def main() -> int:
    """Run the stages one after the other, and return the exit code."""
    from pathlib import Path

    from sftkit.config.commands import expanded, invocation, running, typed
    from sftkit.config.terminal import print_text
    from sftkit.launch import launch
    from sftkit.launch.chain import CHAIN_SCRIPTS, evaluate_command, is_evaluated, read_stages, summary, was_stopped
    from sftkit.rundir.status import newest_start

    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        help = "--help" in sys.argv or "-h" in sys.argv
        print_text(f"usage: {running()} FOLDER [key=value ...]\n\n{typed(__doc__ or '')}", error=not help)
        return 0 if help else 2
    folder, overrides = Path(expanded(sys.argv[1])), sys.argv[2:]
    recipes = read_stages(folder, overrides)  # all three are checked before the first one starts

    runs = {stage: Path(cfg.run.dir) for stage, cfg in recipes.items()}
    started = time.perf_counter()
    for stage, name in CHAIN_SCRIPTS.items():
        print_text(f"\n=== {stage}: {folder / stage}.yaml")
        earlier = newest_start(runs[stage])
        code = launch.run_script(name, str(folder / f"{stage}.yaml"), overrides)
        if was_stopped(runs[stage], earlier, code):
            words = [word for word in sys.argv[1:] if not word.startswith("train.resume=")]
            print_text(f"stopped; resume with: {invocation('scripts/run_chain.py', *words, 'train.resume=auto')}")
            return code
        if code != 0:
            return code
    print_text("\n=== evaluate")
    code = 0
    sft = recipes["sft"]
    if is_evaluated(sft.run, sft.eval):
        print_text(f"already evaluated: {runs['sft']}")
    else:
        code = launch.call(evaluate_command(sft.run, sft.eval))
    if code == 0:
        print_text(summary(runs, time.perf_counter() - started))
    return code


if __name__ == "__main__":
    script(main)
