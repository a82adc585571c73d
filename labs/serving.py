"""Compare the answers of a server with those of the model it serves, and make what the comparison needs.

python -m labs.serving ask RUN URL [--model NAME] [--out FILE.json]     ask a running server, see docs/serving.md
python -m labs.serving data FILE.jsonl                                  conversations with tools, to train on
python labs/serving.py gguf SCRIPT_OF_LLAMA_CPP ARGS...                 a converter of llama.cpp, for our own tokenizers

ask: 20 conversations, and where the chat template has them 6 with tools and 6 with thinking turned on and off. They are
sent to /v1/chat/completions of an OpenAI-compatible server at temperature 0, and answered here by RUN in fp32, as
`sftkit chat` answers. The tokens of each prompt must be the same, which shows that the template is (vLLM and llama.cpp
show them; of other servers their number is compared), and so must the answer be: its text, its reasoning and its
calls, whether the server takes them apart or not.

gguf: llama.cpp knows how a tokenizer splits texts by a hash of what it makes of one text, so it knows no tokenizer that
was trained here. This runs its converter in a Python with its requirements, and names the closest one, of SmolLM, which
splits alike but for an apostrophe before s, t, d, m, re, ve or ll.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_TOKENS = 96
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CITIES = (
    *("Accra", "Athens", "Berlin", "Bogota", "Cairo", "Dakar", "Delhi", "Hanoi", "Havana", "Kyiv", "Lagos", "Lima"),
    *("London", "Madrid", "Manila", "Nairobi", "Osaka", "Oslo", "Paris", "Prague", "Quito", "Rome", "Seoul", "Tokyo"),
)
SKIES = ("sunny", "rainy", "cloudy", "windy")
QUESTIONS = (
    "What day comes after Monday?",
    "What is 12 + 30?",
    "Name three colours.",
    "Say hello in French.",
    "Which is the largest: 3, 9, 4?",
    "Write one sentence about the sea.",
    "def add(a, b):",
    "Translate into German: good morning",
    "List the first five prime numbers.",
    "It's 7 o'clock. What's the time in an hour?",
    "Überall blühen Rosen: wo? 東京 🙂",
    "Sort: d a c b",
)


def conversations() -> list[tuple[str, dict[str, Any]]]:
    """Return the requests, each with its kind: chat, tools or thinking."""
    asked: list[list[dict[str, Any]]] = [[{"role": "user", "content": text}] for text in QUESTIONS]
    asked += [[{"role": "system", "content": "Answer in one word."}, *messages] for messages in asked[:4]]
    turns = [("What is 2 + 2?", "4"), ("Name a colour.", "blue"), ("What day is it?", "Monday"), ("Hello", "Hello!")]
    asked += [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}, *asked[i]]
        for i, (question, answer) in enumerate(turns)
    ]
    found: list[tuple[str, dict[str, Any]]] = [("chat", {"messages": messages}) for messages in asked]
    for i, city in enumerate(CITIES[:3]):
        *messages, _ = weather(city, SKIES[i])
        found += [("tools", {"messages": m, "tools": [WEATHER]}) for m in (messages[:1], messages)]
    for on in (True, False):
        found += [("thinking", {"messages": m, "template_args": on}) for m in asked[:3]]
    return found


def weather(city: str, sky: str) -> list[dict[str, Any]]:
    """Return a conversation with a call of a tool, as a client of a server writes it."""
    call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {
            "role": "assistant",
            "reasoning_content": f"The tool knows {city}.",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"sky": sky})},
        {"role": "assistant", "reasoning_content": f"It is {sky}.", "content": f"In {city} it is {sky}."},
    ]


def data() -> Iterator[dict[str, Any]]:
    """Yield conversations to train on: with the tool, and without."""
    for number in range(20):
        for i, city in enumerate(CITIES):
            yield {"messages": weather(city, SKIES[(i + number) % 4]), "tools": [WEATHER]}
            yield {
                "messages": [
                    {"role": "user", "content": f"Is {city} a city? {number}"},
                    {"role": "assistant", "content": f"Yes, {city} is a city."},
                ]
            }


def parts(text: str) -> tuple[str, str, list[Any]]:
    """Return the reasoning, the text and the calls of an answer in the format of Qwen and Hermes; calls that are no
    JSON stay in the text."""
    calls = []
    for found in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", text, re.DOTALL):
        try:
            calls.append(json.loads(found))
        except ValueError:
            return "", text.strip(), []
    text = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
    thought, end, rest = text.partition("</think>")
    return (thought.replace("<think>", "").strip(), rest.strip(), calls) if end else ("", text.strip(), calls)


def parts_of(message: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Return the same of a server's message, in which they may be apart already."""
    thought, text, calls = parts(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        made = call["function"]
        try:
            arguments = json.loads(made["arguments"])
        except ValueError:  # of a call that was cut
            arguments = made["arguments"]
        calls.append({"name": made["name"], "arguments": arguments})
    given = message.get("reasoning_content") or message.get("reasoning") or ""
    return given.strip() or thought, text, calls


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the server's reply.

    Raises:
        ConfigError: the server rejects the request.
    """
    from sftkit.errors import ConfigError

    data = json.dumps(body).encode()
    sent = urllib.request.Request(f"{url.rstrip('/')}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=300) as reply:
            found: dict[str, Any] = json.load(reply)
            return found
    except urllib.error.HTTPError as error:
        problem = f"{url}{path} answers {error.code}: {error.read().decode(errors='replace')[:500]}"
        raise ConfigError(problem) from error


def answer_of_server(url: str, request: dict[str, Any]) -> tuple[list[int] | int, dict[str, Any]]:
    """Return the tokens of the prompt, or their number if the server shows no more, and the server's message."""
    from sftkit.errors import ConfigError

    found = post(url, "/v1/chat/completions", {"temperature": 0, "max_tokens": MAX_TOKENS, **request})
    message = found["choices"][0]["message"]
    if found.get("prompt_token_ids"):  # of vLLM
        return found["prompt_token_ids"], message
    try:  # of llama.cpp
        text = post(url, "/apply-template", request)["prompt"]
        return post(url, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"], message
    except ConfigError:
        return found["usage"]["prompt_tokens"], message


def compare(run: str, url: str, name: str | None) -> dict[str, Any]:
    """Ask the server and the model, and return what was the same.

    Args:
        name: of the model on the server; None: the first that it lists.
    """
    import torch

    from sftkit.config.schema import ModelConfig
    from sftkit.data.tokens import chat
    from sftkit.data.tokens.template import template_of
    from sftkit.data.types import Row
    from sftkit.errors import ConfigError
    from sftkit.models.files import find_with_base
    from sftkit.models.load import load_model, stop_ids
    from sftkit.models.tokenizer import load_tokenizer

    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=60) as reply:
            first = json.load(reply)["data"][0]
    except urllib.error.HTTPError:  # of transformers, on a machine without a cache of the hub
        first = {"id": run}
    # Others reject the field.
    shown_ids = {"return_token_ids": True} if first.get("owned_by") == "vllm" else {}
    source = ModelConfig(path=find_with_base(run))
    tokenizer = load_tokenizer(source)
    orig_model = load_model(source, tokenizer, 0).eval()
    template = template_of(tokenizer)
    rows = []
    for kind, request in conversations():
        switch = request.pop("template_args", None)
        if (kind == "tools" and "tools" not in template.source) or (
            kind == "thinking" and not template.thinking_argument
        ):
            continue
        args = {} if switch is None else {str(template.thinking_argument): switch}
        row = Row(kind, messages=request["messages"], tools=request.get("tools"), template_args=args or None)
        prompt = torch.tensor([chat.render_prompt(row, tokenizer)])
        generated: Any = orig_model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=stop_ids(orig_model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
        )
        own = str(tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True))
        asked = {"model": name or first["id"], **request, **shown_ids}
        try:
            tokens, message = answer_of_server(url, asked | ({"chat_template_kwargs": args} if args else {}))
        except ConfigError as error:
            tokens, message = 0, {"content": str(error)}
        ids = prompt[0].tolist()
        same = {"prompt": tokens in (ids, len(ids)), "answer": parts_of(message) == parts(own)}
        shown = [tokenizer.decode(ids), tokenizer.decode(tokens) if isinstance(tokens, list) else tokens]
        rows.append({"kind": kind, "prompts": shown, "own": own, "server": message, **same})
    return {"run": run, "model": name or first["id"], "rows": rows}


def summary(found: dict[str, Any]) -> list[str]:
    """Return a line for each kind, and one for each difference."""
    rows = found["rows"]
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of = [row for row in rows if row["kind"] == kind]
        prompts, answers = (sum(row[name] for row in of) for name in ("prompt", "answer"))
        lines.append(f"{kind}: {len(of)} prompts, {prompts} with the same tokens, {answers} answers equal")
    for row in rows:
        if not (row["prompt"] and row["answer"]):
            own, server = row["prompts"]
            prompts = f"prompt {own!r}" + ("" if row["prompt"] else f" and {server!r}")
            lines.append(f"  {prompts}: {row['own']!r} and {row['server']!r}")
    return lines


def main() -> None:
    """Run the part that the command line names."""
    from sftkit.config.commands import Parser
    from sftkit.config.terminal import print_text

    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    ask = commands.add_parser("ask")
    ask.add_argument("run")
    ask.add_argument("url")
    ask.add_argument("--model")
    ask.add_argument("--out", type=Path)
    commands.add_parser("data").add_argument("file", type=Path)
    args = parser.parse_args()
    if args.what == "data":
        args.file.write_text("".join(f"{json.dumps(row)}\n" for row in data()))
        return
    found = compare(args.run, args.url, args.model)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    for line in summary(found):
        print_text(line)


def convert(script: Path) -> None:
    """Run a converter of llama.cpp that names the tokenizer's way to split texts after SmolLM's."""
    sys.path[:0] = [str(script.parent), str(script.parent / "gguf-py")]
    from conversion import base  # type: ignore[import-not-found] # of llama.cpp

    base.TextModel.get_vocab_base_pre = lambda *_: "smollm"
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["gguf"]:  # in a Python that need not have sftkit
        sys.argv = sys.argv[2:]
        convert(Path(sys.argv[0]))
    else:
        from sftkit.runtime.script import script as run_script

        run_script(main)
