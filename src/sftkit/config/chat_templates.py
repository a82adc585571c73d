"""The chat templates that a recipe may name, and the tokens that each needs."""

CHAT_TEMPLATES: dict[str, tuple[str, ...]] = {"chatml": ("<|im_start|>", "<|im_end|>")}
"Name, which is that of its file, data/tokens/NAME.jinja -> the tokens that begin and end its turns."
