"""Evaluate a run, a checkpoint or a Hugging Face model on tasks: values, 95 % intervals, chance level, examples.

.venv/bin/python scripts/evaluate.py runs/default/sft
.venv/bin/python scripts/evaluate.py HuggingFaceTB/SmolLM2-135M-Instruct mmlu arc_easy --data DIR --out \
runs/evals/smollm2
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/evaluate.py runs/default/sft gsm8k \
--format chat
.venv/bin/python scripts/evaluate.py runs/default/sft winogrande --backend lm_eval
.venv/bin/python scripts/evaluate.py runs/default/sft --val held_out.jsonl "wikitext[validation]" --out runs/evals/sft
"""

from sftkit.runtime.script import script


def main() -> None:
    """Evaluate a model on every rank."""
    from sftkit.evals.flags import check_arguments, flags_named, parse

    args = parse(__doc__)
    check_arguments(args)  # an invalid or missing argument is rejected here, before torch is imported

    from sftkit.config.schema import RunConfig, TrainConfig
    from sftkit.runtime import start as runtime

    with runtime.start(RunConfig(dir="."), TrainConfig()) as rt, flags_named():
        evaluate(args, rt)


def evaluate(args, rt) -> None:
    """Load the model, measure it, and print and write the results."""
    from pathlib import Path

    from sftkit.config.schema import ModelConfig
    from sftkit.evals import results
    from sftkit.evals.flags import eval_config
    from sftkit.evals.harness import load_for_evaluation, load_validation, longest_of
    from sftkit.evals.suite import Suite, check_room, load_tasks
    from sftkit.models.tokenizer import load_tokenizer
    from sftkit.reports.page import report_of_folder

    source = ModelConfig(path=args.path)
    tokenizer = load_tokenizer(source)
    config = eval_config(args)

    # Errors in the tasks and the data are reported before the model is loaded.
    longest = longest_of(source, tokenizer)
    tasks = load_tasks(config, tokenizer, rt)
    check_room(tasks, config, longest)
    validation, layout = load_validation(args.val, source, longest, tokenizer, rt)

    model = load_for_evaluation(source, tokenizer, rt)
    name = source.path
    suite = Suite(config, model.orig_model, tokenizer, rt, model, validation, layout, tasks=tasks, model_name=name)
    values, evaluated = suite.validate(), suite.run_tasks()
    rt.print(f"\n{name}\n{results.results_table(evaluated, values)}")
    if args.out is not None and rt.is_main:
        results.write_results(Path(args.out), evaluated)
        results.write_validation(Path(args.out), values, suite.about_validation)
        rt.print(f"every example: {args.out}")
        report_of_folder(Path(args.out), rt.print)


if __name__ == "__main__":
    script(main)
