"""Rows of added tokens that are trained next to an adapter, in the format of peft's `trainable_token_indices`.

The table of the vocabulary stays frozen and whole. A few of its rows have a parameter [n, H] in fp32, which stands in
for them: in the embedding, and in the head, tied or not. The loss writes the rows into the head's memory while it
computes (ops/linear_cross_entropy.py), so no copy of a table is made; the table has its bits back afterwards.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.errors import ConfigError, config_error
from sftkit.models.adapter_files import AdapterFiles
from sftkit.models.structure import embedding_module, output_projection, vocab_size
from sftkit.models.vocabulary import added_tokens, make_room_for, mean_row, new_rows
from sftkit.ops.tensors import local, local_region
from sftkit.runtime.script import first_of
from sftkit.runtime.start import replaced_in_each


class TokenRows(torch.nn.Module):
    """The trained rows of a table, named as peft names them: what it calls a delta are whole rows."""

    ids: Tensor

    def __init__(self, ids: tuple[int, ...], table: Tensor) -> None:
        super().__init__()
        rows = torch.zeros(len(ids), table.shape[1], dtype=torch.float32, device=table.device)
        self.trainable_tokens_delta = torch.nn.Parameter(rows)
        # On the meta device an index has no values, and a model there has its buffers in memory.
        index = torch.tensor(ids, device="cpu" if table.is_meta else table.device)
        self.register_buffer("ids", index, persistent=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the ids, [n], and their rows, fp32 [n, H]."""
        return self.ids, self.trainable_tokens_delta


class WithRows(torch.nn.Module):
    """A table with separate rows for some tokens."""

    rows_of: tuple[TokenRows, ...]
    "a tuple, so that the rows of a tied embedding are no module of the head too"

    def own_rows(self) -> tuple[Tensor, Tensor]:
        """Return the ids, [n], and their rows, fp32 [n, H]."""
        found: tuple[Tensor, Tensor] = self.rows_of[0]()
        return found


class TokenEmbedding(WithRows):
    """In front of an embedding's class."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, [..., H]."""
        frozen: Tensor = super().forward(tokens)
        ids, rows = self.own_rows()
        is_own = tokens[..., None] == ids.to(tokens.device)
        # Looked up in fp32, so that the gradients of a token's many places are not summed in bf16.
        own = embedding(is_own.int().argmax(-1), rows).to(frozen.dtype)
        scale = getattr(self, "embed_scale", None)  # Gemma
        if scale is not None:
            own = own * (scale.to(own.dtype) if isinstance(scale, Tensor) else scale)
        return torch.where(is_own.any(-1, keepdim=True), own, frozen)


class TokenHead(WithRows):
    """In front of the head's class."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [..., V]."""
        logits: Tensor = super().forward(x)
        ids, rows = self.own_rows()
        ids = ids.to(x.device)
        bias: Any = getattr(self, "bias", None)
        own = linear(x, rows.to(x.dtype), None if bias is None else bias[ids])
        return logits.index_copy_(-1, ids, own)


class PlainTokenRows(WithRows):
    """In front of either class: a whole table with the rows in it, as peft computes. Others are compared with it."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the module's own class computes of that table."""
        ids, rows = self.own_rows()
        table: Any = self.weight
        whole = {**self._parameters, "weight": table.index_copy(0, ids.to(table.device), rows.to(table.dtype))}
        with replaced_in_each("_parameters", {self: whole}):
            found: Tensor = super().forward(x)
        return found


@lru_cache
def in_front(front: type, own: Any) -> type:
    """Return a class that computes as `front` says and is `own` in all else."""
    return type(own.__name__, (front, own), {})


def rows_as_written(orig_model: torch.nn.Module) -> None:
    """Let the modules with separate rows compute with whole tables."""
    for module in orig_model.modules():
        if isinstance(module, TokenEmbedding | TokenHead):
            module.__class__ = in_front(PlainTokenRows, type(module).__bases__[1])


def tokens_to_train(
    orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: AdapterFiles | None
) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """Return name of a table -> ids of its trained rows, and how many known rows they begin as the mean of; None: they
    are in the files of the adapter that is continued.

    Raises:
        ConfigError: a template adds tokens to an adapter that has some already.
    """
    added = added_tokens(tokenizer)
    if added is None:
        return {} if files is None else dict(files.tokens), None
    if files is not None and files.tokens:
        raise config_error("tokens added to trained rows", folder=files.folder, added=first_of(added.tokens))
    new = new_rows(orig_model)
    assert new is not None
    ids = tuple(new.among(0, vocab_size(orig_model)))
    head = output_projection(orig_model)
    tied = head.weight is embedding_module(orig_model).weight
    tables = [embedding_module(orig_model), *([] if tied else [head])]
    names = {id(module): name for name, module in orig_model.named_modules()}
    return {names[id(table)]: ids for table in tables}, new.known


def add_token_rows(orig_model: PreTrainedModel, tokens: Mapping[str, tuple[int, ...]]) -> None:
    """Give tables of a frozen model separate rows, and the vocabulary room for them.

    Raises:
        ConfigError: another module than embedding and head, or rows that neither model nor adapter has.
    """
    if not tokens:
        return
    for ids in tokens.values():
        make_room_for(orig_model, ids)
    table: Any = embedding_module(orig_model)
    head: Any = output_projection(orig_model)
    owners: dict[str, Any] = {
        n: module for n, module in orig_model.named_modules() if module is table or module is head
    }
    if odd := tokens.keys() - owners.keys():
        raise ConfigError(f"adapter: {first_of(sorted(odd))} has trained rows, and only embedding and head may have")
    for name, ids in tokens.items():
        owners[name].token_adapter = TokenRows(ids, owners[name].weight)
    for module, front in ((table, TokenEmbedding), (head, TokenHead)):
        owner = table if module.weight is table.weight else head
        if hasattr(owner, "token_adapter"):
            module.rows_of = (owner.token_adapter,)
            module.__class__ = in_front(front, module.__class__)


@torch.no_grad()
def fill_token_rows(orig_model: PreTrainedModel, known: int) -> None:
    """Fill the rows with the mean of the first `known` rows of their table. Every rank calls it: shards are gathered.

    The rounding to the precision of the table is that of rows which are added without adapters.
    """
    for module in orig_model.modules():
        if isinstance(rows := getattr(module, "token_adapter", None), TokenRows):
            weight: Any = module.weight
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            mean = mean_row(whole, known, whole.dtype).to(whole.dtype).float()
            local(rows.trainable_tokens_delta).copy_(mean)


@torch.no_grad()
def merge_token_rows(orig_model: PreTrainedModel, name: str, ids: tuple[int, ...], rows: Tensor) -> None:
    """Write rows into a table of the model, each rank into its own part."""
    table: Any = orig_model.get_submodule(name).weight
    (start, size), *_ = local_region(table)
    here = [i for i, row in enumerate(ids) if start <= row < start + size]
    if not isinstance(table, DTensor):  # the weights of files that are mapped into memory stay as they are
        table.data = table.data.clone()
    local(table)[[ids[i] - start for i in here]] = rows[here].to(table.device, table.dtype)
