"""Base training: learn to continue text. Every token is a target.

make base
accelerate launch --config_file accelerate_configs/cpu.yaml scripts/base_train.py recipes/default/base.yaml
"""

from dataclasses import asdict
from functools import partial

from sftkit.config.load import load_config, to_yaml


def main() -> None:
    cfg = load_config(__doc__)  # recipe, then key=value; whatever is wrong is refused here, before torch is imported

    from sftkit.reports.write import try_report
    from sftkit.runtime import start as runtime
    from sftkit.tracking.remote import dashboard_name

    with runtime.start(cfg.run, cfg.train, dashboard_name(cfg.log), page=try_report) as rt:
        run(cfg, rt)


def run(cfg, rt) -> None:
    from sftkit.checkpoint.checkpoint import Checkpoints
    from sftkit.checkpoint.compatibility import run_identity
    from sftkit.compile import cache as compile_cache
    from sftkit.compile.contract import compile_model
    from sftkit.compile.debug import open_logs
    from sftkit.data import chat, loader, text
    from sftkit.data.collate import part_of
    from sftkit.data.pack import make_layout
    from sftkit.evals.suite import Suite, sample_rows
    from sftkit.memory.plan import checkpoint_bytes, make_plan
    from sftkit.models.float8 import apply_fp8
    from sftkit.models.load import base_tokenizer, inherit, load_model
    from sftkit.models.structure import positions
    from sftkit.objectives.model_with_loss import ModelWithLoss
    from sftkit.ops.attention_choice import choose_backend
    from sftkit.optim.build import build_optimizer
    from sftkit.parallel.wrap import distribute
    from sftkit.preflight import look as preflight
    from sftkit.runtime.open import open_run
    from sftkit.runtime.status import effective_resume
    from sftkit.tracking.tracker import Tracker
    from sftkit.train.loop import train
    from sftkit.train.summary import write_summary

    resume = effective_resume(cfg.train.resume, cfg.run.dir)
    run_dir = open_run(cfg.run.dir, resume, to_yaml(cfg), rt)
    open_logs(run_dir, cfg.compile, rt.rank)

    # Where we start. orig_model stays eager: evaluation, samples and checkpoints use it.
    tokenizer = base_tokenizer(cfg.model, cfg.data.train, cfg.data.on_bad_row, run_dir, rt)
    orig_model = load_model(cfg.model, tokenizer, cfg.run.seed, rt.precision, rt.topology.sharded)
    orig_model.generation_config.eos_token_id = chat.end_of_turn_ids(tokenizer)
    max_length, inherited = inherit(cfg.model, cfg.data.max_length, tokenizer, rt.precision, positions(orig_model))
    rt.say(inherited)

    # What we learn from: all tokens of plain text.
    tokenize = partial(text.tokenize, tokenizer=tokenizer, max_length=max_length)
    examples, validation = loader.load_examples(cfg.data, tokenize, rt.main_first())
    layout = make_layout(cfg.data, max_length, cfg.train, rt.data_world_size, examples.lengths)
    part = part_of(rt.topology, rt.rank)
    batches = loader.Batches(
        examples, layout, cfg.run.seed, rt.data_rank, tokenizer.pad_token_id, cfg.data.num_workers, part
    )

    # How we step: attention for these rows, compiled in place, then wrapped. Only the train step calls `wrapped`.
    apply_fp8(cfg, orig_model, layout, rt)
    compile_cache.restore(cfg, orig_model, layout, rt)
    backend = choose_backend(cfg, orig_model, layout, rt)
    plan = make_plan(cfg, orig_model, layout, rt, backend=backend)
    preflight.record(run_dir, cfg, rt, tokenizer, batches, validation, orig_model, plan)
    model = ModelWithLoss(orig_model, backend, cfg.loss)
    compile_model(model, cfg.compile, plan.activation_memory_budget, layout.dynamic, rt.topology.sharded)
    wrapped = distribute(model, cfg.model, plan.sharding, rt)
    optimizer = build_optimizer(orig_model, plan.optim, cfg.run.seed)

    # What is kept and watched.
    identity = run_identity(orig_model, tokenizer, examples, layout)
    checkpoints = Checkpoints(run_dir, cfg.checkpoint, rt, orig_model, tokenizer, optimizer, to_yaml(cfg), identity)
    checkpoints.check_space(checkpoint_bytes(orig_model, plan))
    resumed = checkpoints.resume(resume, cfg.train.resume_changes)
    samples = sample_rows(cfg.data.val, tokenize, cfg.eval.samples)
    suite = Suite(cfg.eval, orig_model, tokenizer, rt, model, validation, layout, samples, run_dir)
    with Tracker(run_dir, cfg.log, rt, asdict(cfg), resumed["step"], resumed.get("tracker")) as tracker:
        trained = train(
            cfg,
            rt,
            wrapped,
            orig_model,
            optimizer,
            batches,
            plan,
            evaluate=suite.evaluate,
            checkpoints=checkpoints,
            tracker=tracker,
            resumed=resumed,
        )
    write_summary(run_dir, trained, rt)


if __name__ == "__main__":
    from sftkit.runtime.script import script

    script(main)
