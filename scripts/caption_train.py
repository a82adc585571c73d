"""Captioning: teach a model with an encoder to describe a picture. Every token of a caption is a target.

.venv/bin/python -m sftkit.launch scripts/caption_train.py recipes/captioning/caption_smoke.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/caption_train.py \
recipes/captioning/caption.yaml train.max_steps=200
"""

from sftkit.runtime.script import script


def row_tokenizer(data, tokenizer, max_length):
    """Make every token of a caption a target, given the picture (read and resized once) and the tokens before it."""
    from sftkit.data.tokens import text
    from sftkit.data.tokens.sources import RowTokenizer

    text.check_targets(data, "caption_train.py learns every token of captions; remove the setting")
    return RowTokenizer(text.tokenize_captions, tokenizer, max_length, data.too_long)


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Read the recipe, then key=value; an invalid or missing setting is rejected here, before torch is imported.
    cfg = load_config(__doc__, start_rules("caption"))

    from sftkit.models.tokenizer import base_tokenizer
    from sftkit.objectives.objective import Caption
    from sftkit.train import assemble

    with assemble.start_run(cfg, "caption") as run:
        tokenizer = base_tokenizer(cfg.model, cfg.data, run.dir, run.rt)
        # The objective: the negative log-likelihood of each target, given the picture and all tokens before it.
        objective = Caption(cfg.loss)
        # All other parts are the same in every stage: load model and data, make the engine, run the loop.
        assemble.train_stage(run, tokenizer, row_tokenizer, objective)


if __name__ == "__main__":
    script(main)
