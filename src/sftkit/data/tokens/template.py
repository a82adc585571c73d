"""Chat templates: render a conversation within limits of time, length and memory, and probe a template by rendering
small conversations.

A template is a program from elsewhere. Jinja's sandbox isolates it from the machine, but lets it run for ever: the
sandbox limits each `range`, but not two nested ranges.

`check_context` checks that a template renders every part of a conversation: tools, instructions, questions, results of
tools, earlier calls. A template silently leaves out the parts that it does not know, so the answers would be learned
without the text that they follow from.
"""

import json
import os
import re
import signal
import time
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal looks for an enum: ten times the cost
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from threading import current_thread, main_thread
from types import MethodType
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Macro
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from sftkit.data.reading.columns import REASONING
from sftkit.data.reading.conversation import Message, answer_core, function_of, special_pattern
from sftkit.data.types import JsonObject, Row
from sftkit.errors import ConfigError, DataError, config_error, fault

MAX_SECONDS = 10.0
"Seconds of processor time that a rendering may take; the longest records that are read take about one."
MAX_RENDERED = 2**27
"Characters of a rendered conversation: four times the longest record that is read."
MAX_MEMORY = 4 * 2**30
"Bytes by which the process may grow during a rendering that takes longer than a poll."
MAX_OPERATION = 2**24
"Characters or elements of a repeated text or list, and bits of a product or power."
_POLL_SECONDS = 0.25

Span = tuple[int, int]
"Character positions [start, end) in the rendered text."
T = TypeVar("T")


def render(source: str, variables: dict[str, Any], *, where: str, marks: bool = False) -> tuple[str, list[Span]]:
    """Return the text that a template makes of its variables and, with `marks`, the spans inside {% generation %}.

    Args:
        where: the conversation, for messages.

    Raises:
        TemplateError: the template rejects them, or cannot work with them.
        ConfigError: it exceeds a limit.
    """
    try:
        return limited(_rendered, source, variables, marks=marks)
    except TemplateError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except MemoryError:
        raise TemplateError("it takes more memory than there is") from None
    except Exception as error:  # whatever a template does with what it did not expect
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def limited(work: Callable[..., T], *args: object, **options: object) -> T:
    """Return what a function that renders returns; it is ended if it takes too long or too much memory. Only the main
    thread has this limit: signals, which end it, reach no other.

    Raises:
        ConfigError: it was ended.
    """
    global _run
    if current_thread() is not main_thread():
        return work(*args, **options)
    if getsignal(signal.SIGVTALRM) is not _check_limits:
        signal.signal(signal.SIGVTALRM, _check_limits)
    try:
        _run = _Run()
        signal.setitimer(signal.ITIMER_VIRTUAL, _POLL_SECONDS, _POLL_SECONDS)
        try:
            return work(*args, **options)
        finally:
            _run = None
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _Ended as ended:  # raised at any instruction, within the lines above too
        _run = None
        problem = f"the chat template does not end: {ended}. Take another template: model.chat_template"
        raise ConfigError(problem) from None


class _Ended(BaseException):
    """Raised in a rendering that exceeds a limit; no template can catch it."""


class _Run:
    """The rendering that is going on."""

    def __init__(self) -> None:
        """Note when it began."""
        self.started = time.thread_time()
        self.memory: int | None = None
        "bytes of the process when it was first looked at, so that a short rendering costs next to nothing"


_run: _Run | None = None
"None: nothing is rendered in the main thread."


def _check_limits(_signal: int, _frame: object) -> None:
    """End a rendering that exceeds a limit."""
    if _run is None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return
    # Time of this thread: neither other threads nor an overloaded machine end a rendering.
    now = time.thread_time()
    memory = _memory()
    _run.memory = memory if _run.memory is None else _run.memory
    exceeded = ""
    if now - _run.started > MAX_SECONDS:
        exceeded = f"after {MAX_SECONDS:g} seconds its text of one conversation is not complete"
    elif memory - _run.memory > MAX_MEMORY:
        exceeded = f"its text of one conversation takes more than {MAX_MEMORY / 2**30:g} GiB of memory"
    if exceeded:
        # Once more after as long again: an exception in a finalizer is lost.
        _run.started = now
        _run.memory = memory
        raise _Ended(exceeded)


def _rendered(source: str, variables: dict[str, Any], *, marks: bool) -> tuple[str, list[Span]]:
    """Return the text and, with `marks`, the marked spans, as transformers does with return_assistant_tokens_mask. That
    joins all of the text so far for every answer, which takes minutes for a conversation of thousands. Here spans begin
    where the text ends so far."""
    compiled, known = _compiled(source)
    found = list[str]()
    spans = _Spans()
    length = 0
    context = compiled.new_context({**known, **variables}, shared=True)
    # The tracker is private, as is the environment: both came with huggingface/transformers#30650.
    with compiled.environment.activate_tracker([], spans) if marks else nullcontext():
        for block in compiled.root_render_func(context):  # render() without the join at its end
            found.append(block)
            spans.length = length = length + str.__len__(block)  # a text that is watched (shapes) would note len
            if length > MAX_RENDERED:
                raise config_error("endless chat template", most=MAX_RENDERED)
    context.vars.clear()  # macros of the template, which hold the context: else each rendering leaves garbage
    return "".join(found), spans


class _Spans(list[Span]):
    """Spans of a text of which the first `length` characters are complete."""

    length = 0


# ---- compiling -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[Any, dict[str, Any]]:
    """Compile a template; return it with the names that it finds besides its variables. Jinja computes constants here,
    so this is a rendering too."""
    compiled = _environment().from_string(source)
    compiled.root_render_func.__globals__["str_join"] = _joined  # of the operator ~
    return compiled, dict(compiled.globals)


@lru_cache(maxsize=1)
def _environment() -> Any:
    """Return transformers' own environment, in which * and ** are limited: a power of large numbers is one instruction
    that ends in hours, and no signal ends it."""
    # Private, but the only way to its filters and marks. The environment is that of the empty template.
    environment: Any = _compile_jinja_template("").environment
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.call_binop = _binary
    safe = environment.is_safe_attribute
    known: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(owner: Any, name: str, value: Any) -> bool:
        # By the owner's type, as jinja decides it; it does so for every attribute of every message.
        if (type(owner), name) not in known:
            known[type(owner), name] = safe(owner, name, value)
        return known[type(owner), name]

    found = environment.getattr
    absent = lru_cache(maxsize=1024)(lambda name: environment.undefined(obj={}, name=name))  # it keeps the kind of obj
    of_dicts = frozenset(dir(dict))

    def attribute_of(owner: Any, name: str) -> Any:
        # A key of a message, which Jinja takes only after the attribute of an object is not there.
        if type(owner) is not dict or name in of_dicts:
            return found(owner, name)
        return owner[name] if name in owner else absent(name)

    call = environment.call
    tracker = next(one for one in environment.extensions.values() if hasattr(one, "activate_tracker"))
    generation = tracker._generation_support

    def called(
        context: Any, function: Any, /, *args: Any, _loop_vars: Any = None, _block_vars: Any = None, **named: Any
    ) -> Any:
        # Call macros as Jinja does, without its tests of marks that no macro has.
        if type(function) is Macro:
            takes_more = named or function.caller or function.catch_kwargs or function.catch_varargs
            if takes_more or len(args) != function._argument_count or context.eval_ctx.autoescape:
                return function(context.eval_ctx, *args, **named)
            return function._func(*args)
        if type(function) is MethodType and function == generation:
            text = called(context, named["caller"])
            if (spans := tracker._generation_indices) is not None:
                spans.append((spans.length, spans.length + len(text)))
            return text
        return call(context, function, *args, _loop_vars=_loop_vars, _block_vars=_block_vars, **named)

    write = json.JSONEncoder(ensure_ascii=False).encode
    tojson = environment.filters["tojson"]
    environment.filters["tojson"] = lambda x, *args, **how: (tojson if args or how else write)(x, *args, **how)
    environment.is_safe_attribute = is_safe_attribute
    environment.getattr = attribute_of
    environment.call = called
    environment.concat = _joined
    return environment


def _joined(parts: Iterable[Any]) -> str:
    """Join texts; with one that notes how a template looks at it (shapes), the whole notes it, too."""
    texts = [*parts]
    if {str}.issuperset(map(type, texts)):
        return "".join(texts)
    texts = [*map(str, texts)]
    watched: Any = next((one for one in texts if hasattr(one, "of")), None)
    whole = "".join(texts)
    return whole if watched is None else watched.of(whole)


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """Return the names that a template takes from outside: its arguments, but no fields of messages.

    Raises:
        TemplateError: it cannot be parsed.
    """
    environment: Any = _compile_jinja_template("").environment
    return frozenset(find_undeclared_variables(environment.parse(source)))


@lru_cache(maxsize=64)
def literals_of(source: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return (the strings that a template may look for inside a text, all strings that it may compare a text with,
    those in which it may look for a text).

    Raises:
        TemplateError: it cannot be parsed.
    """
    environment: Any = _compile_jinja_template("").environment
    tree = environment.parse(source)
    looks = [one.expr for one in tree.find_all(nodes.Compare) if {op.op for op in one.ops} & {"in", "notin"}]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and hasattr(str, call.node.attr) and call.node.attr[-5:] != "strip":
            looks += call.args
    looks += [value for one in tree.find_all(nodes.Filter) if one.name != "trim" for value in one.args]
    inside = {*tree.find_all(nodes.Const)} & {const for one in looks for const in (one, *one.find_all(nodes.Const))}
    strings = frozenset(const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str))
    around = frozenset[str]()
    for compared in tree.find_all(nodes.Compare):
        wholes = [op.expr for op in compared.ops if op.op in ("in", "notin")]
        if not isinstance(compared.expr, nodes.Const):
            # The string itself, or any that may be the value of a variable.
            around |= {one.value for one in wholes if isinstance(one, nodes.Const) and isinstance(one.value, str)}
            around |= strings if any(isinstance(one, nodes.Concat | nodes.Name) for one in wholes) else set()
    return strings.intersection(const.value for const in inside), strings, around


def _binary(_context: object, operator: str, left: Any, right: Any) -> object:
    """Compute a product or a power whose result is not too large."""
    size = 0.0
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), 1)
        size = bits * float(abs(right)) if operator == "**" else bits + right.bit_length()
    elif operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                size = len(one) * float(max(times, 0))
    if size > MAX_OPERATION:
        raise SecurityError(f"an operation {operator} with a result of more than {MAX_OPERATION:,} elements or bits")
    return left**right if operator == "**" else left * right


def _memory() -> int:
    """Return the bytes of memory of this process; 0 if the system does not report them."""
    with suppress(OSError):
        # A number, not a file object: the alarm may end a rendering between any two steps, and a file would warn.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
        pages = int(os.read(descriptor, 256).split()[1])
        os.close(descriptor)
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


FIRST_QUESTION = "first question"
FIRST_ANSWER = "first answer"
SECOND_QUESTION = "second question"
SECOND_ANSWER = "second answer"
_REASONED = "first reasoning"
_SEEN = "first result"
THINKING_ARGUMENTS = ("enable_thinking", "thinking")
"Arguments of published templates that turn reasoning before an answer on and off."
TODAY = "strftime_now"
"The function by which a template writes today's date."
_FIXED = re.compile(r"\A\{#- arguments: (\{.*?\}) -#\}.*?\{#- end -#\}\{\{ '' \}\}", re.DOTALL)
"Matches what `with_arguments` puts before a template."


@dataclass(frozen=True, eq=False)  # known by its identity: to hash the fields takes as long as to check a message
class Template:
    """A chat template and what rendering a small probe conversation shows about it."""

    source: str
    special_tokens: tuple[str, ...]
    has_marks: bool
    "It marks answers with {% generation %}."
    end_within: str | None
    "The special token that ends an answer which another turn follows; None: the template writes none."
    end_last: str | None
    "The special token that ends an answer which is the last message."
    end_call: str | None
    """The special token that ends an answer which calls tools: GLM writes another one there than before a question.
    None: no such token, or the template renders no calls."""
    ending: str
    "The text with which an answer ends its turn, of one special token or several; empty: not known."
    tail: str
    """The text after an answer that is the last message, and after no other: the next header, asked for or not
    (Command A), or eos after the token that ends turns (Phi-3)."""
    headers: tuple[str, ...]
    "Texts that add_generation_prompt adds: by default, with thinking requested, with thinking turned off; each once."
    short_header: str
    "The text before an answer in the middle of a conversation; shorter if prompts open a thinking block."
    between: str
    "The text between a question and its answer."
    thinking_argument: str | None
    "The argument that turns thinking on and off; None: it has none."
    fixed: frozenset[str]
    "Arguments that model.chat_template_args has set."
    reasoning_key: str | None
    "The field of a message whose reasoning it renders; None: none."
    renders_thoughts: bool
    "Its text has <think>, and it renders a thinking block at the beginning of an answer's content."
    append_only: bool
    "An answer is rendered in the middle of a conversation as it was when it was the last message."
    whole_shapes: set[Hashable] = field(default_factory=set)
    "Shapes of conversations of which it is known that all of them is rendered, see context.check_context."

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Return the special tokens that end an answer: in the middle of a conversation, at its end, after a call."""
        return tuple(dict.fromkeys(token for token in (self.end_within, self.end_last, self.end_call) if token))


def template_of(tokenizer: PreTrainedTokenizerBase, *, with_tools: bool = False) -> Template:
    """Return the tokenizer's chat template (some have a second one for tools), probed once."""
    if not tokenizer.chat_template:
        raise config_error("no chat template", tokenizer=tokenizer.name_or_path or type(tokenizer).__name__)
    source = tokenizer.get_chat_template(None, [{}] if with_tools else None)
    return _probe(tokenizer, source, tuple(special_tokens_of(tokenizer)))


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that text must not contain. Added tokens that are ordinary text, such as <think>, are
    not among them."""
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *_added_special_tokens(tokenizer, len(tokenizer))]))


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    template: Template | str,
    row: Row,
    *,
    add_generation_prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[Span]]:
    """Return the text of a row's messages, rendered with its tools and template arguments, and, with `marks`, the spans
    inside {% generation %}.

    Raises:
        TemplateError: the template rejects the conversation.
        ConfigError: it exceeds a limit, see rendering.
    """
    source = template if isinstance(template, str) else template.source
    messages = row.messages or []
    if "developer" not in source:  # the newer name of system, which older templates reject or do not know
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    # The variables that apply_chat_template passes, so that a run renders as a server does. Any: transformers' renderer
    # takes arguments of the template by name, next to its own.
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(row.template_args or {})}
    variables |= {"tools": row.tools or None, "add_generation_prompt": add_generation_prompt}
    return render(source, {"messages": messages, "documents": None, **variables}, where=row.where, marks=marks)


def writes_day(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes the day of its rendering, which model.chat_template_args may fix."""
    source = tokenizer.get_chat_template(None, None) if tokenizer.chat_template else ""
    if TODAY not in source:
        return False
    asked: dict[str, str] = {}
    args = {TODAY: lambda form: asked.setdefault(form, form)}
    row = Row("a small conversation", messages=[{"role": "user", "content": FIRST_QUESTION}], template_args=args)
    try:
        render_conversation(tokenizer, source, row)
    except TemplateError:  # it takes no such conversation; it may write the day into others
        return True
    return bool(asked)


@lru_cache(maxsize=8)
def _added_special_tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[str, ...]:
    """Return the added tokens that are special. `vocab_size` is part of the cache's key: it grows when
    tokens are added."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


@lru_cache(maxsize=8)
def _probe(tokenizer: PreTrainedTokenizerBase, source: str, special_tokens: tuple[str, ...]) -> Template:
    """Render small conversations, and return what they show about a template."""
    # Two turns with known words, which are found again in the rendered text.
    conversation: list[Message] = [
        {"role": "user", "content": FIRST_QUESTION},
        {"role": "assistant", "content": FIRST_ANSWER},
        {"role": "user", "content": SECOND_QUESTION},
        {"role": "assistant", "content": SECOND_ANSWER},
    ]

    def rendered(messages: list[Message], *, prompt: bool = False, **args: bool) -> str:
        asked = Row("a small conversation", messages=messages, template_args=args)
        return render_conversation(tokenizer, source, asked, add_generation_prompt=prompt)[0]

    try:
        # The places of questions and answers; a template may render the last turn in another way.
        text = rendered(conversation)
        question = rendered(conversation[:1])
        answered_last = rendered(conversation[:2])
        asked, answered = _find(text, FIRST_QUESTION), _find(text, FIRST_ANSWER)
        asked_again, answered_again = _find(text, SECOND_QUESTION), _find(text, SECOND_ANSWER)
        # How a prompt may begin an answer, and what becomes of reasoning in a message or in its text.
        argument = _thinking_argument(rendered, source, conversation[:1])
        headers = tuple(dict.fromkeys(_headers(rendered, conversation[:1], argument)))
        # The field whose text is rendered when the answer is the last message.
        known = (name for name in REASONING if name in source)
        key = next((k for k in known if _REASONED in rendered(_with_reasoning(conversation[:2], k))), None)
        # Data may keep reasoning in a field or in the text: both are tried, since templates know one, the other,
        # or neither.
        thought = {**conversation[1], "content": f"<think>\n{_REASONED}\n</think>\n\n{FIRST_ANSWER}"}
        keeps = "<think>" in source and _REASONED in rendered([conversation[0], thought])
        # A template is append-only if a later turn changes nothing of an earlier one, its reasoning included.
        append_only = text.startswith(answered_last[: _find(answered_last, FIRST_ANSWER)[1]])
        after_thought = ""
        if key:
            reasoned = _with_reasoning(conversation, key)
            first = rendered(reasoned[:2])
            after_thought = first[_find(first, _REASONED)[1] : _find(first, FIRST_ANSWER)[0]]
            append_only = append_only and rendered(reasoned).startswith(first[: _find(first, FIRST_ANSWER)[1]])
    except (TemplateError, ValueError) as error:
        raise config_error("broken chat template", error=error) from None
    # The texts around the known words are the headers and ends of turns.
    fixed = _FIXED.match(source)
    end_within = _first_special(text[answered[1] : asked_again[0]], special_tokens, after_text=False)
    end_last = _first_special(text[answered_again[1] :], special_tokens, after_text=True)
    # gpt-oss ends reasoning with the token that it writes after an earlier answer: to stop there would cut the answer.
    if end_last and end_within and end_within in after_thought:
        end_within = None
    # The special tokens that an answer ends with, up to eos, are those that it also ends with before another turn.
    closing = answered_last[_find(answered_last, FIRST_ANSWER)[1] :].rstrip()
    special = special_pattern(special_tokens)
    # One that begins conversations too is that of the next header.
    opening = re.findall(rf"(?:\s|{special.pattern})*", text)[0]
    ending = tail = ""
    for one, other in zip(special.finditer(closing), special.finditer(text[answered[1] :]), strict=False):
        if one[0] != other[0] or (ending and one[0] in opening and one[0] != tokenizer.eos_token):
            break
        ending = closing[: one.end()]
        tail = closing[one.end() :]
        if one[0] == tokenizer.eos_token:
            break
    return Template(
        source=source,
        special_tokens=special_tokens,
        has_marks=bool(re.search(r"\{%-?\s*generation\s*-?%\}", source)),
        end_within=end_within,
        end_last=end_last,
        end_call=_end_of_call(rendered, special_tokens),
        ending=ending,
        tail=tail,
        headers=headers,
        short_header=text[len(question) if text.startswith(question) else asked[1] : answered[0]],
        between=text[asked[1] : answered[0]],
        thinking_argument=argument,
        fixed=frozenset(json.loads(fixed[1])) if fixed else frozenset(),
        reasoning_key=key,
        renders_thoughts=keeps,
        append_only=append_only,
    )


def _headers(rendered: Callable[..., str], question: list[Message], argument: str | None) -> list[str]:
    """Return what add_generation_prompt adds: without arguments, with thinking requested, and with it turned off."""
    found = []
    for args in ({}, *({argument: value} for value in (True, False) if argument)):
        asked, prompt = rendered(question, **args), rendered(question, prompt=True, **args)
        found.append(prompt[len(asked) :] if prompt.startswith(asked) else "")
    return found


def _end_of_call(rendered: Callable[..., str], special_tokens: tuple[str, ...]) -> str | None:
    """Return the special token after an answer that calls a tool: its own end, or what its result begins with."""
    function = {"name": "look_around", "arguments": {"at": "it"}}
    calls = [{"id": "c00000001", "type": "function", "function": function}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    seen = {"role": "tool", "content": _SEEN, "tool_call_id": "c00000001", "name": "look_around"}
    try:
        last = rendered([{"role": "user", "content": FIRST_QUESTION}, call]).rstrip()
        text = rendered([{"role": "user", "content": FIRST_QUESTION}, call, seen])
    except TemplateError:  # a template without tools
        return None
    if "look_around" not in last:
        return None
    ends = [token for token in special_tokens if token and last.endswith(token)]
    if ends:
        return max(ends, key=len)
    end = text.find(_SEEN)
    return _first_special(text[len(last) : end], special_tokens, after_text=False) if text.startswith(last) else None


def _thinking_argument(rendered: Callable[..., str], source: str, question: list[Message]) -> str | None:
    """Return the argument whose value changes the prompt; None if none does. A message's field of the same
    name does not."""
    for name in THINKING_ARGUMENTS:
        if uses(source, name):
            on, off = (rendered(question, prompt=True, **{name: value}) for value in (True, False))
            if on != off:
                return name
    return None


def _with_reasoning(messages: list[Message], key: str) -> list[Message]:
    return [{**m, key: _REASONED} if m["role"] == "assistant" else m for m in messages]


def with_arguments(source: str, args: Mapping[str, object]) -> str:
    """Return a template whose arguments have these values unless the caller gives others, so that every program
    that loads it (chat, evaluation, transformers, a server) renders as training does. Arguments that were set
    before are replaced. `strftime_now`, by which templates write today's date, always has the value that is set.

    Raises:
        ConfigError: a name that the template does not use.
    """
    source = _FIXED.sub("", source)
    for name in args:
        if not (uses(source, name) or (name == TODAY and name in source)):
            raise config_error("argument of no chat template", name=name)
    if not args:
        return source
    # No # in them: it would end the comment that notes the arguments, and begin one in the lines.
    values = {name: json.dumps(value, ensure_ascii=False).replace("#", "\\u0023") for name, value in args.items()}
    values |= {name: "none" for name, value in args.items() if value is None}  # as Jinja writes null
    given = "{{%- if {0} is not defined %}}{{%- set {0} = {1} %}}{{%- endif %}}"
    day = "{{%- macro {0}(format) %}}{{{{ {1} }}}}{{%- endmacro %}}"
    lines = "".join((day if name == TODAY else given).format(name, value) for name, value in values.items())
    noted = json.dumps(dict(args), sort_keys=True).replace("#", "\\u0023")
    return f"{{#- arguments: {noted} -#}}{lines}{{#- end -#}}{{{{ '' }}}}{source}"


def uses(source: str, name: str) -> bool:
    """Return whether a template uses an argument; a field of messages with that name is none."""
    try:
        return name in variables_of(source)
    except TemplateError:  # reported when the template is first rendered
        return True


def unused_arguments(row: Row, template: Template) -> dict[str, str]:
    """Return what is odd in a record's arguments: those that the template does not use, as in conversation.oddities.

    Raises:
        DataError: one of them holds text, which would be lost.
    """
    unused = {name: value for name, value in (row.template_args or {}).items() if not uses(template.source, name)}
    for name, value in unused.items():
        if isinstance(value, str | list | dict) and value:
            column = name if name == "documents" else f"chat_template_kwargs.{name}"
            raise fault(row.where, "template does not use an argument", column=column, name=name)
    if not any(value is not None for value in unused.values()):
        return {}
    names = ", ".join(name for name, value in unused.items() if value is not None)
    return {"template argument without effect": f"{row.where}: chat_template_kwargs: the chat template has no {names}"}


@lru_cache(maxsize=1024)
def renders_key(tokenizer: PreTrainedTokenizerBase, template: Template, role: str, key: str) -> bool:
    """Return whether a template renders a key of the messages of a role: whether a text there changes the rendering of
    a small conversation."""
    if not uses(template.source, key):
        return False
    turns: list[Message] = [{"role": "user", "content": FIRST_QUESTION}, {"role": "assistant", "content": FIRST_ANSWER}]
    if role in ("system", "developer"):
        turns.insert(0, {"role": role, "content": "system text"})
    elif role == "tool":
        called = {"type": "function", "function": {"name": "look", "arguments": {}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [{**called, "id": "call00001"}]}
        turns[1:1] = [asked, {"role": role, "content": "result", "tool_call_id": "call00001"}]
    given = [{**turn, key: "value of a key"} if turn["role"] == role else turn for turn in turns]
    try:
        plain, other = (render_conversation(tokenizer, template, Row("probe", messages=m)) for m in (turns, given))
    except TemplateError:  # not known, so by its text alone
        return True
    return plain != other


def _find(text: str, part: str) -> Span:
    start = text.find(part)
    if start < 0:
        raise ValueError(f"its text is without {part!r}")
    return start, start + len(part)


def _first_special(text: str, special_tokens: Iterable[str], *, after_text: bool) -> str | None:
    """Return the special token that comes first; without `after_text` only if nothing but whitespace is before it."""
    found = [(text.find(token), -len(token), token) for token in special_tokens if token and token in text]
    if not found:
        return None
    at, _, token = min(found)
    return token if after_text or not text[:at].strip() else None


Tools = list[JsonObject] | None
Render = Callable[[list[Message], Tools], str]
"(messages, tools) -> the text that the template makes of them; raises jinja's TemplateError."

DROPPED_ANSWER = "template leaves an earlier answer out"
"An oddity: the server of such a template would leave it out as well."
_ADVICE = "Take a template that renders {} (model.chat_template), or take {} out of the record"
_LEFT_OUT = {
    "tools": ("template does not render the tools", "these tools", "them", "them"),
    "system": ("template leaves out a system message", "this system message", "it", "it"),
    "tool": ("template does not render a tool result", "this tool result", "tool results", "it"),
    "user": ("template leaves out a message", "this message", "it", "it"),
    "call": ("template does not render a tool call", "the tool calls of this answer", "them", "them"),
}
"Part that a template left out -> reason, the name of the part, and two words of the advice."


def check_context(
    messages: list[Message], tools: Tools, text: str, render: Render, *, template: Template, where: str, args: object
) -> dict[str, str]:
    """Reject a conversation of which a template leaves something out; return the oddities, as conversation.oddities.

    The words of a message may occur elsewhere in the text too. So a conversation whose own words are not found, or that
    is the first of its shape, is rendered once more, with marks in it that no data has.

    Args:
        text: what the template makes of messages and tools.
        render: the same for others.
        args: the template's arguments.

    Raises:
        DataError: something is left out.
    """
    shape = (_shape(messages), bool(tools), any(map(_described, tools or ())), repr(args))
    words = all(_stands_in(text, messages, tools))
    if words and shape in template.whole_shapes:
        return {}
    marks: dict[str, tuple[str, int]] = {}
    try:
        marked = render(_marked(messages, marks), _marked_tools(tools, marks))
    except TemplateError:
        # It rejects what the marks changed, so its words must do.
        marked = "" if not words else "".join(marks)
    lost = sorted({place for mark, place in marks.items() if mark not in marked}, key=lambda place: place[1])
    odd: dict[str, str] = {}
    for what, i in lost:
        if what == "answer":
            odd.setdefault(
                DROPPED_ANSWER, f"{where}: messages[{i}]: the chat template leaves out the text of this answer"
            )
            continue
        reason, name, rendered, taken = _LEFT_OUT[what]
        at = f"messages[{i}]" if i >= 0 else "tools"
        advice = _ADVICE.format(rendered, taken)
        problem = f"{where}: {at}: the chat template leaves out {name}, which the answers depend on. {advice}"
        raise DataError(problem, reason=reason)
    if not odd:
        template.whole_shapes.add(shape)
    return odd


def _shape(messages: list[Message]) -> Hashable:
    """Return what a template may look at before it leaves a message out: the kinds of its messages and neighbours."""
    blank = [not m["content"] or m["content"].isspace() for m in messages]
    kinds = [(m["role"], none, len(m.get("tool_calls", ()))) for m, none in zip(messages, blank, strict=True)]
    around = zip([None, *kinds], kinds, [*kinds[1:], None], strict=False)
    return frozenset((min(i, 1), *three) for i, three in enumerate(around))


def _stands_in(text: str, messages: list[Message], tools: Tools) -> Iterator[bool]:
    """Yield whether the words of each part are in the text."""
    cursor = 0
    for message in messages:
        answer = message["role"] == "assistant"
        content = answer_core(message) if answer else message["content"].strip()
        # Behind the last one that was found, so that words which are said twice are there twice. Some templates move
        # system messages to the front, and some write results as JSON.
        found = text.find(content, cursor)
        cursor = found + len(content) if found >= 0 else cursor
        if found < 0 and not (message["role"] in ("system", "developer") and content in text):
            quoted = json.dumps(content, ensure_ascii=False)[1:-1]
            yield quoted != content and quoted in text
        if calls := message.get("tool_calls"):
            yield all(function_of(call)["name"] in text for call in calls)
    yield all(str(function_of(tool).get("name", "")) in text for tool in tools or ())


def _mark(marks: dict[str, tuple[str, int]], what: str, i: int) -> str:
    """Return a new text that no data has, part of a name too, and note whose it is."""
    mark = f"_kept{len(marks)}by_template_"
    marks[mark] = what, i
    return mark


def _marked(messages: list[Message], marks: dict[str, tuple[str, int]]) -> list[Message]:
    """Return the messages with a mark at the end of each text, and in each tool call."""
    result = []
    for i, message in enumerate(messages):
        role = message["role"]
        marked = dict(message)
        if message["content"].strip():
            what = str({"assistant": "answer", "developer": "system"}.get(role, role))
            if role != "assistant" or answer_core(message):
                marked["content"] += _mark(marks, what, i)
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [_marked_call(call, marks, i) for call in calls]
        result.append(marked)
    return result


def _marked_call(call: Message, marks: dict[str, tuple[str, int]], i: int) -> Message:
    function: dict[str, Any] = dict(call["function"])
    function["name"] += _mark(marks, "call", i)
    arguments = function["arguments"]
    if isinstance(arguments, dict) and arguments:
        mark = _mark(marks, "call", i)
        function["arguments"] = {**arguments, mark: mark}
    elif isinstance(arguments, str) and arguments.strip():
        function["arguments"] += _mark(marks, "call", i)
    return {**call, "function": function}


def _marked_tools(tools: Tools, marks: dict[str, tuple[str, int]]) -> Tools:
    if not tools:
        return tools
    result = []
    for tool in tools:
        function = function_of(tool)
        marked = {**function, "name": f"{function.get('name', '')}{_mark(marks, 'tools', -1)}"}
        if _described(tool):
            marked["description"] = f"{function['description']}{_mark(marks, 'tools', -1)}"
        result.append({**tool, "function": marked})
    return result


def _described(tool: JsonObject) -> bool:
    text = function_of(tool).get("description")
    return isinstance(text, str) and bool(text.strip())
