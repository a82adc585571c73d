"""Evaluate a checkpoint: exact match on the held-out built-in task families, with the number of examples.

make eval
python scripts/evaluate.py runs/default/sft
python scripts/evaluate.py runs/default/sft --max-examples 20 --out runs/default/sft/evaluation.json
"""

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="run, step directory, model folder or hub id; default: the newest run")
    parser.add_argument("--max-examples", type=int, help="examples per family; default: all held-out")
    parser.add_argument("--batch-size", type=int, default=64, help="prompts decoded together")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="longest answer in tokens")
    parser.add_argument("--out", help="write the scores and every example to this JSON file")
    args = parser.parse_args()

    from sftkit import runtime
    from sftkit.config import EvalConfig, LogConfig, ModelConfig, RunConfig, TrainConfig
    from sftkit.evals.suite import Suite
    from sftkit.model import load_model, load_tokenizer, newest_run, resolve
    from sftkit.rundir import report_families

    rt = runtime.start(RunConfig(dir="."), TrainConfig(), LogConfig(wandb="off"))
    path = resolve(args.path or newest_run())
    tokenizer = load_tokenizer(ModelConfig(path=path))
    orig_model = load_model(ModelConfig(path=path), tokenizer, 0, rt.precision).to(rt.device)

    config = EvalConfig(max_examples=args.max_examples, batch_size=args.batch_size, max_new_tokens=args.max_new_tokens)
    suite = Suite(config, orig_model, tokenizer, rt)
    values, examples = suite.families()
    report_families(path, values, examples, args.out, rt)


if __name__ == "__main__":
    from sftkit.runtime import script

    script(main)
