"""Talk to a checkpoint in the terminal. An empty line or Ctrl-D ends; /new starts a new conversation.

.venv/bin/python scripts/chat.py runs/default/sft --prompt "What day comes after Monday?"
"""

from sftkit.runtime.script import script


def main() -> None:
    from sftkit.config.command_line import Parser, path_or_id

    parser = Parser(__doc__)
    parser.add_argument(
        "path", nargs="?", type=path_or_id, help="run, step directory, model folder or hub id; default: the newest run"
    )
    parser.add_argument("--prompt", help="one question; print the answer and exit")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer in tokens")
    args = parser.parse_args()

    from sftkit.config.schema import ModelConfig
    from sftkit.config.terminal import say
    from sftkit.errors import DataError
    from sftkit.generation.decode import stream
    from sftkit.models.load import load_model, load_tokenizer
    from sftkit.runtime.rundir import newest_run, resolve
    from sftkit.runtime.start import quiet_libraries, start_device

    quiet_libraries()
    path = resolve(args.path or newest_run())
    tokenizer = load_tokenizer(ModelConfig(path=path))
    orig_model = load_model(ModelConfig(path=path), tokenizer, seed=0).to(start_device())
    opening = [{"role": "system", "content": args.system}] if args.system else []

    def answer(messages: list[dict[str, str]]) -> str:
        parts = []
        for part in stream(orig_model, tokenizer, messages, args.max_new_tokens, args.temperature):
            say(part, end="")
            parts.append(part)
        say("")
        return "".join(parts)

    if args.prompt is not None:
        answer([*opening, {"role": "user", "content": args.prompt}])
        return
    say(f"{path}  (an empty line ends, /new starts over)", error=True)
    messages = list(opening)
    for line in iter(ask, ""):
        if line == "/new":
            messages = list(opening)
            continue
        try:
            reply = answer([*messages, {"role": "user", "content": line}])
        except DataError as error:
            say(str(error), error=True)
            continue
        messages += [{"role": "user", "content": line}, {"role": "assistant", "content": reply}]


def ask() -> str:
    try:
        return input("\n> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    script(main)
