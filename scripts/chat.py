"""Talk to a checkpoint in the terminal. /help lists the commands; exit or Ctrl-D ends.

.venv/bin/python scripts/chat.py runs/default/sft --prompt "What day comes after Monday?"
.venv/bin/python scripts/chat.py Qwen/Qwen3-0.6B --temperature 0.7 --top-p 0.8 --template-arg enable_thinking=false
"""

from sftkit.runtime.script import script


def main() -> None:
    """Talk to a model in the terminal."""
    from sftkit.generation.repl import parse
    from sftkit.models.files import find_with_base
    from sftkit.rundir.names import newest_run

    args = parse(__doc__)
    path = find_with_base(args.path or newest_run())  # a missing model is rejected here, before torch is imported

    from functools import partial

    from sftkit.config.schema import ModelConfig
    from sftkit.config.terminal import print_text
    from sftkit.generation.decode import introduction, stream
    from sftkit.generation.repl import ChatHistory, converse, print_answer
    from sftkit.models.kind import check_causal
    from sftkit.models.load import load_model
    from sftkit.models.tokenizer import load_tokenizer
    from sftkit.runtime.start import quiet_libraries, start_device

    quiet_libraries()
    source = ModelConfig(path=path, chat_template_args=args.template_args)
    tokenizer = load_tokenizer(source)
    orig_model = load_model(source, tokenizer, seed=0).to(start_device())
    check_causal(orig_model.config, "chat.py")
    answer = partial(stream, orig_model, tokenizer, sampling=args.sampling)

    if args.prompt is not None:
        print_answer(answer(ChatHistory(args.system).with_question(args.prompt)))
        return
    print_text(introduction(path, orig_model, tokenizer, newest=args.path is None), error=True)
    converse(answer, args.system)


if __name__ == "__main__":
    script(main)
