"""Mid-training: text and conversations together, with every token a target. The model meets the chat format.

.venv/bin/python -m sftkit.launch scripts/mid_train.py recipes/default/mid.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/mid_train.py recipes/qwen3_0_6b/mid.yaml
"""

from sftkit.runtime.script import script


def row_tokenizer(data, tokenizer, max_length):
    """Make every token of texts and conversations a target, unless data.targets narrows those of conversations."""
    from sftkit.data.tokens import chat, text
    from sftkit.data.tokens.sources import RowTokenizer

    learning = chat.Learning(data.targets or "all", data.thinking, data.split_turns)
    return RowTokenizer(text.tokenize_any, tokenizer, max_length, data.too_long, learning, data.special_tokens_in_text)


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Read the recipe, then key=value; an invalid or missing setting is rejected here, before torch is imported.
    cfg = load_config(__doc__, start_rules("mid"))

    from sftkit.models.tokenizer import load_tokenizer
    from sftkit.objectives.objective import NextToken
    from sftkit.train import assemble

    with assemble.start_run(cfg, "mid") as run:
        tokenizer = load_tokenizer(cfg.model)
        # The objective: the negative log-likelihood of each target, given all tokens before it.
        objective = NextToken(cfg.loss)
        # All other parts are the same in every stage: load model and data, make the engine, run the loop.
        assemble.train_stage(run, tokenizer, row_tokenizer, objective)


if __name__ == "__main__":
    script(main)
