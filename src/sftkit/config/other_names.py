"""Names that other trainers give settings of ours (transformers, TRL, Axolotl, torchtune, Lightning, nanoGPT), for the
suggestion beside an unknown key."""

from __future__ import annotations

from sftkit.config.keys import key_table

_OTHER_NAMES = {
    "optim.lr": "learning_rate peak_lr max_lr base_lr",
    "optim, optim.name": "optimizer optimizer_name",
    "optim.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "adam_epsilon adam_eps epsilon",
    "optim.max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_norm",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "optim.warmup_ratio": "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_iters",
    "optim.min_lr_ratio": "min_lr min_learning_rate",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.max_steps": "steps num_steps train_steps total_steps max_train_steps num_train_steps max_iters iterations",
    "train.global_batch_size, train.micro_batch_size": "batch_size train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size "
    "device_batch_size",
    "train.global_batch_size": "gradient_accumulation_steps gradient_accumulation grad_accum_steps accumulation_steps "
    "accumulate_grad_batches",
    "train.precision": "bf16 fp16 mixed_precision dtype torch_dtype",
    "train.resume": "resume_from resume_from_checkpoint",
    "data.max_length": "max_seq_length max_seq_len seq_length seq_len sequence_length sequence_len context_length "
    "context_len block_size cutoff_len model_max_length",
    "data.train": "dataset datasets dataset_name dataset_path train_dataset train_data train_file train_files "
    "data_path",
    "data.val": "eval_dataset val_dataset validation_dataset val_data validation_data val_file validation_file",
    "data.layout": "packing packed sample_packing",
    "data.targets": "train_on_inputs train_on_prompt train_on_input assistant_only_loss completion_only_loss",
    "data.num_workers": "dataloader_num_workers",
    "data.num_proc": "dataset_num_proc preprocessing_num_workers",
    "model.path": "model_name model_name_or_path pretrained_model_name_or_path base_model",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "model.gradient_checkpointing": "activation_checkpointing use_gradient_checkpointing",
    "attention.backend": "attn_implementation attn flash_attn flash_attention flash_attention_2 use_flash_attention",
    "compile.enabled": "compile torch_compile compile_model use_compile",
    "loss.label_smoothing": "label_smoothing_factor",
    "checkpoint.every": "save_steps save_every save_interval save_freq checkpoint_steps checkpoint_interval ckpt_every",
    "checkpoint.keep": "save_total_limit max_checkpoints keep_last_n keep_checkpoints",
    "checkpoint.best": "metric_for_best_model load_best_model_at_end",
    "eval.every": "eval_steps eval_interval eval_freq evaluation_steps val_every val_interval",
    "eval.batch_size": "per_device_eval_batch_size",
    "log.every": "logging_steps logging_every log_steps log_interval log_freq print_every",
    "log.tracker": "report_to logger",
    "log.project": "wandb_project",
    "run.dir": "output_dir out_dir output save_dir run_name experiment_name",
    "run.seed": "random_seed",
}
"Our keys -> the last parts of others' keys."
REMARKS = {
    "optim.warmup_ratio": "a share of the steps",
    "optim.min_lr_ratio": "a share of optim.lr",
    "train.global_batch_size": "accumulation follows from it and train.micro_batch_size",
    "train.precision": "bf16 or fp32",
    "data.layout": "packed",
    "checkpoint.best": "a metric, such as val/loss",
}
"What our keys take where it is not what the others' take."
OWN_NAMES = {name: tuple(ours.split(", ")) for ours, names in _OTHER_NAMES.items() for name in names.split()}
"Another trainer's name -> our keys."
_SECTIONS = {"save": "checkpoint", "ckpt": "checkpoint", "logging": "log", "evaluation": "eval", "training": "train"}


def own_names(name: str) -> tuple[str, ...]:
    """Return the keys that another trainer's name means, or that a section and a key joined by _ mean (`log_every`)."""
    if name in OWN_NAMES:
        return OWN_NAMES[name]
    head, _, tail = name.partition("_")
    joined = f"{_SECTIONS.get(head, head)}.{tail}"
    return (joined,) if joined in key_table() else ()


def remark(keys: tuple[str, ...]) -> str:
    """Return ` (what it takes)` for a key that takes something else than the other trainers'."""
    return f" ({REMARKS[keys[0]]})" if len(keys) == 1 and keys[0] in REMARKS else ""
