"""Write the model of a run into a folder that others load: whole, merged, or an adapter alone. It is loaded again by
plain transformers before it gets its name."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from sftkit.checkpoint.checkpoint import make_tokenizer_portable
from sftkit.checkpoint.save import entries, write_manifest
from sftkit.checkpoint.states import in_files, saved_tensors, write_config, write_weights
from sftkit.config.commands import install
from sftkit.config.schema import ModelConfig
from sftkit.config.terminal import visible
from sftkit.errors import ConfigError, hint
from sftkit.export import LARGEST_FILE, check_export, model_type, trained_on
from sftkit.export.reread import answers, write_answers
from sftkit.models import expert_adapters, towers
from sftkit.models.adapter_files import PER_EXPERT, AdapterFiles, base_digest, belongs_to
from sftkit.models.files import adapter_at
from sftkit.models.kind import check_causal
from sftkit.models.load import load_model, load_options, local_folder, start_config
from sftkit.models.tokenizer import PRE_TOKENIZER_PATTERN, load_tokenizer
from sftkit.reports.card import licence, model_card
from sftkit.reports.collect import gather_report, run_of
from sftkit.rundir.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, trained_length
from sftkit.runtime.script import working
from sftkit.runtime.start import start_device

Dtype = Literal["bf16", "fp16", "fp32"]
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_CHANGE = {"bf16": 0.02, "fp16": 0.02, "fp32": 1e-4}
"Largest difference of two logits over the largest logit, by the precision of the folder: sums in another order."
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"What --max-lora-rank of vLLM may be."
_OF_ADAPTER = (ADAPTER_WEIGHTS, ADAPTER_CONFIG, "generation_config.json", "chat_template.jinja")


def export(
    path: str,
    out: Path,
    *,
    merge: bool = False,
    dtype: Dtype | None = None,
    max_shard: str = LARGEST_FILE,
    onto: Literal["full", "nf4"] | None = None,
    per_expert: bool = False,
) -> list[str]:
    """Write a model into a new folder, and compare what plain transformers answers there with what it answers here.

    Args:
        path: a folder with a model or an adapter.
        out: the new folder; it appears whole or not at all.
        merge: whether an adapter is added to its model, in fp32 and rounded once; else its files are copied.
        dtype: precision of the weights; None: that of the model's files.
        max_shard: size of a file of weights at most, as save_pretrained of transformers takes it.
        onto: weights that an adapter is merged into: those of the files, or what NF4 holds of them, which a run with
            adapter.base=nf4 has computed with. None: full.
        per_expert: whether an adapter of experts gets a pair of factors for each matrix of each expert.

    Returns:
        lines about what was written, the comparison, and how to serve it.

    Raises:
        ConfigError: the folder is there already, an option has no effect, or the folder answers differently.
    """
    check_export(path, out, merge=merge, dtype=dtype, max_shard=max_shard, onto=onto, per_expert=per_expert)
    source = ModelConfig(path=path)
    files = adapter_at(source)
    alone = files is not None and not merge
    base = source if files is None else files.base
    options = load_options(str(base.path), base)
    config = start_config(path if files is None else str(base.path), options)
    check_causal(config, "export.py")
    stored = next((name for name, found in _DTYPES.items() if found == config.dtype), "fp32")
    precision = dtype or stored
    tokenizer = load_tokenizer(source)
    trained = {} if files is None else trained_on(files)
    nf4_of = _DTYPES["fp32" if trained.get("precision") == "fp32" else "bf16"] if onto == "nf4" else None
    # Of another precision than the files, each weight is rounded once, after an adapter was added in fp32.
    rounded = precision == stored == "bf16" and nf4_of is None
    orig_model = load_model(source, tokenizer, 0, "bf16" if rounded else "fp32", nf4_of=nf4_of).eval()
    if precision == "bf16" or (precision == "fp16" and not alone):
        _round(orig_model, _DTYPES[precision])
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: name a folder that can be written") from error
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=parent))
    try:
        temporary.chmod(0o755)
        if files is not None and alone:
            files = replace(files, digest=files.digest or base_digest(local_folder(str(base.path), options)))
            _write_adapter(files, temporary, per_expert=per_expert)
        else:
            with working(f"writing {out}"):
                _write_model(orig_model, temporary, max_shard)
        tokenizer.save_pretrained(temporary)
        make_tokenizer_portable(temporary / "tokenizer_config.json")
        lines = _compared(temporary, orig_model, tokenizer, precision)
        if files is not None and alone:
            there = entries(temporary, temporary.iterdir())
            write_manifest(temporary, None, there, belongs_to(base, files.digest))
        _write_card(Path(path), temporary, files, orig_model.num_parameters() if merge else None)
        for file in temporary.iterdir():  # safetensors lets only its owner read what it writes
            file.chmod(0o644)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    size = sum(file.stat().st_size for file in out.iterdir())
    what = "adapter" if alone else f"model, {precision}"
    if nf4_of is not None:
        lines.append("merged onto what NF4 holds of its base, written as dense weights: the model that was trained")
    elif merge and trained.get("base") == "nf4":
        lines.append("merged onto the full base, and trained on it in NF4: --onto nf4 gives the model that was trained")
    if files is not None and alone:
        served = _adapter_commands(out, files, per_expert=per_expert)
    else:
        served = _commands(out, Path(path))
    return [f"{out}: {what}, {size / 1e6:,.1f} MB in {len(list(out.iterdir()))} files", *lines, "", *served]


def _round(orig_model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights, but not buffers: rotary frequencies stay in fp32, as transformers has them.

    Raises:
        ConfigError: fp16 has no number as large as a weight.
    """
    largest = torch.finfo(dtype).max
    for name, weight in orig_model.named_parameters():
        if float(weight.data.abs().max()) > largest:
            raise ConfigError(f"--dtype fp16: {name} has numbers above {largest:,.0f}: take bf16 or fp32")
        weight.data = weight.data.to(dtype)


def _write_model(orig_model: PreTrainedModel, folder: Path, max_shard: str) -> None:
    """Write a model, or the larger model that it belongs to. `max_shard`: a number and KB, MB, GB or TB."""
    if (whole := towers.whole_of(orig_model)) is None:
        orig_model.save_pretrained(folder, max_shard_size=max_shard)
        return
    max_bytes = int(float(max_shard[:-2]) * 1000 ** ("KMGT".index(max_shard[-2]) + 1))
    write_config(orig_model, folder)
    write_weights(in_files(orig_model, whole, saved_tensors(orig_model), max_bytes), orig_model, folder)


def _write_adapter(files: AdapterFiles, folder: Path, *, per_expert: bool) -> None:
    """Copy the files of an adapter that others read.

    Args:
        per_expert: whether its experts get factors of their own.
    """
    for name in _OF_ADAPTER:
        if (files.folder / name).is_file():
            shutil.copyfile(files.folder / name, folder / name)
    if not per_expert:
        return
    kind = model_type(files)
    save_file(
        expert_adapters.per_expert(load_file(files.folder / ADAPTER_WEIGHTS), kind, files.rank),
        folder / ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    settings = json.loads((folder / ADAPTER_CONFIG).read_text())
    settings["target_modules"] = sorted({*settings["target_modules"], *PER_EXPERT[kind][1:]})
    # Layers whose names peft would take for experts stay parameters.
    layers = [name for name in settings["target_parameters"] if name.endswith(".weight")]
    settings["target_parameters"] = layers or None
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2))


def _compared(folder: Path, orig_model: PreTrainedModel, tokenizer: Any, precision: str) -> list[str]:
    """Return lines about the comparison with the folder, loaded by plain transformers in a separate process.

    Raises:
        ConfigError: it cannot be loaded, or answers differently.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        try:
            import peft  # noqa: F401 - transformers loads an adapter with it
        except ImportError:
            return [f"not compared: transformers loads an adapter with peft, which is not installed: {install('peft')}"]
    with tempfile.TemporaryDirectory() as elsewhere, working("loading it again with transformers"):
        expected = Path(elsewhere) / "answers.safetensors"
        device = _device_for(orig_model)
        orig_model.to(device)  # type: ignore[arg-type]
        write_answers(answers(orig_model, tokenizer), expected)
        orig_model.to("cpu")  # type: ignore[arg-type]
        words = [sys.executable, "-m", "sftkit.export.reread", str(folder), str(expected), device.type]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"transformers does not load what was written, so nothing is exported: {last}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    text = (
        f"{found['class']} of transformers: {found['same_answers']} of {found['prompts']} greedy answers are the same, "
        f"logits differ by {found['logits']:.1e} of the largest"
    )
    if not found["same_prompts"] or not found["logits"] <= LARGEST_CHANGE[precision]:
        why = "" if found["same_prompts"] else "; the tokenizer or its template gives other tokens"
        if found["logits"] != found["logits"]:  # NaN
            why += "; some are no numbers: fp16 has none above 65,504, so take --dtype bf16 or fp32"
        raise ConfigError(f"the folder does not answer as the run, so nothing is exported: {text}{why}")
    return [text]


def _device_for(orig_model: PreTrainedModel) -> torch.device:
    """Return the GPU if it has room for the model, else the CPU."""
    device, needed = start_device(), 1.1 * orig_model.get_memory_footprint()
    full = device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0]
    return torch.device("cpu") if full else device


def _write_card(path: Path, folder: Path, files: AdapterFiles | None, merged: int | None) -> None:
    """Write the model card of the run that a folder lies in; a folder of no run has none.

    Args:
        merged: number of parameters of a model that its adapter was added to; None: it is a start as it is.
    """
    run_dir = run_of(path / CARD)
    if run_dir is None:
        return
    report = gather_report(run_dir)
    run = report["run"]
    if files is not None and run["adapters"]:  # one of several, whose numbers are not those of all
        run |= {"name": f"{run['name']}/{path.name}", "adapters": [], "adapter": True, "parameters": None}
        run |= {"adapter_settings": f"rank {files.rank}, scale {files.scale:g}", "auto_class": "AutoModelForCausalLM"}
        report["headline"] = []
    run["adapter_base"] = {} if files is None or merged is not None else belongs_to(files.base, files.digest)
    if merged is not None:
        run |= {"adapter": False, "parameters": merged, "trained_parameters": None}
        run["adapter_settings"] = f"merged: {run['adapter_settings']}"
    (folder / CARD).write_text(visible(model_card(report, licence(path / CARD))), encoding="utf-8")


def _commands(out: Path, path: Path) -> list[str]:
    """Return the commands that serve a whole model."""
    folder = shlex.quote(str(out))
    length = trained_length(path)
    limit = f" --max-model-len {length}" if length else ""
    gguf = shlex.quote(f"{out.name}.gguf")
    context = f" -c {length}" if length else ""
    return [
        f"vLLM:         vllm serve {folder}{limit}",
        f"transformers: transformers serve {folder}",
        f"llama.cpp:    python convert_hf_to_gguf.py {folder} --outfile {gguf} && llama-server -m {gguf}{context}",
        *_unknown_to_llama_cpp(out),
    ]


def _unknown_to_llama_cpp(out: Path) -> list[str]:
    """Return a line about a tokenizer that was trained here, which llama.cpp's converter rejects."""
    text = (out / "tokenizer.json").read_text(encoding="utf-8") if (out / "tokenizer.json").is_file() else ""
    own = json.dumps(PRE_TOKENIZER_PATTERN) in text
    return ["llama.cpp's converter knows no tokenizer that was trained here: see docs/serving.md"] * own


def _adapter_commands(out: Path, files: AdapterFiles, *, per_expert: bool) -> list[str]:
    """Return the commands that serve an adapter next to its base, and what servers cannot load."""
    folder = shlex.quote(str(out))
    base = shlex.quote(str(files.base.path))
    merge = "add --merge, and serve that folder"
    own = f"{'add --per-expert, or ' * (model_type(files) in PER_EXPERT)}{merge}"
    kinds = {
        f"DoRA: {merge}": files.dora,
        f"trained rows of tokens: {merge}": files.tokens,
        f"adapters of experts in this form: {own}": files.experts and not per_expert,
    }
    if no := [name for name, has in kinds.items() if has]:
        return [f"vLLM and llama.cpp load no {no[0]}"]
    rank = next((one for one in RANKS if one >= files.rank), None)
    template = f"{folder}/chat_template.jinja" if (out / "chat_template.jinja").is_file() else ""
    length = trained_length(files.folder)
    lines = [f"vLLM takes ranks up to {RANKS[-1]}, and this one has {files.rank}: {merge}"]
    if rank is not None:
        extra = [f"--enable-lora --max-lora-rank {rank}", f"--lora-modules {shlex.quote(out.name)}={folder}"]
        # Servers take both from the base, which has neither the ends of turns nor the template of the training.
        if template:
            extra.append(f"--chat-template {template}")
        if (out / "generation_config.json").is_file():
            extra.append(f"--generation-config {folder}")
        if length:
            extra.append(f"--max-model-len {length}")
        lines = [f"vLLM:         vllm serve {base} {' '.join(extra)}", f"transformers: {merge}"]
    if local := Path(str(files.base.path)).is_dir():
        told = {"base": files.base.path, "digest": str(files.digest)[:16], "settings": out / ADAPTER_CONFIG}
        lines.insert(0, hint("local base", **told))
    gguf = shlex.quote(f"{out.name}.gguf")
    words = [f"--chat-template-file {template}" * bool(template), f"-c {length}" * bool(length)]
    convert = f"python convert_hf_to_gguf.py {base}{'' if local else ' --remote'} --outfile base.gguf"
    given = f"--base{'' if local else '-model-id'} {base}"
    return [
        *lines,
        f"llama.cpp:    {convert} && python convert_lora_to_gguf.py {folder} {given} --outfile {gguf} && "
        + " ".join((f"llama-server -m base.gguf --lora {gguf}", *filter(None, words))),
        *_unknown_to_llama_cpp(out),
    ]
