"""The names of the tasks that a recipe may ask for, and what a recipe has to know of them."""

TASKS = (
    *("mmlu", "arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa", "boolq"),
    *("truthfulqa_mc1", "truthfulqa_mc2"),
    *("gsm8k", "humaneval", "mbpp", "ifeval"),
)
"Published tasks, in the order in which messages list them."
EVAL_TASKS = ("families", *TASKS)
"What eval.tasks takes with backend sftkit; families: the held-out built-in ones."
CODE = ("humaneval", "mbpp")
"Tasks that run what the model writes."
WITHOUT_SHOTS = ("truthfulqa_mc1", "truthfulqa_mc2", "humaneval", "ifeval")
"Tasks that take no few-shot examples."
TASK_METRICS: dict[str, tuple[str, ...]] = {
    "families": ("acc",),
    **dict.fromkeys(("mmlu", "boolq", "truthfulqa_mc1"), ("acc",)),
    **dict.fromkeys(("arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa"), ("acc", "acc_norm")),
    "truthfulqa_mc2": ("mc2",),
    "gsm8k": ("exact_match", "exact_match_flexible"),
    **dict.fromkeys(CODE, ("pass_at_1",)),
    "ifeval": ("prompt_strict", "inst_strict", "prompt_loose", "inst_loose"),
}
"Task -> the metrics that it is judged by."
METRICS_IN_CHAT = {task: ("acc",) for task, metrics in TASK_METRICS.items() if "acc" in metrics} | {
    "gsm8k": ("exact_match",)
}
"The same with eval.format chat, of tasks that are judged otherwise there."
