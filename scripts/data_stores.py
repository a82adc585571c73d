"""List, verify or prune what is kept in data.cache_dir, or export tokenized data. (`sftkit prepare RECIPE` makes it.)

.venv/bin/python scripts/data_stores.py list
.venv/bin/python scripts/data_stores.py verify
.venv/bin/python scripts/data_stores.py prune --keep-size 200G
.venv/bin/python scripts/data_stores.py export megatron recipes/default/base.yaml --out tokens
"""

from pathlib import Path

from sftkit.runtime.script import script


def main() -> int:
    """Do what the word asks for."""
    from sftkit.config.commands import Parser
    from sftkit.config.schema import DataConfig
    from sftkit.data.store import keeping

    parser = Parser(__doc__)
    parser.add_argument("do", choices=("list", "verify", "prune", "export"))
    parser.add_argument("words", nargs="*", default=[], help="export: megatron RECIPE key=value ...")
    parser.add_argument("--cache-dir", type=Path, default=Path(DataConfig.cache_dir), metavar="DIR")
    parser.add_argument("--keep-size", metavar="SIZE", help="prune: what may stay, such as 200G; the least used go")
    parser.add_argument("--out", type=Path, metavar="DIR", help="export: where a .bin and .idx of each source go")
    flags = parser.parse_args()
    for name, value, word in (("--keep-size 200G", flags.keep_size, "prune"), ("--out", flags.out, "export")):
        if (value is None) == (flags.do == word):
            parser.error(f"{word} needs {name}" if flags.do == word else f"{name} is for {word}, not for {flags.do}")
    if (flags.words[:1] == ["megatron"] and len(flags.words) > 1) != (flags.do == "export"):
        parser.error("only export takes more words: export megatron RECIPE key=value ... --out DIR")
    if flags.do == "export":
        export(flags.words[1], flags.words[2:], flags.out)
    elif flags.do == "prune":
        keeping.remove_least_used(flags.cache_dir, flags.keep_size)
    else:
        return 0 if keeping.print_kept(flags.cache_dir, verify=flags.do == "verify") else 1
    return 0


def export(recipe: str, settings: list[str], out: Path) -> None:
    """Write the documents of each source of data.train as Megatron has them, and the tokenizer."""
    from sftkit.config.load import read_config
    from sftkit.errors import ConfigError

    cfg = read_config(recipe, settings, 1)  # mistakes in it are rejected here, before torch is imported
    if cfg.run.stage is None:
        raise ConfigError(f"{recipe}: run.stage: not set, so it is not known how rows are read: set base, mid or sft")

    from sftkit.config.schema import source_label
    from sftkit.config.terminal import print_text
    from sftkit.data.store.foreign import check_whole_sources, write_megatron
    from sftkit.data.tokens import sources
    from sftkit.preflight.analysis import tokenizer_of
    from sftkit.runtime.start import quiet_libraries

    check_whole_sources(cfg.data)
    quiet_libraries()
    tokenizer = tokenizer_of(cfg.model, cfg.data)
    tokenize = sources.stage_rule(cfg.run.stage)(cfg.data, tokenizer, sources.WHOLE)
    for source in cfg.data.train:
        examples = sources.load_sources([source], cfg.data, tokenize)
        prefix = out / source_label(source)
        documents, tokens = write_megatron(prefix, examples.tokens.shards, len(tokenizer))
        print_text(f"{prefix}: {documents:,} documents, {tokens:,} tokens")
    tokenizer.save_pretrained(out / "tokenizer")


if __name__ == "__main__":
    script(main)
