"""Mutations of the product's code, one wrong line each: `run.py` finds out which are caught by a row of a run's
proof.json, which by a test, and which by nothing.

A mutation replaces a text that occurs once in its file. `tests/test_mutations.py` holds the plan to the tree.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One wrong line."""

    file: str
    "under src/sftkit"
    what: str
    "what goes wrong, in a few words; the name of the mutation"
    old: str
    new: str
    tests: str
    "files or folders under tests/, with spaces between, that should catch it; tried in this order"

    @property
    def room(self) -> str:
        """Return the room that the file belongs to."""
        return self.file.split("/")[0]


M = Mutation
# fmt: off
MUTATIONS = [
    # ---- data
    M("data/batches/collate.py", "targets are not shifted",
      "np.where(is_target[source + 1], ids[source + 1], IGNORE)",
      "np.where(is_target[source], ids[source], IGNORE)", "data/test_collate.py"),
    M("data/batches/collate.py", "every token is a target",
      "targets[at] = np.where(is_target[source + 1], ids[source + 1], IGNORE)",
      "targets[at] = ids[source + 1]", "data/test_collate.py"),
    M("data/batches/collate.py", "positions run on through a row",
      "position_ids[at] = within", "position_ids[at] = at % row_length", "data/test_collate.py"),
    M("data/batches/collate.py", "documents of a row share a number",
      "doc_ids[at] = np.repeat(number_in_row, lengths)", "doc_ids[at] = 0 * np.repeat(number_in_row, lengths)",
      "data/test_collate.py"),
    M("data/batches/collate.py", "all documents are of the first source",
      "sources[at] = np.repeat(examples.source[docs], lengths)", "sources[at] = 0", "engine/test_reference.py"),
    M("data/batches/pack.py", "worst fit instead of best fit",
      "at = bisect.bisect_left(open_rows, (length, -1))", "at = len(open_rows) - 1 if open_rows and open_rows[-1][0] >= length else len(open_rows)",
      "data/test_pack.py"),
    M("data/batches/pack.py", "a row takes one document more than its slots",
      "len(rows[row]) < docs_per_row", "len(rows[row]) <= docs_per_row", "data/test_pack.py"),
    M("data/batches/epoch.py", "every epoch has the same order",
      "np.random.default_rng([seed, epoch])", "np.random.default_rng([seed, 0])", "data/test_order.py data/test_pack.py"),
    M("data/batches/epoch.py", "the last incomplete batch is dropped",
      "rows += [()] * (-len(rows) % layout.rows(row_length))", "rows = rows[: len(rows) // layout.rows(row_length) * layout.rows(row_length)]",
      "data/test_order.py data/test_pack.py"),
    M("data/batches/epoch.py", "rows are not balanced over ranks",
      "assigned[micro, np.argsort(totals, kind=\"stable\")] = shares[most_expensive_first]",
      "assigned[micro] = shares[most_expensive_first]", "data/test_balance.py"),
    M("data/batches/epoch.py", "a window counts one key too many",
      "ramp = np.minimum(lengths, window)", "ramp = np.minimum(lengths, window + 1)", "data/test_balance.py tracking"),
    M("data/batches/pack.py", "the last bucket is too short",
      "np.minimum(-(-lengths // _MULTIPLE) * _MULTIPLE, max_length)", "np.minimum(lengths // _MULTIPLE * _MULTIPLE, max_length)",
      "data/test_buckets.py"),
    M("data/tokens/text.py", "a text does not end with eos",
      "if ids[-1:] != [eos]:\n        ids.append(eos)", "if ids[-1:] != [eos]:\n        pass", "data/test_sources.py data/test_chat.py"),
    M("data/tokens/text.py", "a token between two chunks is learned by neither",
      "chunks = [ids[i : i + max_length + 1] for i in range(0, len(ids) - 1, max_length)]",
      "chunks = [ids[i : i + max_length] for i in range(0, len(ids) - 1, max_length)]", "data/test_chat.py"),
    M("data/tokens/text.py", "bos is learned twice",
      "if ids[:2] == [bos, bos]:", "if False:", "data/test_chat.py data/test_sources.py"),
    # ---- objectives and ops
    M("objectives/objective.py", "the loss is monitored with z-loss",
      "measured = {\"nll\": found.nll,", "measured = {\"nll\": found.loss.detach(),", "ops/test_loss.py objectives"),
    M("ops/linear_cross_entropy.py", "label smoothing takes the sum of the logits",
      "objective += smoothing * (lse - x.mean(1))", "objective += smoothing * (lse - x.sum(1))", "ops/test_loss.py"),
    M("ops/linear_cross_entropy.py", "z-loss has half its gradient",
      "+ 2 * options.z_loss * lse)", "+ options.z_loss * lse)", "ops/test_loss.py"),
    M("ops/linear_cross_entropy.py", "DFT weighs each target by more than its probability",
      "(-nll).exp() if options.dft", "lse.exp() if options.dft", "ops/test_loss.py"),
    M("ops/linear_cross_entropy.py", "only the last chunk makes the head's gradient",
      "beta = 0.0 if first else 1.0", "beta = 0.0", "ops/test_loss.py"),
    M("ops/linear_cross_entropy.py", "padding of the vocabulary gets probability",
      "_cross_entropy_(logits[:, :tokens], targets[rows]", "_cross_entropy_(logits, targets[rows]", "ops/test_loss.py models/test_padding.py"),
    M("ops/attention.py", "documents see each other",
      "(doc_ids[:, :, None] == doc_ids[:, None, :])", "(doc_ids[:, :, None] >= 0)", "ops/test_attention.py"),
    M("ops/attention.py", "a sliding window is one key wider",
      "positions[:, None] - positions < window", "positions[:, None] - positions <= window", "ops/test_attention.py"),
    M("ops/attention.py", "scores are scaled twice",
      "scale = scaling if scaling is not None else query.shape[-1] ** -0.5", "scale = (scaling or 1.0) * query.shape[-1] ** -0.5", "ops/test_attention.py"),
    # ---- engine
    M("engine/step.py", "gradients are divided by the micro-batches too",
      "sums.loss * (gradient_scale(rt) / max(divisor, 1))", "sums.loss * (gradient_scale(rt) / max(divisor, 1) / 2)", "engine/test_step.py"),
    M("engine/step.py", "the first of several micro-batches is lost",
      "self._sums[i].add_(parameter.grad)", "self._sums[i].copy_(parameter.grad)", "engine/test_step.py"),
    M("engine/step.py", "a loss that is not finite does not skip the step",
      "nonfinite_loss = (~totals[LOSS].isfinite()).to(share.dtype)", "nonfinite_loss = torch.zeros_like(share)", "engine/test_step.py tracking/test_health.py train/test_train.py"),
    # ---- optim
    M("optim/protocol.py", "clipping by the squared norm",
      "(max_norm / (norm + 1e-6)).clamp(max=1.0)", "(max_norm / (norm * norm + 1e-6)).clamp(max=1.0)", "optim/test_optim.py"),
    M("optim/protocol.py", "small gradients are scaled up",
      "(max_norm / (norm + 1e-6)).clamp(max=1.0)", "max_norm / (norm + 1e-6)", "optim/test_optim.py"),
    M("optim/protocol.py", "a replica's norm counts once for each rank",
      "_sum_of_squares(grads) / copies for copies, grads", "_sum_of_squares(grads) for copies, grads", "optim/test_optim.py engine/test_step.py"),
    M("optim/protocol.py", "norms and biases decay",
      "groups.append({**groups[-1], \"params\": others, \"weight_decay\": 0.0})", "groups.append({**groups[-1], \"params\": others})", "optim/test_optim.py"),
    M("optim/protocol.py", "embeddings decay",
      "matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]", "matrices = [p for p in trained if p.ndim >= 2]", "optim/test_optim.py"),
    M("optim/adamw.py", "an update is a tenth too large",
      "weight - (decay * weight + step_size * direction)",
      "weight - (decay * weight + 1.1 * step_size * direction)", "optim/test_adamw.py"),
    M("optim/adamw.py", "no bias correction of the second moment",
      "direction = exp_avg / (exp_avg_sq.sqrt() / root2 + eps)", "direction = exp_avg / (exp_avg_sq.sqrt() + eps)", "optim/test_adamw.py"),
    M("optim/adamw.py", "masters are rounded to nearest",
      "stochastic_round(new[0], noise[0])", "new[0].to(shard.rounded.dtype)", "optim/test_adamw.py"),
    M("optim/muon.py", "Muon's update does not grow with its matrix",
      "alpha=-group[\"lr\"] * 0.2 * max(params[0].shape) ** 0.5", "alpha=-group[\"lr\"] * 0.2", "optim/test_optim.py optim/test_protocol.py"),
    M("optim/protocol.py", "the warm-up is one step late",
      "return optim.lr * step / warmup", "return optim.lr * (step - 1) / warmup", "optim/test_optim.py"),
    M("optim/protocol.py", "a cosine that ends at its middle",
      "0.5 * (1 + math.cos(math.pi * progress))", "0.5 * (1 + math.cos(math.pi * progress / 2))", "optim/test_optim.py"),
    # ---- models
    M("models/vocabulary.py", "a new row is zeros",
      "return total / rows", "return total * 0", "models/test_vocabulary.py"),
    M("models/vocabulary.py", "logits of padding stay",
      "lambda _, __, logits: logits[..., :tokens]", "lambda _, __, logits: logits", "models/test_padding.py"),
    M("models/structure.py", "the head counts for every token",
      "counted.head * work.targets", "counted.head * work.tokens", "models/test_model.py verify/test_counts.py"),
    M("models/structure.py", "all experts count",
      "idle = 1.0 - config.num_experts_per_tok / experts", "idle = 0.0", "models/test_routing.py models/test_model.py"),
    # ---- tracking
    M("tracking/meter.py", "targets are a share of positions",
      "100.0 * self._targets / max(self._tokens, 1)", "100.0 * self._targets / max(self._positions, 1)", "verify/test_counts.py"),
    M("tracking/meter.py", "padding counts as tokens a second",
      "\"perf/tok_per_sec\": self._tokens / seconds", "\"perf/tok_per_sec\": self._positions / seconds", "verify/test_counts.py tracking/test_tracker.py"),
    M("tracking/meter.py", "the MFU of several GPUs is that of one",
      "peak = self._peak * self._rt.world_size if self._peak else None", "peak = self._peak", "tracking train/test_train.py verify/test_counts.py"),
    M("tracking/health.py", "a spike enters the history",
      "torch.where(usable & ~skipped, later, self._history)", "torch.where(usable, later, self._history)", "tracking/test_spikes.py"),
    M("tracking/names.py", "tokens of earlier starts are forgotten",
      "(self.tokens + tokens, self.targets + targets,", "(tokens, self.targets + targets,", "tracking/test_axes.py tracking/test_meter.py"),
    # ---- evals
    M("evals/suite.py", "bits per byte in nats",
      "nll / math.log(2) / num_bytes if num_bytes else None", "nll / num_bytes if num_bytes else None", "verify/test_validation.py"),
    M("evals/suite.py", "the loss of a source is that of a byte",
      "values[f\"{prefix}loss\"] = nll / targets", "values[f\"{prefix}loss\"] = nll / max(num_bytes, 1)", "verify/test_validation.py"),
    M("evals/scoring.py", "a continuation begins one token late",
      "continuation = full_ids[len(context_ids) :]", "continuation = full_ids[len(context_ids) + 1 :]", "evals/test_scoring.py"),
    # ---- generation
    M("generation/decode.py", "positions count padding",
      "(self._mask.cumsum(-1) - 1).clamp(min=0)", "(torch.ones_like(self._mask).cumsum(-1) - 1)", "generation/test_generate.py"),
    M("generation/decode.py", "an answer keeps its end",
      "if token in stop_ids:\n            self.stop = \"end_of_turn\"\n            return", "if token in stop_ids:\n            self.stop = \"end_of_turn\"", "generation/test_generate.py"),
    # ---- checkpoint and rundir
    M("checkpoint/checkpoint.py", "the random state is not restored",
      "restore_random_state(torch.load(file, map_location=\"cpu\", weights_only=True))", "torch.load(file, map_location=\"cpu\", weights_only=True)", "checkpoint/test_checkpoint_resume.py checkpoint/test_checkpoint.py"),
    M("checkpoint/checkpoint.py", "a checkpoint of other data is resumed",
      "check_identity(checkpoint.state.get(\"identity\"), self.identity, prefix)", "pass", "checkpoint/test_checkpoint_resume.py"),
    M("checkpoint/checkpoint.py", "a published step is written again",
      "if step != self._writer.published:  # a published directory is never rewritten", "if True:", "checkpoint/test_checkpoint.py checkpoint/test_checkpoint_crash.py"),
    M("train/parts.py", "no checkpoint at the last step",
      "saves = last or bool(checkpoint.every and step % checkpoint.every == 0)", "saves = bool(checkpoint.every and step % checkpoint.every == 0)", "train/test_due.py"),
    M("train/loop.py", "the learning rate is that of the step before",
      "lr = learning_rate(step, total_steps, cfg.optim)", "lr = learning_rate(max(step - 1, 1), total_steps, cfg.optim)", "train/test_loop_parts.py train/test_train.py"),
    M("rundir/files.py", "a changed file of the same size passes",
      "if found != entry.sha256:", "if False:", "rundir/test_manifest.py"),
    # ---- memory
    M("../../labs/patterns/traffic.py", "an all-reduce sends half",
      "\"all_reduce\": 2 * share", "\"all_reduce\": share", "labs/test_traffic.py"),
    M("memory/estimate.py", "gradients of earlier micro-batches are free",
      "return 4 if sums_in_fp32(layout, precision) else BYTES[precision]", "return 0", "memory/test_memory.py"),
    # ---- config, launch
    M("config/rules.py", "any batch divides",
      "if batch % world_size:", "if False:", "config/test_recipe.py"),
    M("config/rules.py", "sdpa with packed rows",
      "if get(\"attention.backend\") == \"sdpa\" and get(\"data.layout\") == \"packed\":", "if False:", "config/test_recipe.py"),
    M("launch/launch.py", "fewer GPUs than divide the batch",
      "processes = max(shared)", "processes = min(shared)", "launch/test_launch.py"),
    # ---- parallel, compile
    M("compile/watch.py", "recompiles are not counted",
      "\"compile/recompiles\": len(self._late()),", "\"compile/recompiles\": 0,", "compile/test_compilation.py"),
    M("parallel/tensor.py", "gradients of norms are not added up",
      "torch.distributed.all_reduce(flat, group=mesh.get_group())", "pass", "parallel/test_tensor.py parallel/test_parallel.py"),
    M("parallel/wrap.py", "replicas of a tensor group are taken for shards",
      "return mesh[\"shards\"] if topology.replicas == 1 else mesh[\"replicas\", \"shards\"]", "return mesh[\"shards\"]", "parallel/test_parallel.py parallel/test_tensor.py"),
    M("graph/passes/order.py", "buckets of other dtypes are merged",
      "found.setdefault((bucket, node.target, node.args[1:], node.meta[\"val\"].dtype), []).append(node)",
      "found.setdefault((bucket, node.target, node.args[1:]), []).append(node)", "graph/test_bucketing.py graph/test_engine.py"),
    M("reports/collect.py", "the newest run is the oldest",
      "key=lambda path: -path.stat().st_mtime", "key=lambda path: path.stat().st_mtime", "reports/test_report.py"),
    M("preflight/analysis.py", "padding over all positions",
      "\"padding_pct\": 100.0 * (1.0 - float(lengths.sum()) / count)", "\"padding_pct\": 100.0 * float(lengths.sum()) / count", "preflight/test_preflight.py"),
    M("runtime/watchdog.py", "a hang has no limit",
      "if idle > self.limit():", "if False:", "runtime/test_faults.py"),
    M("rundir/lock.py", "an id that a later process has counts as the holder",
      "return same and psutil.Process(self.pid).status()", "return psutil.Process(self.pid).status()", "rundir/test_lock.py"),
    # ---- what a row says, and what files say
    M("data/reading/columns.py", "an answer labelled false is learned",
      "if understood(name, row.get(name)) and cell(row[name]) is False:", "if False:", "data/test_columns.py"),
    M("data/reading/columns.py", "unused columns are not counted",
      "return tuple(f\"column {_shown(name)}\" for name in lost)", "return ()", "data/test_columns.py"),
    M("data/tokens/template.py", "tools that a template leaves out are no matter",
      "lost = sorted({place for mark, place in marks.items() if mark not in marked}, key=lambda place: place[1])",
      "lost: list[tuple[str, int]] = []", "data/test_context.py"),
    M("data/reading/rows.py", "an answer of choices is an index first",
      "if not meant and not isinstance(key, bool) and", "if not isinstance(key, bool) and", "data/test_findings.py data/test_learned.py"),
    M("rundir/files.py", "a changed file of the token cache passes",
      "if found != (expected := known[path.name][\"sha256\"]):", "if found != (expected := found):", "data/test_sources.py"),
    M("rundir/status.py", "errors of an earlier start are today's",
      "found = [failure for failure in found if failure.start_id == self.start_id]", "found = list(found)", "rundir/test_killed.py runtime/test_faults.py"),
    M("rundir/lock.py", "a lock that was taken away is not missed",
      "if (found := self.lost(run_dir)) is not None:", "if (found := None) is not None:", "rundir/test_lock.py"),
    M("models/files.py", "a quantized start is trained",
      "def check_unquantized(config: Mapping[str, Any], where: str) -> None:",
      "def check_unquantized(config: Mapping[str, Any], where: str) -> None:\n    return\n\n\ndef _unused(config: Mapping[str, Any], where: str) -> None:", "models/test_start_models.py models/test_model_files.py"),
    M("models/structure.py", "yarn does not extend the positions",
      "reach = max(reach, int(factor * original))", "pass", "models/test_rope.py"),
]
