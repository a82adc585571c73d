"""Load the tokenizer that a stage starts from, or train it on the stage's sources.

A trained tokenizer is a byte-level BPE: any text round-trips, each digit is a token, chat turns have special tokens.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, ModelConfig, SourceConfig, TokenizerTraining
from sftkit.config.tables import CHAT_TEMPLATES
from sftkit.data.tokens import sources
from sftkit.data.tokens.template import with_arguments
from sftkit.data.tokens.text import set_text_start
from sftkit.errors import ConfigError, DataError, config_error
from sftkit.models.files import adapter_at, reading_files
from sftkit.models.load import load_options, loading, start_generation_config
from sftkit.models.vocabulary import add_tokens
from sftkit.rundir.files import check_loadable, flush_folder
from sftkit.rundir.names import TOKENIZER, resolve
from sftkit.runtime.script import working
from sftkit.runtime.start import Runtime

END_OF_TEXT, PAD, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
TURN_MARK = re.compile(r"<\|\w+\|>")

ROUND_TRIP = "It's 12345, WE'LL  go on:\n\n\tdef f(x):\r\n    return x!=1;  naïve 東京 🙂 end"
"""Text for comparing a tokenizer with its file. It begins with a letter: with a leading space, Llama 2 tokenizers
differ from their files by design.
"""

# Text is first split into these parts, and no token crosses a split: a word with the space before it, one digit, a
# run of signs, white space.
PRE_TOKENIZER_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, by default the one next to `model.path`, with
    `model.chat_template` if set.

    Missing special tokens of a template given by name are added (models/vocabulary.py).

    Raises:
        ConfigError: there is no tokenizer, it is a slow one, the template does not exist or uses tokens that the
            tokenizer lacks, or the checkpoint's files are damaged.
    """
    # A folder with a tokenizer is used as it is; a run means its checkpoint. model.revision belongs to the model.
    own = model.tokenizer is not None and (Path(model.tokenizer) / "tokenizer_config.json").is_file()
    path = str(model.tokenizer) if own else resolve(model.tokenizer or model.path or "")
    check_loadable(path)
    if model.tokenizer is None and not (Path(path) / "tokenizer_config.json").is_file():
        files = adapter_at(model)  # of peft, which saves no tokenizer
        if files is not None:
            model = files.base
            path = resolve(model.path or "")
    options = load_options(path, model) | ({"revision": "main"} if model.tokenizer else {})
    file = own_tokenizer(path, str(options["revision"]))
    with loading(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    if not tokenizer.is_fast:
        raise config_error("slow tokenizer", path=path)
    # transformers makes an empty one for a folder without files of a tokenizer.
    if tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False) < 2:
        raise config_error("empty tokenizer", path=path)
    # A tokenizer of the hub is in the cache by now.
    if (file := file or own_tokenizer(path, str(options["revision"]))) is not None:
        check_own_file(tokenizer, file, path)
    if model.chat_template is not None:
        tokenizer.chat_template = read_template(model.chat_template)
        add_tokens(tokenizer, CHAT_TEMPLATES.get(model.chat_template, ()))
        # A marker that is not a token would be split into pieces of ordinary text, none of which would end a turn.
        missing = [t for t in TURN_MARK.findall(tokenizer.chat_template) if t not in tokenizer.get_vocab()]
        if missing:
            known = " or ".join(CHAT_TEMPLATES)
            raise config_error("tokens of a chat template", model=model, missing=missing[0], path=path, known=known)
    set_template_arguments(tokenizer, model)
    set_text_start(tokenizer, published_start(model))
    if tokenizer.pad_token_id is None:  # any token works: padding is never attended to and never a target
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def own_tokenizer(path: str, revision: str) -> Tokenizer | None:
    """Load the tokenizer from the tokenizer.json of a folder or a cached hub repository; None if there is no
    such file.

    Raises:
        ConfigError: the file is damaged.
    """
    found = Path(path) / "tokenizer.json"
    if not os.path.isdir(path):
        cached = try_to_load_from_cache(path, "tokenizer.json", revision=revision)
        found = Path(cached) if isinstance(cached, str) else found
    if not found.is_file():
        return None
    with reading_files(found, "the tokenizer"):
        own = Tokenizer.from_file(str(found))
        own.no_truncation()
        own.no_padding()
    return own


def check_own_file(tokenizer: PreTrainedTokenizerBase, own: Tokenizer, path: str) -> None:
    """Reject a tokenizer that does not tokenize like the tokenizer.json that it was loaded from.

    Some classes of transformers replace parts of that file, such as its pre-tokenizer: the Llama distillations of R1
    name LlamaTokenizerFast, and then lose spaces and line ends.

    Raises:
        ConfigError: names the class, and how to load the file unchanged.
    """
    with reading_files(path, "the tokenizer"):
        expected = own.encode(ROUND_TRIP, add_special_tokens=False).ids
        text = own.decode(expected, skip_special_tokens=False)
        found = tokenizer(ROUND_TRIP, add_special_tokens=False, split_special_tokens=False, verbose=False)["input_ids"]
        back = tokenizer.decode(found, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if found == expected and (back == ROUND_TRIP or text != ROUND_TRIP):
        return
    there = own.encode(ROUND_TRIP, add_special_tokens=False).tokens
    here = tokenizer.convert_ids_to_tokens(found)
    at = next((i for i, (one, other) in enumerate(zip(there, here, strict=False)) if one != other), 0)
    lost = "" if back == text else f", and gives back {back[:40]!r} for {ROUND_TRIP[:40]!r}"
    made = {"here": here[at : at + 4], "there": there[at : at + 4], "lost": lost}
    raise config_error("tokenizer unlike its file", path=path, cls=type(tokenizer).__name__, **made)


def published_start(model: ModelConfig) -> int | None:
    """Return the start token of the start model's texts (decoder_start_token_id); None for a new model, or one
    without an encoder.

    Raises:
        ConfigError: config.json and generation_config.json name different tokens.
    """
    if model.path is None:
        return None
    path = resolve(model.path)
    options = load_options(path, model)
    try:
        with loading(path):
            fields, _ = PretrainedConfig.get_config_dict(path, **options)
    except ConfigError:  # loading the model reports it; a tokenizer in its own folder does not need the config
        return None
    if not fields.get("is_encoder_decoder"):
        return None
    generation = start_generation_config(path, options)
    found = (fields.get("decoder_start_token_id"), getattr(generation, "decoder_start_token_id", None))
    named = {int(one) for one in found if one is not None}
    if len(named) > 1:
        raise config_error("two start tokens", path=path, tokens=" and ".join(map(str, sorted(named))))
    return next(iter(named), None)


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Write model.chat_template_args into the chat template; some tokenizers have several templates.

    Raises:
        ConfigError: there is no template, or no template has such an argument.
    """
    args = model.chat_template_args
    template = tokenizer.chat_template
    if args is None:
        return
    if not template:
        raise config_error("arguments without chat template")
    if isinstance(template, dict):
        tokenizer.chat_template = {name: with_arguments(source, args) for name, source in template.items()}
    else:
        tokenizer.chat_template = with_arguments(template, args)


def read_template(template: str) -> str:
    """Return the text of a chat template, given by name or file.

    Raises:
        ConfigError: the file cannot be read.
    """
    ours = str(Path(__file__).parents[1] / "data" / "tokens" / f"{template}.jinja")
    path = ours if template in CHAT_TEMPLATES else template
    try:
        # A byte order mark, which some editors write, would begin every prompt.
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"model.chat_template: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"model.chat_template: {path}: not UTF-8 text ({error.reason}): convert it") from error


def base_tokenizer(model: ModelConfig, data: DataConfig, run_dir: Path, rt: Runtime) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a base run: loaded, or trained by rank 0 on the run's sources and kept in
    the run directory.
    """
    if model.train_tokenizer is None:
        return load_tokenizer(model)
    folder = run_dir / TOKENIZER
    with rt.main_first():
        if rt.is_main and not folder.exists():
            # Renamed when complete: an interrupted start leaves no partial tokenizer for the next one.
            temporary = folder.with_name(f".{folder.name}.tmp")
            new_tokenizer(model, model.train_tokenizer, data).save_pretrained(temporary)
            flush_folder(temporary)
            os.rename(temporary, folder)
    return AutoTokenizer.from_pretrained(folder)


def new_tokenizer(model: ModelConfig, training: TokenizerTraining, data: DataConfig) -> PreTrainedTokenizerBase:
    """Train a tokenizer on its sources, with `model.chat_template` or our own template."""
    template = model.chat_template or "chatml"
    texts = training_texts(training.sources or data.train, data)
    with working(f"training a tokenizer of {training.vocab_size:,} tokens"):
        tokenizer = train_tokenizer(texts, training.vocab_size, read_template(template))
    set_template_arguments(tokenizer, model)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries, including the four special tokens (ids 0-3) and all
    256 bytes.

    Documents end with <|endoftext|>, which is eos; nothing precedes them. The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), behavior="isolated")
    # Without ByteLevel's own pattern (GPT-2's): only our pattern splits texts.
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    # A token's characters include the space before a word: the loss mask counts characters.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    every_byte = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": list(SPECIAL_TOKENS), "initial_alphabet": every_byte, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, **options)
    tokenizer.train_from_iterator(texts, trainer)
    special: Any = {"eos_token": END_OF_TEXT, "pad_token": PAD, "extra_special_tokens": [IM_START, IM_END]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.chat_template = chat_template
    return fast


def training_texts(tokenizer_sources: Iterable[SourceConfig], data: DataConfig) -> Iterator[str]:
    """Yield the texts of all rows: their text, the captions of pictures, or the content of each message."""
    for source in tokenizer_sources:
        for row in sources.read_source(source, data.on_bad_row, data):
            if row.ids is not None:
                raise DataError(f"{row.where}: tokens (input_ids), but a tokenizer is trained on texts: give its text")
            if row.text is not None:
                yield row.text
            else:
                yield from (text for text, _ in row.segments or ())
                yield from row.captions
                yield from (str(message.get("content") or "") for message in row.messages or ())
