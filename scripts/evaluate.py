"""Evaluate a run, a checkpoint or any Hugging Face model on one or more tasks: values, 95 % intervals, chance level, examples.

make eval
python scripts/evaluate.py runs/default/sft
python scripts/evaluate.py HuggingFaceTB/SmolLM2-135M-Instruct mmlu arc_easy --data DIR --out runs/evals/smollm2
accelerate launch --config_file accelerate_configs/ddp.yaml scripts/evaluate.py runs/default/sft gsm8k --format chat
python scripts/evaluate.py runs/default/sft winogrande --backend lm_eval
python scripts/evaluate.py runs/default/sft --val held_out.jsonl "wikitext[validation]" --out runs/evals/sft
"""

import argparse

from sftkit.evals.flags import flags_named


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="run, step directory, model folder or hub id; default: the newest run")
    parser.add_argument(
        "tasks",
        nargs="*",
        help="default: families, the held-out built-in tasks, unless --val is given; docs/evaluation.md lists all",
    )
    parser.add_argument(
        "--val", nargs="+", default=(), help="loss and bits per byte of these: files, folders or hub ids, or ID[SPLIT]"
    )
    parser.add_argument("--backend", choices=("sftkit", "lm_eval"), default="sftkit", help="who runs the tasks")
    parser.add_argument("--data", help="folder with the rows of the tasks; default: the hub")
    parser.add_argument(
        "--shots",
        type=int,
        help="worked examples before each question, of tasks that take any; default: the task's own number",
    )
    parser.add_argument("--format", choices=("completion", "chat"), default="completion", help="how questions are put")
    parser.add_argument(
        "--allow-code-execution", action="store_true", help="humaneval, mbpp: run the model's programs, sandboxed"
    )
    parser.add_argument("--max-examples", type=int, help="examples per task, and per family of families; default: all")
    parser.add_argument("--batch-size", type=int, default=64, help="prompts that go through the model together")
    parser.add_argument("--max-new-tokens", type=int, help="longest answer in tokens; default: the task's own")
    parser.add_argument("--out", help="folder for results.json, validation.json and TASK.jsonl with every example")
    return parser.parse_args()


def main() -> None:
    args = parse()

    from sftkit.config.schema import RunConfig, TrainConfig
    from sftkit.evals.loading import check_arguments
    from sftkit.runtime import start as runtime

    with flags_named():
        check_arguments(args)
    with runtime.start(RunConfig(dir="."), TrainConfig()) as rt:
        evaluate(args, rt)


@flags_named()
def evaluate(args, rt) -> None:
    from pathlib import Path

    from sftkit.config.schema import EvalConfig, ModelConfig
    from sftkit.evals import results
    from sftkit.evals.loading import load, load_validation, longest_of
    from sftkit.evals.suite import Suite, check_room, load_tasks
    from sftkit.models.load import load_tokenizer
    from sftkit.reports.write import report_of_folder
    from sftkit.runtime.rundir import newest_run, resolve

    source = ModelConfig(path=resolve(args.path or newest_run()))
    tokenizer = load_tokenizer(source)
    config = EvalConfig(
        tasks=tuple(args.tasks or (() if args.val else ("families",))),
        backend=args.backend,
        data=args.data,
        shots=args.shots,
        format=args.format,
        allow_code_execution=args.allow_code_execution,
        max_examples=args.max_examples,
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        samples=0,
    )

    # Whatever is wrong with the tasks and the data is said before the model is loaded.
    tasks = load_tasks(config, tokenizer, rt)
    longest = longest_of(source, tokenizer)
    check_room(tasks, config, longest)
    validation, layout = load_validation(args.val, source, longest, tokenizer, rt)

    model = load(source, tokenizer, rt)
    name = source.path
    suite = Suite(config, model.orig_model, tokenizer, rt, model, validation, layout, tasks=tasks, model_name=name)
    values, found = suite.validate(), suite.run_tasks()
    rt.say(f"\n{name}\n{results.table([one.result for one in found], values)}")
    if args.out is not None and rt.is_main:
        results.write(Path(args.out), found)
        results.write_validation(Path(args.out), values, suite.about_validation)
        rt.say(f"every example: {args.out}")
        report_of_folder(Path(args.out), rt.say)


if __name__ == "__main__":
    from sftkit.runtime.script import script

    script(main)
