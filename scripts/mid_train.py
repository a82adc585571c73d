"""Mid-training: text and conversations together, every token a target. The model meets the chat format.

.venv/bin/python -m sftkit.launch scripts/mid_train.py recipes/default/mid.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/mid_train.py recipes/qwen3_0_6b/mid.yaml
"""

from sftkit.runtime.script import script


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Recipe, then key=value; whatever is wrong or missing is refused here, before torch is imported.
    cfg = load_config(__doc__, start_rules("mid"))

    from sftkit.data.tokens import stages
    from sftkit.models.tokenizer import load_tokenizer
    from sftkit.objectives.next_token import NextToken
    from sftkit.train import assemble

    with assemble.start_run(cfg, "mid") as run:
        # Where we start. Evaluation, samples and checkpoints use orig_model; only a training step runs it compiled.
        tokenizer = load_tokenizer(cfg.model)
        loaded = assemble.load_orig_model(run, tokenizer)

        # What we learn from: all tokens, of texts and of conversations. What we minimise: the negative log-likelihood
        # of each, given those before it.
        tokenize = stages.mid(cfg.data, tokenizer, loaded.max_length)
        objective = NextToken(cfg.loss)
        data = assemble.load_data(run, loaded, tokenize, objective)

        # How a step is computed: attention for these rows, blocks compiled in place, then sharded; see
        # engine/blocks.py.
        engine = assemble.build_engine(run, loaded, objective, data)

        # What is kept and watched, and the loop (train/loop.py): steps, evaluations, checkpoints, until the last one.
        assemble.run_to_end(run, loaded, data, engine)


if __name__ == "__main__":
    script(main)
