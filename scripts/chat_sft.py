"""Chat SFT: teach a checkpoint to answer. Only assistant tokens are targets.

.venv/bin/python -m sftkit.launch scripts/chat_sft.py recipes/default/sft.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/chat_sft.py recipes/qwen3_0_6b/sft.yaml \
train.max_steps=200
"""

from sftkit.runtime.script import script


def row_tokenizer(data, tokenizer, max_length):
    """Make the assistant's tokens of a conversation targets, unless data.targets says otherwise; reject texts.

    chat.tokenize makes the loss mask. No later code may change it.
    """
    from sftkit.data.tokens import chat
    from sftkit.data.tokens.sources import RowTokenizer

    learning = chat.Learning(data.targets or "assistant", data.thinking, data.split_turns)
    return RowTokenizer(chat.tokenize, tokenizer, max_length, data.too_long, learning)


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Read the recipe, then key=value; an invalid or missing setting is rejected here, before torch is imported.
    cfg = load_config(__doc__, start_rules("sft"))

    from sftkit.models.tokenizer import load_tokenizer
    from sftkit.objectives.objective import NextToken
    from sftkit.train import assemble

    with assemble.start_run(cfg, "sft") as run:
        tokenizer = load_tokenizer(cfg.model)
        # The objective: the negative log-likelihood of each target, given all tokens before it.
        objective = NextToken(cfg.loss)
        # All other parts are the same in every stage: load model and data, make the engine, run the loop.
        assemble.train_stage(run, tokenizer, row_tokenizer, objective)


if __name__ == "__main__":
    script(main)
