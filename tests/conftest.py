"""A small tokenizer, trained in a blink, with the special tokens of the published chat formats."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Several test processes share the cores, so each takes one, and Inductor compiles in the process that asks for it:
# a pool of compilers of its own would import torch again. The vector instructions that the processor names are used without
# a trial of each in a new process. Read by torch when it is imported, here and in subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Hides scikit-learn from processes of tests, as below from this one: transformers would import it, which takes two seconds.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "support" / "startup"), os.environ.get("PYTHONPATH")])
)

if gc.isenabled():
    gc.disable()  # until all is imported: a quarter of that time was a search of half a million objects for garbage
if "torch" not in sys.modules:
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]

import preloaded
import pytest
from own_process import pytest_pyfunc_call  # noqa: F401
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from sftkit.runtime.signals import SIGNALS, Listener, Stopping

if TYPE_CHECKING:  # the process that hands tests out to others needs no transformers
    from transformers import PreTrainedTokenizerFast

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup too: runs would inherit that it is ignored, which they heed

GOLDEN = Path(__file__).parent / "golden"
OUR_TEMPLATE = Path(__file__).parents[1] / "src" / "sftkit" / "data" / "tokens" / "chatml.jinja"
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"

SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<s>", "</s>"),
]
TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"Added tokens that are ordinary text, as in Qwen3."

SENTENCES = [
    "You are a helpful assistant. Answer the question in one short sentence.",
    "What is the capital of France? The capital of France is Paris.",
    "How many days are in a week? There are seven days in a week: Monday, Tuesday and so on.",
    "A system prompt, a user and an assistant take turns; each turn ends with a token of its own.",
    'Tools are called with {"name": "get_weather", "arguments": {"city": "Berlin"}}.',
    "Knowledge Date: December 2023. Today Date: 26 Jul 2024. Environment: python.",
    "She sells sea shells by the sea shore, and then she counts them: one, two, three, four.",
    "Die Straßenbahn fährt über die Brücke. Где находится библиотека? 你好，世界。",
]


def pytest_configure(config: pytest.Config) -> None:
    """Fork the workers from the process that ranks and scripts are forked from, unless they may use a GPU or the hub."""
    workers = getattr(config.option, "tx", None)
    is_default = "not network" in config.option.markexpr and not Path("/dev/nvidiactl").exists()
    if workers and not hasattr(config, "workerinput") and is_default and preloaded.FORKS:
        os.environ[preloaded.SOCKET] = preloaded.server()
        config.option.tx = [f"popen//python={sys.executable} {preloaded.__file__}" for _ in workers]


FREEZE = gc.freeze
"The original: what runs in tests call does nothing, and so does their unfreeze."


def pytest_collection_finish() -> None:
    """Freeze all that was imported, to the end of the process: each run would look at half a million objects before its
    first step."""
    gc.enable()
    gc.collect()
    FREEZE()
    atexit.register(gc.unfreeze)  # or nanobind (of triton 3.9) lists on stderr what is left at the end
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Freeze what a test leaves, such as modules that it imported, if it made a full collection; others would examine it."""
    before = gc.get_stats()[2]["collections"]
    try:
        return (yield)
    finally:
        if gc.get_stats()[2]["collections"] > before:
            gc.collect()
            FREEZE()


@pytest.fixture(autouse=True)
def signals_given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in tests have no `with`, and a script keeps its signals to its end, where it ignores them: those of this process
    are given back after each test, also for the processes that a later test starts."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stoppings: list[Stopping] = []
    listeners: list[Listener] = []
    listen, start = Stopping._listen, Listener.__init__

    def noted(self: Stopping) -> None:
        stoppings.append(self)
        listen(self)

    def started(self: Listener, receiver: Callable[[int], None]) -> None:
        listeners.append(self)
        start(self, receiver)

    monkeypatch.setattr(Stopping, "_listen", noted)
    monkeypatch.setattr(Listener, "__init__", started)
    yield
    for stopping in reversed(stoppings):
        stopping.close()
    for listener in reversed(listeners):
        if listener._writing >= 0:  # it is not closed
            listener.close()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def small_bpe() -> str:
    """tokenizer.json of a byte-level BPE of about 560 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TEXT_TOKENS])
    return tokenizer.to_str()


@pytest.fixture
def make_tokenizer(small_bpe: str) -> Callable[..., PreTrainedTokenizerFast]:
    """make_tokenizer(template, bos, eos, adds_bos, trim_offsets): a fresh tokenizer with that chat template."""

    def make(
        template: str | None = "chatml",
        bos: str | None = None,
        eos: str | None = "<|im_end|>",
        adds_bos: bool = False,
        trim_offsets: bool = False,
    ) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(small_bpe)
        steps: list[processors.PostProcessor] = [processors.ByteLevel(trim_offsets=trim_offsets)]
        if adds_bos:
            assert bos is not None
            steps.append(processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]))
        backend.post_processor = processors.Sequence(steps)
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token="<|endoftext|>"
        )
        if template is not None:
            path = OUR_TEMPLATE if template == "chatml" else GOLDEN / f"{template}.jinja"
            tokenizer.chat_template = path.read_text()
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """The small tokenizer with sftkit's own chat template."""
    return make_tokenizer()
