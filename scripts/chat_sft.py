"""Chat SFT: teach a checkpoint to answer. Only assistant tokens are targets.

.venv/bin/python -m sftkit.launch scripts/chat_sft.py recipes/default/sft.yaml
.venv/bin/accelerate launch --config_file accelerate_configs/ddp.yaml scripts/chat_sft.py recipes/qwen3_0_6b/sft.yaml \
train.max_steps=200
"""

from sftkit.runtime.script import script


def main() -> None:
    """Train as the recipe says."""
    from sftkit.config.load import load_config
    from sftkit.preflight.inputs import start_rules

    # Recipe, then key=value; whatever is wrong or missing is refused here, before torch is imported.
    cfg = load_config(__doc__, start_rules("sft"))

    from sftkit.data.tokens import stages
    from sftkit.models.tokenizer import load_tokenizer
    from sftkit.objectives.next_token import NextToken
    from sftkit.train import assemble

    with assemble.start_run(cfg, "sft") as run:
        # Where we start. Evaluation, samples and checkpoints use orig_model; only a training step runs it compiled.
        tokenizer = load_tokenizer(cfg.model)
        loaded = assemble.load_orig_model(run, tokenizer)

        # What we learn from: the assistant's tokens. chat.tokenize makes the mask; nothing after it may change it.
        # What we
        # minimise: the negative log-likelihood of each of them, given all tokens before it.
        tokenize = stages.sft(cfg.data, tokenizer, loaded.max_length)
        objective = NextToken(cfg.loss)
        data = assemble.load_data(run, loaded, tokenize, objective)

        # How a step is computed: attention for these rows, blocks compiled in place, then sharded; see
        # engine/blocks.py.
        engine = assemble.build_engine(run, loaded, objective, data)

        # What is kept and watched, and the loop (train/loop.py): steps, evaluations, checkpoints, until the last one.
        assemble.run_to_end(run, loaded, data, engine)


if __name__ == "__main__":
    script(main)
