"""The round trip of a checkpoint: plain transformers loads its files as the model, tokenizer and settings of the run,
and computes what the run computes.

A run opens its first checkpoint. Small weights are loaded in the run's own process, others in a process of its own on
the host, while training continues; the run itself only computes a short answer when it saves:

python -m sftkit.verify.round_trip FOLDER EXPECTED      prints what `reopen` returns, as JSON
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import ModelConfig
from sftkit.config.terminal import print_text
from sftkit.models import files
from sftkit.models.float8 import products_in_bf16
from sftkit.models.kind import kind_of
from sftkit.models.load import from_config, full_model, load_options
from sftkit.models.structure import decoder_blocks, inference, plain_class, positions, vocab_size
from sftkit.models.towers import skeleton, whole_of
from sftkit.models.trained import adapters_of, logical_elements, members_in
from sftkit.parallel.tensor import without_sequence_parallel
from sftkit.parallel.wrap import as_whole, reshard
from sftkit.rundir.files import check_loadable
from sftkit.rundir.names import ADAPTER_WEIGHTS, adapter_dir, step_dir
from sftkit.rundir.status import describe_error
from sftkit.runtime.script import first_of
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Check
from sftkit.verify.documents import WIDEST, relative
from sftkit.verify.gradients import limits
from sftkit.verify.plain import APART, DRAWS, rounded_at_random

PROBE_LENGTH = 64
PROMPT = "What is 12 + 30?\n  Zwölf Äpfel, 你好."
ANSWERED = 8
SMALL = 2**28
"""Bytes of weights that are loaded in the run's own process, in less time than another one needs to import torch: at
most."""
HEADROOM = 1.25
"Host memory that is needed to load weights, over their bytes."
NAME = "First checkpoint is loaded by transformers as this model"


def row_logits(orig_model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return the logits of a row of tokens, fp32 [T, V] on the host, computed eagerly by the plain model; every rank
    calls it.

    The same kind of device and dtype gives the same bits. Attention uses torch's math kernel: torch's choice among
    the others depends on settings of the process, which differ between a run that trains with `sdpa` and a new
    process, and each kernel rounds differently. Layers in float8 multiply in bf16, as in a process that opens a
    checkpoint.
    """
    kind = kind_of(orig_model.config)
    try:
        # Everything that could change a bit is fixed: whole weights, no compiled code, one attention kernel.
        with (
            as_whole(orig_model),
            inference(orig_model),
            sdpa_kernel(SDPBackend.MATH),
            without_sequence_parallel(orig_model),
            products_in_bf16(orig_model),
        ):
            made_up = kind.made_up_inputs(orig_model, 1, len(ids))
            arrays = {"input_ids": np.array([ids]), **({} if made_up is None else made_up.arrays)}
            given = {name: torch.from_numpy(array).to(orig_model.device) for name, array in arrays.items()}
            return kind.plain_logits(orig_model, given)[0].float().cpu()
    finally:
        # a forward pass without a backward pass leaves gathered weights behind
        reshard(orig_model)


def logits_of(orig_model: PreTrainedModel) -> dict[str, Any]:
    """Return a digest of the logits of a fixed row of tokens, which `verify_checkpoint` compares; every rank calls
    it. Several adapters have a digest each, under "adapters"."""
    if not (members := members_in(orig_model)):
        return _logits_of(orig_model)
    from sftkit.models.many_adapters import active

    found = {}
    for k, member in enumerate(members):
        with active(orig_model, k):
            found[member.name] = _logits_of(orig_model)
    return {"adapters": found}


def _logits_of(orig_model: PreTrainedModel) -> dict[str, Any]:
    length = min(PROBE_LENGTH, positions(orig_model) or PROBE_LENGTH)
    # Any fixed row of tokens would do. This one needs no random generator, whose numbers may change between versions.
    ids = [(7 * i + 3) % vocab_size(orig_model) for i in range(length)]
    logits = row_logits(orig_model, ids)
    adapters = adapters_of(orig_model)
    return {
        **({"base": "nf4"} if adapters is not None and adapters.config.base == "nf4" else {}),
        "ids": ids,
        "sha256": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
        "last": logits[-1, :8].tolist(),
        "norm": float(logits.double().norm()),
        "device": orig_model.device.type,
        "dtype": str(orig_model.dtype).removeprefix("torch."),
    }


def open_plainly(
    folder: Path,
    dtype: torch.dtype,
    *,
    base: str = "bf16",
    device: str = "cpu",
    trusted: bool = False,
    peft: bool = False,
) -> tuple[PreTrainedModel, list[str], str]:
    """Load the model or adapter of a folder without any setup of ours, as a server would.

    Args:
        dtype: precision of the model under an adapter; that of a whole model is the one of its files.
        base: adapter.base; peft knows no NF4 of ours, and would keep a quantized start quantized, so sftkit computes
            such an adapter.
        trusted: model.trust_remote_code.
        peft: whether peft loads an adapter, if it is installed.

    Returns:
        the model, what its files have too much or too little, and how it was loaded.
    """
    name = files.auto_class_in(folder)
    auto_class = getattr(transformers, name)
    given: dict[str, Any] = {"output_loading_info": True, "trust_remote_code": trusted}
    adapter = files.adapter_at(ModelConfig(path=str(folder)))
    if adapter is None:
        model, info = auto_class.from_pretrained(folder, **given)
        if (folder / files.UNCHANGED).is_file():  # the start had them
            info["unexpected_keys"] -= files.header_of(folder / files.UNCHANGED).keys()
        how = f"{name}.from_pretrained"
    elif peft and base != "nf4" and find_spec("peft") is not None and not files.stored_format(adapter.base):
        from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model_state_dict

        if name == files.CAUSAL:
            model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trusted)
        else:
            under = {"dtype": dtype, "revision": adapter.base.revision or "main"}
            model = PeftModel.from_pretrained(auto_class.from_pretrained(str(adapter.base.path), **under), folder)
        # peft only warns of names that it does not find, and B = 0 hides that they are not loaded.
        held = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
            info = {"missing": held - {*file.keys()}, "unexpected": {*file.keys()} - held}
        model = model.get_base_model()
        how = f"{'AutoPeftModelForCausalLM' if name == files.CAUSAL else 'PeftModel'}.from_pretrained"
    else:
        from sftkit.models.adapters import adapters_in, add_adapters

        path, revision = str(adapter.base.path), adapter.base.revision or "main"
        # The layers are those of a larger model's text model.
        if name != files.CAUSAL or files.stored_format(adapter.base):
            precision = "bf16" if dtype == torch.bfloat16 else "fp32"
            model, info = full_model(path, precision, load_options(path, adapter.base), independent=True), {}
        else:
            model, info = auto_class.from_pretrained(path, dtype=dtype, revision=revision, **given)
        adapters = adapters_in(adapter)
        config = replace(adapters.config, base=base)  # type: ignore[arg-type]
        add_adapters(model, replace(adapters, config=config), torch.device(device))
        how = f"{name}.from_pretrained of {path} with these factors, computed by sftkit"
    # Tensors that the class lacks change no logits, but then the files do not match this class.
    return model.eval(), [f"{key}: {first_of(sorted(map(str, names)))}" for key, names in info.items() if names], how


def verify_checkpoint(folder: Path, recorded: Mapping[str, Any]) -> Check:
    """Load a checkpoint with plain transformers and compare its logits with the digest that its run recorded.

    Args:
        folder: step directory.
        recorded: "logits" of the run's proof.json.

    Raises:
        ConfigError: one of its files is damaged.
    """
    if several := recorded.get("adapters"):  # each is a model of its own
        checks = [verify_checkpoint(adapter_dir(folder, name), one) for name, one in several.items()]
        words = "; ".join(f"{name}: {check.found}" for name, check in zip(several, checks, strict=True))
        return replace(checks[0], ok=all(check.ok for check in checks), found=words)
    check_loadable(str(folder))
    dtype, device = getattr(torch, recorded["dtype"]), recorded["device"]
    model, others, loaded = open_plainly(folder, dtype, base=recorded.get("base", "bf16"), device=device)
    found = logits_of(model.to(device))
    same = found["sha256"] == recorded["sha256"]
    words = "the same bits" if same else f"norm {found['norm']:.6g} against {recorded['norm']:.6g}"
    how = f"{loaded}, {len(recorded['ids'])} fixed tokens, sha256 of the logits"
    words, ok = "; ".join([words, *others]), same and not others
    return Check("Checkpoint gives the logits of the run", ok, words, "the same bits", how)


@dataclass(frozen=True)
class Expected:
    """What a checkpoint is compared with, as JSON values except the logits."""

    facts: dict[str, Any]
    "see facts_of"
    ids: list[int]
    "a prompt and the greedy answer to it"
    dtype: str
    base: str
    "adapter.base"
    trusted: bool
    "model.trust_remote_code"
    limit: float
    "largest difference of the logits, unless rounding alone explains a larger one"
    logits: Tensor | None = None
    "fp32 [T, V], at these tokens"


def facts_of(model: PreTrainedModel, generation: GenerationConfig | None, tokenizer: Any) -> dict[str, Any]:
    """Return what a checkpoint's files must say of a model and its tokenizer, as JSON values."""
    settings = {} if generation is None else generation.to_diff_dict()
    settings.pop("transformers_version", None)
    facts = {
        "class": plain_class(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "tied weights": sorted(getattr(model, "all_tied_weights_keys", None) or ()),
        # transformers unties weights that differ in the files; servers do as the config says.
        "tie_word_embeddings": bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False)),
        "generation config": settings,
        "tokens of a prompt": _prompt(tokenizer),
    }
    return json.loads(json.dumps(facts))


def _prompt(tokenizer: Any) -> list[int]:
    """Return the tokens of a user's message in the chat template, or of the text without one."""
    if tokenizer.chat_template:
        try:
            message = [{"role": "user", "content": PROMPT}]
            return list(
                tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
            )
        except Exception:  # templates reject what they like: one for pictures, or for a system prompt first
            pass
    return list(tokenizer(PROMPT)["input_ids"])


def _differences(folder: Path, expected: Expected, model: PreTrainedModel) -> list[str]:
    """Return what the files of a folder say otherwise than the run; `model`: made of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=expected.trusted)
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    own = facts_of(model, generation, tokenizer)
    return [
        f"{name}: {own[name]} instead of {value}"[:300] for name, value in expected.facts.items() if own[name] != value
    ]


def reopen(folder: Path, expected: Expected) -> dict[str, Any]:
    """Load a folder and compare it.

    Returns:
        problems: what is otherwise. logits: norm of the difference of the logits over their norm. limit: of it. same:
        tokens of the answer that are the same. how: how it was loaded. seconds: how long it took.
    """
    started = time.perf_counter()
    assert expected.logits is not None
    # Loading must not move the generator of the run.
    with torch.random.fork_rng(devices=[]):
        dtype = getattr(torch, expected.dtype)
        model, problems, how = open_plainly(folder, dtype, base=expected.base, trusted=expected.trusted, peft=True)
    problems += _differences(folder, expected, model)
    logits = row_logits(model, expected.ids)[:, : expected.logits.shape[1]]
    same = int((logits[-ANSWERED - 1 : -1].argmax(-1) == torch.tensor(expected.ids[-ANSWERED:])).sum())
    difference = relative(logits, expected.logits)
    limit = expected.limit
    if not difference <= limit:  # a GPU and the host round otherwise in every product
        with torch.random.fork_rng(devices=[]), rounded_at_random(model):
            moved = [relative(row_logits(model, expected.ids)[:, : logits.shape[1]], logits) for _ in range(DRAWS)]
        limit = max(limit, min(APART * max(moved), WIDEST))
    seconds = time.perf_counter() - started
    return {"problems": problems, "logits": difference, "limit": limit, "same": same, "how": how, "seconds": seconds}


class RoundTrip:
    """Open the first checkpoint of a start. Every rank has an instance and calls `expect`; the main rank does the
    rest."""

    def __init__(
        self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rt: Runtime, *, trusted: bool
    ) -> None:
        self._orig_model, self._tokenizer, self._rt, self._trusted = orig_model, tokenizer, rt, trusted
        self._step: int | None = None
        self._expected: Expected | None = None
        self._found: list[Check] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._output: TemporaryDirectory[str] | None = None
        self._folder = Path()

    def files_check(self, write: Callable[[Path], Path]) -> Check:
        """Check the files of a checkpoint besides its weights, before the first step; the main rank calls it.

        Args:
            write: writes config, generation config and tokenizer into a folder, and returns where they are.
        """
        facts: dict[str, Any] = {}
        try:
            with TemporaryDirectory() as elsewhere:
                folder = write(Path(elsewhere))
                expected = self._expect([])
                facts = expected.facts
                problems = _differences(folder, expected, self._made_of(folder))
        except Exception as error:  # whatever transformers raises for files that it cannot read
            problems = [describe_error(error)]
        found = "; ".join(problems) or ", ".join(facts)
        how = "config, generation config and tokenizer, saved as in a checkpoint and loaded by transformers, no weights"
        name = "Files next to the weights are read as in this run"
        return Check(name, not problems, found, "each the same", how)

    def _made_of(self, folder: Path) -> PreTrainedModel:
        """Return the model of a config.json, without weights; the live one for an adapter, which has no config."""
        if adapters_of(self._orig_model) is not None:
            return self._orig_model
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=self._trusted)
        if whole_of(self._orig_model) is not None:
            return skeleton(config)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = from_config(config, config.dtype, trust_remote_code=self._trusted)
        model.tie_weights()
        return model

    def _expect(self, ids: list[int], logits: Tensor | None = None) -> Expected:
        model, adapters = self._orig_model, adapters_of(self._orig_model)
        dtype = str(model.dtype).removeprefix("torch.")
        base = "bf16" if adapters is None else adapters.config.base
        facts = facts_of(model, model.generation_config, self._tokenizer)
        if (whole := whole_of(model)) is not None and adapters is not None:
            for name in ("class", "tied weights", "tie_word_embeddings"):
                del facts[name]  # no file of an adapter has them
        elif whole is not None:
            facts["class"] = whole.model_class.__name__
            facts["tied weights"] = sorted(map(whole.live_name, facts["tied weights"]))
        limit = limits(model.dtype, len(decoder_blocks(model))).logits
        return Expected(facts, ids, dtype, base, self._trusted, limit, logits)

    def expect(self, step: int) -> None:
        """Before the first save of this start: compute the greedy answer of the live model; every rank calls it."""
        if self._step is not None:
            return
        self._step = step
        ids = _prompt(self._tokenizer)[: min(PROBE_LENGTH, positions(self._orig_model) or PROBE_LENGTH) - ANSWERED]
        with _first_member(self._orig_model):
            for _ in range(ANSWERED):
                ids.append(int(row_logits(self._orig_model, ids)[-1].argmax()))
            logits = row_logits(self._orig_model, ids)
        if self._rt.is_main:
            self._expected = self._expect(ids, logits)

    def ended_save(self, step: int, failure: str | None, run_dir: Path) -> None:
        """Open the checkpoint of the first save once it is published; the main rank calls it after every save."""
        expected = self._expected
        if step != self._step or expected is None:
            return
        self._expected = None
        self._folder = step_dir(run_dir, step)
        if members := members_in(self._orig_model):
            self._folder = adapter_dir(self._folder, members[0].name)
        width = 4 if expected.dtype == "float32" else 2
        size = width * sum(map(logical_elements, self._orig_model.parameters()))
        needed, free = HEADROOM * size / 2**30, psutil.virtual_memory().available / 2**30
        if failure is not None:
            self._end("the first save failed")
        elif needed > free:
            self._end(f"not loaded: it needs {needed:.1f} GiB of host memory, and {free:.1f} are free")
        elif size <= SMALL:
            try:
                self._judge(reopen(self._folder, expected), "in this process")
            except Exception as error:  # whatever transformers raises for files that it cannot load
                self._end_in(describe_error(error))
        else:
            self._start(expected)

    def _start(self, expected: Expected) -> None:
        """Start the process that loads the folder."""
        assert expected.logits is not None
        self._output = TemporaryDirectory(prefix="sftkit-round-trip-")
        given = Path(self._output.name)
        said = {"expected": json.dumps(asdict(replace(expected, logits=None)))}
        save_file({"logits": expected.logits}, given / "expected", metadata=said)
        # On the host, and no rank of the launch.
        launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {key: value for key, value in os.environ.items() if key not in launch and "ACCELERATE_" not in key}
        words = [sys.executable, "-m", "sftkit.verify.round_trip", str(self._folder), str(given / "expected")]
        with (given / "stdout").open("wb") as out, (given / "stderr").open("wb") as err:
            self._process = subprocess.Popen(
                words, env={**env, "CUDA_VISIBLE_DEVICES": ""}, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )

    def checks(self, seconds: float | None = None) -> list[Check]:
        """Return the check once it is made; empty before, and after it was returned.

        Args:
            seconds: how long to wait for it at the end of training; None: not at all, training continues.
        """
        process, output = self._process, self._output
        if process is not None and output is not None and (seconds is not None or process.poll() is not None):
            self._process = None
            texts = []
            try:
                code = process.wait(seconds)
                texts = [(Path(output.name) / name).read_text(errors="replace") for name in ("stdout", "stderr")]
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code == 0:
                self._judge(json.loads(texts[0].strip().splitlines()[-1]), "in a process of its own on the host")
            elif not self._folder.is_dir():
                self._end("not loaded: a later checkpoint replaced it (checkpoint.keep)")
            elif code < 0:
                self._end("not loaded: its process was ended")
            else:
                self._end_in((texts[1].strip().splitlines() or ["no message"])[-1])
        found, self._found = self._found, []
        return found

    def _judge(self, found: Mapping[str, Any], where: str) -> None:
        words = [
            f"{found['same']} of {ANSWERED} greedy tokens are the same, logits differ by {found['logits']:.1e}",
            *found["problems"],
            f"{found['seconds']:.1f} s {where}",
        ]
        ok = not found["problems"] and found["logits"] <= found["limit"]
        compared = f"class, dtype, ties, tokens, settings; logits to {found['limit']:.1e}"
        self._end("; ".join(words), ok=ok, how=found["how"], expected=compared)

    def _end_in(self, error: str) -> None:
        self._end(f"transformers does not load it: {error[:400]}", ok=False, expected="it is loaded")

    def _end(
        self, found: str, *, ok: bool | None = None, how: str = "from_pretrained of its folder", expected: str = "-"
    ) -> None:
        how += ": a prompt in the chat template and its greedy answer, against the live model at the save"
        self._found.append(Check(NAME, ok, f"step {self._step}: {found}", expected, how))

    def close(self) -> None:
        """End the process, if there is one, and delete what it was given."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._output is not None:
            self._output.cleanup()


def _first_member(orig_model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which a model with several adapters computes with the first."""
    if not members_in(orig_model):
        return nullcontext()
    from sftkit.models.many_adapters import active

    return active(orig_model, 0)


def main() -> None:
    """Load the folder that the command line names, and print what `reopen` returns."""
    folder, path = sys.argv[1:]
    os.nice(10)  # training comes first
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    with safe_open(path, "pt") as file:
        given = json.loads(file.metadata()["expected"])
        expected = Expected(**given | {"logits": file.get_tensor("logits")})
    transformers.utils.logging.disable_progress_bar()
    print_text(json.dumps(reopen(Path(folder), expected)))


if __name__ == "__main__":
    main()
