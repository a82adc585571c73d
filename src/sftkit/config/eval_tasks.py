"""The names of the tasks that a recipe may ask for, and what a recipe has to know of them."""

TASKS = (
    *(
        "mmlu",
        "arc_easy",
        "arc_challenge",
        "hellaswag",
        "piqa",
        "openbookqa",
        "boolq",
        "truthfulqa_mc1",
        "truthfulqa_mc2",
    ),
    *("gsm8k", "humaneval", "mbpp", "ifeval"),
)
"Published tasks, in the order in which messages list them."
EVAL_TASKS = ("families", *TASKS)
"What eval.tasks takes with backend sftkit; families: the held-out built-in ones."
CODE = ("humaneval", "mbpp")
"Tasks that run what the model writes."
WITHOUT_SHOTS = ("truthfulqa_mc1", "truthfulqa_mc2", "humaneval", "ifeval")
"Tasks that take no few-shot examples."
