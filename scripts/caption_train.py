"""Captioning: teach a model with an encoder to say what it sees. Every token of a caption is a target.

.venv/bin/python -m sftkit.launch scripts/caption_train.py recipes/captioning/caption_smoke.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/caption_train.py \
recipes/captioning/caption.yaml train.max_steps=200
"""

from sftkit.runtime.script import script


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Recipe, then key=value; whatever is wrong or missing is refused here, before torch is imported.
    cfg = load_config(__doc__, start_rules("caption"))

    from sftkit.data.tokens import stages
    from sftkit.models.tokenizer import base_tokenizer
    from sftkit.objectives.next_token import Caption
    from sftkit.train import assemble

    with assemble.start_run(cfg, "caption") as run:
        # Where we start. Evaluation, samples and checkpoints use orig_model; only a training step runs it compiled.
        tokenizer = base_tokenizer(cfg.model, cfg.data.train, cfg.data.on_bad_row, run.dir, run.rt)
        loaded = assemble.load_orig_model(run, tokenizer)

        # What we learn from: captions, each with its picture, which is read and resized once. What we minimise: the
        # negative log-likelihood of each token, given the picture and all tokens before it.
        tokenize = stages.caption(cfg.data, tokenizer, loaded.max_length)
        objective = Caption(cfg.loss)
        data = assemble.load_data(run, loaded, tokenize, objective)

        # How a step is computed: attention for these rows, blocks compiled in place, then sharded; see
        # engine/blocks.py.
        engine = assemble.build_engine(run, loaded, objective, data)

        # What is kept and watched, and the loop (train/loop.py): steps, evaluations, checkpoints, until the last one.
        assemble.run_to_end(run, loaded, data, engine)


if __name__ == "__main__":
    script(main)
