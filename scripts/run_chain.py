"""The whole chain on one folder of recipes: base -> mid -> chat SFT -> evaluate, then a summary.

make sft        (recipes/default)
make smoke      (recipes/smoke)
python scripts/run_chain.py recipes/default train.max_steps=100     overrides go to all three stages
"""

import sys
import time
from pathlib import Path

from sftkit.config.load import fail
from sftkit.errors import ConfigError
from sftkit.launch import launch
from sftkit.launch.chain import STAGES, evaluate_command, read_stages, summary, was_stopped


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if "--help" in sys.argv or "-h" in sys.argv else 2
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    try:
        recipes = read_stages(folder, overrides)  # all three are checked before the first one starts
    except ConfigError as error:
        fail(str(error))

    runs = {stage: Path(cfg.run.dir) for stage, cfg in recipes.items()}
    started = time.perf_counter()
    for stage, script in STAGES.items():
        print(f"\n=== {stage}: {folder / stage}.yaml", flush=True)
        stage_started = time.time()
        code = launch.run(script, str(folder / f"{stage}.yaml"), overrides)
        if was_stopped(runs[stage], stage_started):
            print("stopped; `train.resume=auto` goes on from the newest checkpoint")
            return 130
        if code != 0:
            return code
    print("\n=== evaluate", flush=True)
    code = launch.call(evaluate_command(recipes["sft"]))
    if code == 0:
        print(summary(runs, time.perf_counter() - started))
    return code


if __name__ == "__main__":
    sys.exit(main())
