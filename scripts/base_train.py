"""Base training: learn to continue text. Every token is a target.

.venv/bin/python -m sftkit.launch scripts/base_train.py recipes/default/base.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/cpu.yaml scripts/base_train.py recipes/default/base.yaml
"""

from sftkit.runtime.script import script


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Recipe, then key=value; whatever is wrong or missing is refused here, before torch is imported.
    cfg = load_config(__doc__, start_rules("base"))

    from sftkit.data.tokens import stages
    from sftkit.models.tokenizer import base_tokenizer
    from sftkit.objectives.next_token import NextToken
    from sftkit.train import assemble

    with assemble.start_run(cfg, "base") as run:
        # Where we start. Evaluation, samples and checkpoints use orig_model; only a training step runs it compiled.
        tokenizer = base_tokenizer(cfg.model, cfg.data.train, cfg.data.on_bad_row, run.dir, run.rt)
        loaded = assemble.load_orig_model(run, tokenizer)

        # What we learn from: all tokens of plain text. What we minimise: the negative log-likelihood of each,
        # given those before it.
        tokenize = stages.base(cfg.data, tokenizer, loaded.max_length)
        objective = NextToken(cfg.loss)
        data = assemble.load_data(run, loaded, tokenize, objective)

        # How a step is computed: attention for these rows, blocks compiled in place, then sharded; see
        # engine/blocks.py.
        engine = assemble.build_engine(run, loaded, objective, data)

        # What is kept and watched, and the loop (train/loop.py): steps, evaluations, checkpoints, until the last one.
        assemble.run_to_end(run, loaded, data, engine)


if __name__ == "__main__":
    script(main)
