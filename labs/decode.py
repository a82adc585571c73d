"""Measure the decoding speed of evaluation, for answers of a causal model and captions of pictures: transformers' own
generate, eager steps, steps replayed as a CUDA graph, and steps and encoder compiled with reduce-overhead.

python -m labs.decode TOKENIZER_FOLDER QUESTIONS.jsonl[.gz] OUT.json [--seconds 300] [--tiny]

The models are the Qwen3 0.6B shape, with GSM8K questions through the chat template, and ViT-base with GPT-2 small,
which describe pictures of data/demo/builtin.py. Their weights are random (speed does not depend on them; no text ends
by itself). Speeds are measured in bf16, where two almost equal best tokens may swap from kernel to kernel. Texts are
compared for equality on the same shapes with fewer layers in fp32 (`exact`); the equality of the speed runs' own
texts is only informative.

Every step is timed separately. `warm_up_seconds` is the extra time of the first call over later ones, including
compilation. `recording_seconds` is the extra time of a batch's first two steps over two others. `pays_from_steps` is
the number of steps of a batch that win this back, `pays_from_tokens` the total number of tokens that win back the
warm-up. A failing part records its error, and all parts end within --seconds. --tiny: two small layers to try the
script, without a time limit.
"""

from __future__ import annotations

import gzip
import json
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedModel

from labs.pages import decode_tables
from sftkit.config.commands import Parser
from sftkit.config.terminal import print_text
from sftkit.data.demo.builtin import PREFIX, picture
from sftkit.data.tokens import chat
from sftkit.data.types import EncoderInputs, Row
from sftkit.generation import kv_cache
from sftkit.generation.decode import Batching, Decoding, generate
from sftkit.generation.kv_cache import StaticStep, fixed_layers
from sftkit.models.encoders import PIXELS, VisionToText
from sftkit.models.kind import kind_of
from sftkit.models.load import from_scratch
from sftkit.ops.attention import implementation
from sftkit.ops.flex import IMPLEMENTATION
from sftkit.runtime.hardware import environment

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILE: dict[str, Any] = {
    "dynamic": False,
    **({"mode": "reduce-overhead"} if DEVICE.type == "cuda" else {"backend": "aot_eager"}),
}


@dataclass(frozen=True)
class Way:
    """A way to generate texts."""

    name: str
    step: type[StaticStep] | None = None
    "None: eager steps"
    encoder_compiled: bool = False
    transformers: bool = False


class CompiledStep(StaticStep):
    """A step of Inductor's kernels that torch itself records and replays."""

    _compiled = torch.compile(StaticStep._compute, fullgraph=True, **COMPILE)

    def __init__(self, *args: Any, **state: Any) -> None:
        super().__init__(*args, **state)
        cross = getattr(self._cache, "cross_attention_cache", None)
        layers = [*fixed_layers(self._cache), *(cross.layers if cross else ())]
        kept = [x for layer in layers for x in (layer.keys, layer.values)]
        # Recording needs written tensors at fixed addresses, and would copy read tensors for each replay
        for tensor in (self._tokens, self._at, self._mask, self._positions, self._order, *kept):
            torch._dynamo.mark_static_address(tensor, guard=False)  # the next batch is recorded again
        self._attending = implementation(self._orig_model, IMPLEMENTATION)
        self._attending.__enter__()  # released with its batch: setting it for each step costs milliseconds

    def __call__(self) -> torch.Tensor:
        """Return the tokens after the current ones, int64 [B, 1]."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance("default"):
            self._compiled()
        return self._tokens


_eager_encode = VisionToText.encode
_compiled_encode = torch.compile(_eager_encode, fullgraph=True, **COMPILE)


def encode_compiled(self: VisionToText, orig_model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Any:
    """Encode with compiled code."""
    with torch.compiler.set_stance("default"):
        return _compiled_encode(self, orig_model, inputs)[0].clone(), None  # memory that the next batch reuses


EAGER = Way("eager steps")
PLAIN = (EAGER, Way("transformers generate", transformers=True), Way("replayed steps", StaticStep))
COMPILED = {
    "captions": (
        Way("replayed steps, compiled encoder", StaticStep, encoder_compiled=True),
        Way("compiled steps", CompiledStep),
        Way("compiled steps and encoder", CompiledStep, encoder_compiled=True),
    ),
    "answers": (Way("compiled steps", CompiledStep),),
}

Texts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    new_tokens: int = 64
    rows: tuple[int, ...] = (1, 64)
    exact_tokens: int = 32
    exact_rows: int = 16
    exact_layers: int = 2
    seconds: int = 300
    "time limit for all parts; a part in progress is interrupted, later ones are skipped"
    tiny: bool = False


TINY = Sizes(new_tokens=8, rows=(1, 3), exact_tokens=6, exact_rows=3, exact_layers=2, tiny=True)


@dataclass(frozen=True)
class Task:
    """A model and its prompts."""

    model: PreTrainedModel
    tokenizer: Any
    prompts: list[list[int]]
    encoder_inputs: EncoderInputs | None

    def ours(self, way: Way, rows: int, new_tokens: int) -> tuple[Texts, list[float]]:
        """Return (the texts, the times at the start and after each step)."""
        times, step = [now()], Decoding.step

        def timed(decoding: Decoding) -> Any:
            found = step(decoding)
            times.append(now())
            return found

        with ExitStack() as patched:
            patched.enter_context(mock.patch.object(Decoding, "step", timed))
            patched.enter_context(mock.patch.object(kv_cache, "StaticStep", way.step or StaticStep))
            if way.encoder_compiled:
                patched.enter_context(mock.patch.object(VisionToText, "encode", encode_compiled))
            answers = generate(
                self.model,
                self.tokenizer,
                self.prompts[:rows],
                Batching(rows),
                max_new_tokens=new_tokens,
                end_ids=[-1],
                encoder_inputs=self.encoder_inputs,
                replay=way.step is not None,
            )
        return [answer.ids for answer in answers], times

    def theirs(self, rows: int, new_tokens: int) -> tuple[Texts, list[float]]:
        """Return the same from transformers' own generate, with prompts padded on the left."""
        times = [now()]

        def timed(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            times.append(now())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        if self.encoder_inputs is not None:
            pixels = torch.from_numpy(self.encoder_inputs.arrays[PIXELS][:rows]).to(DEVICE)
            inputs, skip = kind_of(self.model.config).plain_inputs(self.model, {PIXELS: pixels}), 1
        else:
            skip = max(map(len, self.prompts[:rows]))
            ids = [[0] * (skip - len(prompt)) + prompt for prompt in self.prompts[:rows]]
            mask = [[0] * (skip - len(prompt)) + [1] * len(prompt) for prompt in self.prompts[:rows]]
            given = {"input_ids": ids, "attention_mask": mask}
            inputs = {name: torch.tensor(value, device=DEVICE) for name, value in given.items()}
        call: Any = self.model.generate
        found = call(
            **inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=[timed],
        )  # fmt: skip
        return list(map(tuple, found[:, skip:].tolist())), times


def now() -> float:
    """Seconds after all work of the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def fields(name: str, layers: int, *, tiny: bool) -> dict[str, Any]:
    """Return the fields of the config of a model."""
    if name == "answers":
        hidden, inner, heads, head = (32, 64, 2, 16) if tiny else (1024, 3072, 16, 128)
        return {
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_dim": head,
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        }  # fmt: skip
    hidden, heads, side = (32, 2, 32) if tiny else (768, 12, 224)
    encoder = {
        "model_type": "vit", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "image_size": side, "patch_size": 16,
    }  # fmt: skip
    decoder = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return {"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": decoder}


def build(name: str, tokenizer: Any, questions: Path, sizes: Sizes, *, exact: bool) -> Task:
    """Build a model with new weights, large enough that its texts differ, and its prompts."""
    layers = sizes.exact_layers if exact or sizes.tiny else {"answers": 28, "captions": 12}[name]
    model = from_scratch(fields(name, layers, tiny=sizes.tiny), tokenizer, 0)
    kind_of(model.config).prepare(model, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    model = model.to(DEVICE, torch.float32 if exact or DEVICE.type == "cpu" else torch.bfloat16).eval()  # type: ignore[arg-type]
    count = max(*sizes.rows, sizes.exact_rows)
    if name == "captions":
        size = (3, model.config.encoder.image_size, model.config.encoder.image_size)
        pixels = np.stack([picture(f"{PREFIX}heldout/{i}", size) for i in range(count)])
        prompts = [[model.generation_config.decoder_start_token_id]] * count
        return Task(model, tokenizer, prompts, EncoderInputs({PIXELS: pixels}, np.arange(count)))
    opened = gzip.open if questions.suffix == ".gz" else open
    with opened(questions, "rt") as file:
        lines = list(islice(file, count))
    asked = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    prompts = [chat.render_prompt(Row("prompt", messages=messages), tokenizer) for messages in asked]
    return Task(model, tokenizer, prompts, None)


SHOWN = 80
"Maximum characters of an error."
MAX_RUNS, RUN_SECONDS = 3, 2.0
"Number of timed later calls for each way, and the seconds after which no further call begins."


def written(task: Task, way: Way, rows: int, new_tokens: int) -> tuple[Texts, list[float]]:
    """Generate texts in this way and return (the texts, the times at the start and after each step)."""
    return task.theirs(rows, new_tokens) if way.transformers else task.ours(way, rows, new_tokens)


def speed(task: Task, way: Way, rows: int, new_tokens: int) -> tuple[Texts, dict[str, Any]]:
    """Measure a first call and later ones, the first of which may still record; return (the texts,
    the measurements).
    """
    (texts, first), later = written(task, way, rows, new_tokens), list[tuple[Texts, list[float]]]()
    began = time.perf_counter()
    while len(later) < MAX_RUNS and (not later or time.perf_counter() - began < RUN_SECONDS):
        later.append(written(task, way, rows, new_tokens))
    seconds = sorted(times[-1] - times[0] for _, times in later)
    steps = [np.diff(times).tolist() for _, times in later]
    step = statistics.median(second for run in steps for second in run[3:])
    return texts, {
        "tok_per_sec": rows * new_tokens / statistics.median(seconds),
        "seconds": seconds,
        "first_token_seconds": statistics.median(run[0] for run in steps),
        "step_seconds": step,
        "recording_seconds": max(statistics.median(run[1] + run[2] for run in steps) - 2 * step, 0.0),
        "warm_up_seconds": max(first[-1] - first[0] - statistics.median(seconds), 0.0),
    }


def pays(eager: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return the number of steps or tokens that wins back a way's initial cost; None if it never does."""
    step, token = eager["step_seconds"] - run["step_seconds"], 1 / eager["tok_per_sec"] - 1 / run["tok_per_sec"]
    return {
        "pays_from_steps": run["recording_seconds"] / step if step > 0 else None,
        "pays_from_tokens": run["warm_up_seconds"] / token if token > 0 else None,
    }


def jobs(sizes: Sizes) -> list[tuple[str, int, Way, bool]]:
    """(task, rows, way, exact), with jobs that may fail or take long at the end."""
    small = [(name, sizes.exact_rows, way, True) for name in COMPILED for way in PLAIN]
    fast = [(name, rows, way, False) for name in COMPILED for rows in sizes.rows for way in PLAIN]
    captions, answers = ([(name, sizes.rows[-1], way, False) for way in COMPILED[name]] for name in COMPILED)
    exact = [(name, sizes.exact_rows, COMPILED[name][-1], True) for name in COMPILED]
    return [*small, *fast, *captions, *exact, *answers]


def measure(tokenizer: Any, questions: Path, sizes: Sizes, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all parts, and keep each result at once: a call may be interrupted."""
    began = time.perf_counter()
    results: dict[str, Any] = {"environment": environment(DEVICE, 1), "compile": COMPILE, **asdict(sizes), "runs": []}
    built = cache(lambda name, exact: build(name, tokenizer, questions, sizes, exact=exact))
    eager: dict[tuple[str, int], dict[str, Any]] = {}
    texts: dict[tuple[str, int, bool], Texts] = {}
    for name, rows, way, exact in jobs(sizes):
        started = time.perf_counter()
        run: dict[str, Any] = {"task": name, "rows": rows, "way": way.name, "exact": exact, "error": None}
        try:
            if started - began > sizes.seconds and not sizes.tiny:
                raise TimeoutError(f"left out: {sizes.seconds} s were over")
            if exact:
                found, _ = written(built(name, exact), way, rows, sizes.exact_tokens)
            else:
                found, measured = speed(built(name, exact), way, rows, sizes.new_tokens)
                run |= measured
                if way == EAGER:
                    eager[name, rows] = measured
                elif (name, rows) in eager:
                    run["times_eager"] = measured["tok_per_sec"] / eager[name, rows]["tok_per_sec"]
                    run |= {} if way.transformers else pays(eager[name, rows], measured)
            expected = texts.setdefault((name, rows, exact), found)
            run["same_texts"] = sum(a == b for a, b in zip(found, expected, strict=True)) / rows
            run["different_texts"] = len(set(found))
        except Exception as error:
            run["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:SHOWN]}"
        run["part_seconds"] = time.perf_counter() - started
        results["runs"].append(run)
        results["seconds"] = time.perf_counter() - began
        keep(results)
        what = f"{name}, {rows} rows, {way.name}{' (exact)' * exact}"
        print_text(f"{what}: {run['part_seconds']:.1f} s {run['error'] or ''}")
    return results


def break_off_after(seconds: int) -> None:
    """Interrupt the work after n seconds."""

    def break_off(*_: Any) -> None:
        raise TimeoutError(f"broken off: {seconds} s were over")

    signal.signal(signal.SIGALRM, break_off)
    signal.alarm(seconds)


def main() -> None:
    """Measure every job of every task, and write results.json."""
    words = Parser(__doc__, prog="python -m labs.decode")
    words.add_argument("tokenizer")
    words.add_argument("questions", type=Path)
    words.add_argument("out", type=Path)
    words.add_argument("--seconds", type=int, default=Sizes.seconds)
    words.add_argument("--tiny", action="store_true")
    args = words.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sizes = TINY if args.tiny else Sizes(seconds=args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(results: dict[str, Any]) -> None:
        args.out.write_text(json.dumps(results, indent=1))

    if not args.tiny:
        break_off_after(args.seconds)
    results = measure(tokenizer, args.questions, sizes, keep)
    print_text(decode_tables(results))


if __name__ == "__main__":
    main()
