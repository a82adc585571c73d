"""Base training: continue text. Every token is a target.

.venv/bin/python -m sftkit.launch scripts/base_train.py recipes/default/base.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/cpu.yaml scripts/base_train.py recipes/default/base.yaml
"""

from sftkit.runtime.script import script


def row_tokenizer(data, tokenizer, max_length):
    """Make every token of a plain text a target, given the tokens before it; reject conversations."""
    from sftkit.data.tokens import text
    from sftkit.data.tokens.sources import RowTokenizer

    text.check_targets(
        data, "base_train.py learns every token of texts; remove the setting, or run mid_train.py or chat_sft.py"
    )
    return RowTokenizer(text.tokenize, tokenizer, max_length, special_tokens=data.special_tokens_in_text)


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Read the recipe, then key=value; an invalid or missing setting is rejected here, before torch is imported.
    cfg = load_config(__doc__, start_rules("base"))

    from sftkit.models.tokenizer import base_tokenizer
    from sftkit.objectives.objective import NextToken
    from sftkit.train import assemble

    with assemble.start_run(cfg, "base") as run:
        tokenizer = base_tokenizer(cfg.model, cfg.data, run.dir, run.rt)
        # The objective: the negative log-likelihood of each target, given all tokens before it.
        objective = NextToken(cfg.loss)
        # All other parts are the same in every stage: load model and data, make the engine, run the loop.
        assemble.train_stage(run, tokenizer, row_tokenizer, objective)


if __name__ == "__main__":
    script(main)
