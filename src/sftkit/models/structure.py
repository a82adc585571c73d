"""The parts of a transformers model by function, its rotary positions, the work that it costs, and the pipeline stages
that hold it.

transformers chooses longrope frequencies by the longest document of a batch, so a short document next to a long one
gets other frequencies than alone. Here each document has the frequencies that it has alone, in any layout of rows.

In a pipeline a rank holds some of the parameters; the others are on the meta device there (parallel/pipeline.py).
"""

import copy
import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sftkit.config.schema import RopeScaling
from sftkit.config.topology import Topology
from sftkit.errors import ConfigError, config_error
from sftkit.models.trained import TOKEN_ADAPTER, factors, logical_elements, members_in
from sftkit.ops.attention import attend, attention_chunk
from sftkit.runtime.start import replaced

ORIGINAL = "original_max_position_embeddings"
LONG = "sftkit_long"
"Submodule of a rotary embedding: a copy with the frequencies of long documents. No file holds its buffers."


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the largest number of positions that a model was made for; None if its config does not say.

    yarn extends original_max_position_embeddings by its factor, linear scaling extends max_position_embeddings by its
    factor; servers count the same way. For all other kinds, and for kinds by layer type other than yarn,
    max_position_embeddings is the whole length.
    """
    text = config.get_text_config()
    given = getattr(text, "max_position_embeddings", None)
    if not isinstance(given, int):
        return None
    reach = given
    for layer_type, rope in _ropes(text):
        factor = rope.get("factor")
        original = rope.get("original_max_position_embeddings") or given
        if rope["rope_type"] == "yarn" and factor:
            reach = max(reach, int(factor * original))
        elif rope["rope_type"] == "linear" and factor and layer_type is None:
            reach = max(reach, int(factor * given))
    return reach


def _ropes(text: PretrainedConfig) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield (layer type, its settings); the type is None if all layers share one."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield None, rope
    else:
        yield from ((key, value) for key, value in rope.items() if isinstance(value, Mapping) and "rope_type" in value)


def longrope_limit(config: PretrainedConfig) -> int | None:
    """Return the length up to which documents use longrope's short frequencies; None without longrope."""
    limits = [rope["original_max_position_embeddings"] for _, rope in _ropes(config.get_text_config()) if _long(rope)]
    return min(limits, default=None)


def _long(rope: Mapping[str, Any]) -> bool:
    return bool(rope["rope_type"] == "longrope")


def scale_rope(config: PretrainedConfig, scaling: RopeScaling | None) -> None:
    """Replace the rotary frequencies of a model's config, as model.rope_scaling says; None: keep them.

    max_position_embeddings becomes the whole length for yarn and llama3, as servers read it; for the other kinds
    servers multiply it by the factor themselves. A second call changes nothing.

    Raises:
        ConfigError: the model has no rotary positions, several kinds of them, or more than the factor gives.
    """
    if scaling is None:
        return
    text: Any = config.get_text_config()
    own = getattr(text, "rope_parameters", None) or {}
    longest = getattr(text, "max_position_embeddings", None)
    if own.get("rope_type") in (None, "longrope") or not isinstance(longest, int):
        kinds = "rotary frequencies by layer or length" if own else "no rotary positions"
        raise ConfigError(f"model.rope_scaling: {config.model_type} has {kinds}, which it cannot replace: leave it out")
    names = {*asdict(scaling), "type"} - {"rope_theta"}
    rope: dict[str, Any] = {name: value for name, value in own.items() if name not in names}
    rope |= {name: value for name, value in asdict(scaling).items() if value is not None}
    if scaling.rope_type in ("yarn", "llama3"):
        original = rope.setdefault(ORIGINAL, own.get(ORIGINAL) or longest)
        if (reach := int(scaling.factor * original)) < longest:
            words = {"factor": scaling.factor, "field": ORIGINAL, "original": original, "reach": reach}
            raise config_error("factor of no longer positions", longest=longest, **words)
        text.max_position_embeddings = reach
    text.rope_parameters = rope
    text.standardize_rope_params()
    text.validate_rope()


def check_rope(orig_model: PreTrainedModel, topology: Topology, max_length: int) -> None:
    """Reject longrope and chunked attention with context parallelism, where each rank has only chunks of a document and
    cannot know its length.

    Raises:
        ConfigError: a document may exceed the length of longrope's short frequencies, or an attention chunk.
    """
    model_type = orig_model.config.model_type
    chunk = attention_chunk(orig_model.config)
    if chunk is not None and topology.context > 1 and max_length > chunk:
        raise config_error("attention chunks in chunks", length=max_length, model=model_type, limit=chunk)
    limit = longrope_limit(orig_model.config)
    if limit is not None and topology.context > 1 and max_length > limit:
        raise config_error("longrope in chunks", length=max_length, model=model_type, limit=limit)


def use_document_lengths(orig_model: PreTrainedModel) -> None:
    """Make every longrope and every temperature of the model follow the positions of each document separately."""
    for module in orig_model.modules():
        if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", True):
            module.forward = MethodType(_tempered, module)
    for module in [*orig_model.modules()]:
        types = getattr(module, "rope_type", None)
        kinds = types if isinstance(types, dict) else {None: types}
        if types == "dynamic":
            # No document is longer than max_positions, up to which factors do not change. transformers asks the device
            # in each step how long the longest is.
            module.forward = MethodType(torch.no_grad()(inspect.unwrap(type(module).forward)), module)
        # Without transformers' decorator the class itself chooses the frequencies (Phi-3.5-MoE, which is rejected).
        if "longrope" in kinds.values() and hasattr(type(module).forward, "__wrapped__"):
            long = copy.deepcopy(module)
            for layer_type in (name for name, kind in kinds.items() if kind == "longrope"):
                settings: Any = module.config.rope_parameters  # type: ignore[union-attr]
                limit = (settings if layer_type is None else settings[layer_type])["original_max_position_embeddings"]
                given = {} if layer_type is None else {"layer_type": layer_type}
                frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=limit + 1, **given)
                name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
                long.register_buffer(name, frequencies.to(getattr(module, name).device), persistent=False)
            module.add_module(LONG, long)
            module.forward = MethodType(_forward, module)


@torch.no_grad()
def _forward(self: torch.nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Return the output of a rotary embedding, [B, T, ...] each, for every document as if it were alone.

    Args:
        position_ids: int64 [B, T], from 0 in each document; a document that starts in an earlier chunk continues to
            its own end.
    """
    # The class's own computation, under the decorator that looks at the whole batch.
    own = inspect.unwrap(type(self).forward)
    given = () if layer_type is None else (layer_type,)
    settings: Any = self.config
    rope = settings.rope_parameters if layer_type is None else settings.rope_parameters[layer_type]
    short = own(self, x, position_ids, *given)
    if not _long(rope):
        return short
    long = own(getattr(self, LONG), x, position_ids, *given)
    is_long = (document_lengths(position_ids) > rope["original_max_position_embeddings"])[..., None]
    if isinstance(short, Tensor):
        return torch.where(is_long, long, short)
    return tuple(torch.where(is_long, there, here) for there, here in zip(long, short, strict=True))


def _tempered(self: Any, hidden_states: Tensor, *args: Any, documents: Any = None, **kwargs: Any) -> Any:
    """Return what an attention layer of Llama 4 without rotary positions computes: queries grow with the position in
    their document. transformers counts positions in the row.
    """
    if documents is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
    steps = torch.floor((documents.positions.float() + 1.0) / self.floor_scale)
    query = (query * (torch.log1p(steps) * self.attn_scale + 1.0)[..., None, None]).to(query.dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    dropout = self.attention_dropout if self.training else 0.0
    out, _ = attend(self, query, key, value, None, scaling=self.scaling, dropout=dropout, documents=documents)
    return self.o_proj(out.flatten(2)), None


def document_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each position's document, int64 [B, T]: its largest position plus 1."""
    document = (position_ids == 0).cumsum(-1)
    *batch, length = position_ids.shape
    longest = torch.zeros(*batch, length + 1, dtype=torch.int64, device=document.device)
    longest = longest.scatter_reduce(-1, document, position_ids.long(), "amax")
    return longest.gather(-1, document) + 1


TOKEN_ROWS = "sftkit_token_rows"
"Attribute of a model with a padded vocabulary: the number of rows without padding."


@contextmanager
def inference(orig_model: PreTrainedModel) -> Iterator[None]:
    """Run the model within the context as plain Python in evaluation mode without gradients: any shape, no
    compilation, and compiled code stays valid.
    """
    was_training = orig_model.training
    orig_model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), quiet_routers(orig_model):
            yield
    finally:
        orig_model.train(was_training)


@contextmanager
def quiet_routers(orig_model: PreTrainedModel) -> Iterator[None]:
    """Stop the model within the context from collecting router logits if its config asks for them.

    transformers computes an auxiliary loss from them, which needs a mask of the same positions and raises an error
    with a cache of earlier positions. Training reads the routers itself (models/routing.py).
    """
    inside = [module.config for module in orig_model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(config): config for config in (orig_model.config.get_text_config(), *inside)}.values()
    with ExitStack() as stack:
        for config in configs:
            if getattr(config, "output_router_logits", False):
                stack.enter_context(replaced(config, "output_router_logits", value=False))
        yield


def vocab_size(orig_model: PreTrainedModel) -> int:
    """Return the rows of the input embedding without padding (models/vocabulary.py); the tokenizer may have
    fewer tokens.
    """
    return getattr(orig_model, TOKEN_ROWS, None) or embedding_of(orig_model).shape[0]


def positions(orig_model: PreTrainedModel) -> int | None:
    """Return the largest number of positions that the model was made for; None if its config does not say."""
    return max_positions(orig_model.config)


def embedding_module(orig_model: PreTrainedModel) -> torch.nn.Module:
    """Return the module of the input embedding."""
    return orig_model.get_input_embeddings()


def embedding_of(orig_model: PreTrainedModel) -> Tensor:
    """Return the weight of the input embedding, [V, H]."""
    weight = embedding_module(orig_model).weight
    assert isinstance(weight, Tensor)
    return weight


def decoder(orig_model: PreTrainedModel) -> torch.nn.Module:
    """Return the module that turns token ids into hidden states: the model without its head and its encoder."""
    found = orig_model.get_decoder()
    while isinstance(found, PreTrainedModel) and (inner := found.get_decoder()) is not found:
        found = inner  # a decoder that has a head of its own
    # Llama 4 names as its base a module that only the model with images has, so transformers returns the whole model.
    return getattr(found, "model", found) if found is orig_model else found


def encoder(orig_model: PreTrainedModel) -> torch.nn.Module | None:
    """Return the encoder that the decoder attends to; None if the model has none."""
    return orig_model.get_encoder() if orig_model.config.is_encoder_decoder else None


def called(orig_model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that a step calls: the encoder and its projection to the decoder's size, if any, then
    the decoder.
    """
    between = getattr(orig_model, "enc_to_dec_proj", None)
    return [module for module in (encoder(orig_model), between, decoder(orig_model)) if module is not None]


def output_projection(orig_model: PreTrainedModel) -> torch.nn.Linear:
    """Return the output projection: weight [V, H], bias [V] or None.

    Raises:
        ConfigError: the model has no linear head.
    """
    module = orig_model.get_output_embeddings()
    if not isinstance(module, torch.nn.Linear):
        raise ConfigError(f"{type(orig_model).__name__} is not supported: it has no linear output projection")
    return module


def logit_softcap(orig_model: PreTrainedModel) -> float | None:
    """Return c of logits = c * tanh(logits / c); None if the model has no soft cap."""
    return getattr(orig_model.config.get_text_config(), "final_logit_softcapping", None)


LOGIT_SCALES = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
"By field of a config: the power of the field by which the model multiplies its logits."


def logit_scale(orig_model: PreTrainedModel) -> float:
    """Return the factor of the model's logits, applied before the soft cap."""
    config = orig_model.config.get_text_config()
    if config.model_type == "hyperclovax":  # multiplies by the field by which Granite divides
        return float(config.logits_scaling)
    fields = {name: getattr(config, name, None) for name in LOGIT_SCALES}
    return math.prod(value ** LOGIT_SCALES[name] for name, value in fields.items() if value is not None)


def plain_class(module: torch.nn.Module) -> type:
    """Return a module's class; for a sharded module, the class behind the one that FSDP puts in front."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def decoder_blocks(orig_model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the repeated blocks of the model and of its encoder, as transformers names them for device placement."""
    # Private, but the only name that all of transformers' architectures give their blocks; accelerate reads it
    # too (huggingface/transformers#24568).
    names = set(getattr(orig_model, "_no_split_modules", None) or ())
    return [module for module in orig_model.modules() if plain_class(module).__name__ in names]


class Unneeded(NamedTuple):
    """The products of a backward pass that frozen parameters make needless: each parameter has two, its own gradient
    and that of its input."""

    body: int = 0
    "products with a parameter, a token"
    head: int = 0
    encoder: int = 0
    states: int = 0
    "products with the states of recurrent layers that no backward pass goes through, a token"
    layers: float = 0.0
    "share of the decoder's layers with attention that no backward pass goes through, 0-1"
    encoder_layers: float = 0.0


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; `body`, `head` and `encoder` count those in matrix products and the norms next to them."""

    total: int
    body: int
    "parameters of blocks and norms; for routed experts only the share that a token visits"
    head: int
    "parameters of the output projection, which may also be the input embedding"
    encoder: int
    """parameters of the encoder's blocks and norms, and of the decoder's projections of encoded positions to keys and
    values
    """
    trained: int
    "trained parameters of the total"
    unneeded: Unneeded

    def describe(self) -> str:
        """Return how much of the model is trained, in words."""
        return f"trains {self.trained:,} of {self.total:,} parameters ({self.trained / self.total:.2%})"


def num_experts(orig_model: PreTrainedModel) -> int:
    """Return the routed experts of each mixture; 0: the model has none."""
    from sftkit.models.adapter_files import EXPERT_COUNTS

    config = orig_model.config.get_text_config()
    return next((number for name in EXPERT_COUNTS if (number := getattr(config, name, None))), 0)


def count_parameters(orig_model: PreTrainedModel) -> ParameterCount:
    """Count the parameters by their work per token.

    Tables of tokens or positions cost no work, since a token reads one row, and padding of the vocabulary is
    not counted.
    """
    # All parameters without the padding of the vocabulary, then those of the head.
    projection = list(output_projection(orig_model).parameters(recurse=False))
    own_rows = {id(p): p.numel() for name, p in orig_model.named_parameters() if TOKEN_ADAPTER in name}
    share = vocab_size(orig_model) / embedding_of(orig_model).shape[0]
    padded = {id(p) for p in (*projection, embedding_of(orig_model))}
    numel = {id(p): round(logical_elements(p) * (share if id(p) in padded else 1)) for p in orig_model.parameters()}
    total = sum(numel.values())
    in_head = sum(numel[id(p)] for p in projection)
    # Tables are looked up, not multiplied.
    embeddings = [m for m in orig_model.modules() if isinstance(m, torch.nn.Embedding)]
    tables = {id(embedding_of(orig_model)), *(id(p) for m in embeddings for p in m.parameters())}
    tables |= {id(p) for p in orig_model.parameters() if is_table(p)} | own_rows.keys()
    head = set(map(id, projection))
    body = total - in_head - sum(numel[p] for p in tables - head)  # a tied embedding is multiplied as the head
    # An embedding shared by encoder and decoder counts as the head.
    encoding = {id(p): p for p in _encoding(orig_model) if id(p) not in tables | head}
    body -= sum(numel[id(p)] for p in encoding.values())
    pooler = getattr(encoder(orig_model), "pooler", None)
    unused = {id(p) for p in (pooler.parameters() if pooler is not None else ())}  # models.encoders
    in_encoder = sum(p.numel() for p in encoding.values() if id(p) not in unused)
    # A token visits only a few of the routed experts.
    config = orig_model.config.get_text_config()
    experts = num_experts(orig_model)
    routed = [m for m in orig_model.modules() if type(m).__name__.endswith("Experts")] if experts else []
    idle = 1.0 - config.num_experts_per_tok / experts if experts else 0.0
    rarely = {id(p): p.numel() for m in routed for p in m.parameters()}
    body -= int(idle * sum(rarely.values()))
    trained = sum(numel[id(p)] for p in orig_model.parameters() if p.requires_grad)
    # With several adapters a token meets the factors of one: on average this share of all.
    members = members_in(orig_model)
    for key, size in [(id(p), p.numel()) for p in factors(orig_model).values()] if members else ():
        met_of_one = round(size / len(members))
        body -= size - met_of_one
        numel[key] = met_of_one
    # What a token meets of each parameter that it is multiplied with; a tied embedding as the head.
    met = {key: size for key, size in numel.items() if key not in (tables - head) | unused}
    met |= {key: round((1.0 - idle) * size) for key, size in rarely.items()}
    frozen = any(not p.requires_grad for p in orig_model.parameters() if id(p) in met)
    unneeded = _unneeded(orig_model, met, set(encoding)) if frozen else Unneeded()
    # Separate rows replace some of the head, whose only further product is their gradient.
    if hasattr(output_projection(orig_model), "own_rows"):
        unneeded = unneeded._replace(head=unneeded.head - [*own_rows.values()][-1])
    return ParameterCount(total, body, in_head, in_encoder, trained, unneeded)


def backward_parts(orig_model: PreTrainedModel) -> list[tuple[list[torch.nn.Parameter], bool, torch.nn.Module]]:
    """Return the parameters that a step uses before the head, in the order of the forward pass as modules are
    registered, by blocks and what is between them; whether gradients of their inputs are needed; and the module of
    `called` that holds them.

    They are needed if something before the part is trained, and by a block if something in it is: the norm that it
    begins with is trained, or the engine asks for its inputs' gradients (compile.contract.inputs_with_gradient).
    """
    block_of = {id(p): i for i, block in enumerate(decoder_blocks(orig_model)) for p in block.parameters()}
    parts, before = [], False
    for module in called(orig_model):
        for block, group in itertools.groupby(module.parameters(), key=lambda p: block_of.get(id(p))):
            parameters = list(group)
            trains = any(p.requires_grad for p in parameters)
            # A model that names no blocks, such as Marian, counts as one.
            parts.append((parameters, before or (trains and (block is not None or not block_of)), module))
            before = before or trains
    return parts


def _unneeded(orig_model: PreTrainedModel, met: Mapping[int, int], encoding: set[int]) -> Unneeded:
    """Return what a backward pass leaves out.

    Args:
        met: id of each parameter that is multiplied -> elements of it that a token meets.
        encoding: ids of those that are multiplied with an encoder's positions.
    """
    parts = backward_parts(orig_model)
    head = list(output_projection(orig_model).parameters(recurse=False))
    in_head = set(map(id, head))
    decoder_module = called(orig_model)[-1]
    encoded = any(p.requires_grad for ps, _, module in parts if module is not decoder_module for p in ps)
    products = {id(next(layer.parameters())): mixer.products(layer) for layer, mixer in _recurrent(orig_model)}
    kinds = getattr(orig_model.config.get_text_config(), "layer_types", None) or ()
    alone = without_attention(orig_model)
    typed = zip(decoder_blocks(orig_model), kinds, strict=False)
    without = {id(p) for block, kind in typed if kind in alone for p in block.parameters()}
    body = in_encoder = states = 0
    through: dict[bool, list[bool]] = {True: [], False: []}
    """of the decoder (True) and before it, of each part with matrices and attention: whether a backward pass goes
    through it
    """
    for parameters, needed, module in parts:
        states += 0 if needed else sum(products.get(id(p), 0) for p in parameters)
        matrices = [p for p in parameters if id(p) in met and id(p) not in in_head]
        for p in matrices:
            # Keys and values of encoded positions are computed in the decoder.
            inputs = encoded if module is decoder_module and id(p) in encoding else needed
            spared = met[id(p)] * ((not p.requires_grad) + (not inputs))
            body += 0 if id(p) in encoding else spared
            in_encoder += spared if id(p) in encoding else 0
        if any(p.ndim >= 2 and id(p) not in without for p in matrices):
            through[module is decoder_module].append(needed)
    inputs = any(p.requires_grad for parameters, *_ in parts for p in parameters)
    of_head = sum(met[id(p)] * ((not p.requires_grad) + (not inputs)) for p in head)
    shares = [1 - sum(layers) / len(layers) if layers else 0.0 for layers in (through[True], through[False])]
    return Unneeded(body, of_head, in_encoder, states, *shares)


CROSS_KEYS = re.compile(
    r"(crossattention\.c_attn|EncDecAttention\.[kv]|encoder_attn\.[kv]_proj|crossattention\.self\.(key|value))\."
)
"Names that architectures give the parameters projecting encoded positions to keys and values."


def is_table(parameter: Tensor) -> bool:
    """Return whether a parameter outside an embedding is a table added to the positions: [1, positions, H]."""
    return parameter.ndim == 3 and parameter.shape[0] == 1


def _encoding(orig_model: PreTrainedModel) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that are multiplied with an encoder's positions."""
    for module in called(orig_model)[:-1]:
        yield from (p for p in module.parameters() if not is_table(p))
    for name, parameter in orig_model.named_parameters():
        if CROSS_KEYS.search(name):
            yield parameter


BESIDE_ATTENTION = "hybrid"
"The type of layers with attention next to a recurrent part (Falcon-H1)."


def _recurrent(orig_model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Return the recurrent layers, each with what it needs (models/hybrids.py)."""
    if not has_convolutions(orig_model):
        return []
    from sftkit.models.hybrids import mixers

    return [(layer, mixer) for _, layer, mixer in mixers(orig_model)]


def without_attention(orig_model: torch.nn.Module) -> set[str]:
    """Return the types of layers that have no attention."""
    return {"mlp", "moe", *(mixer.layer_type for _, mixer in _recurrent(orig_model))}


def has_convolutions(orig_model: torch.nn.Module) -> bool:
    """Return whether a model has convolutions over positions, as all with recurrent layers have (models/hybrids.py)."""
    return any(isinstance(module, torch.nn.Conv1d) for module in orig_model.modules())


class AttentionWindow(NamedTuple):
    """The keys that a query of a layer sees."""

    keys: int | None
    "number of the last positions that a query sees, its own included; None: all positions up to its own"
    chunked: bool = False
    "whether a query sees only its own chunk: documents are split into chunks of `keys` positions"


def attention_windows(orig_model: PreTrainedModel) -> Counter[AttentionWindow] | None:
    """Count the layers with queries by what these see; None if a layer's kind is unknown here, and so its work."""
    config = orig_model.config.get_text_config()
    window = AttentionWindow(getattr(config, "sliding_window", None) or None)  # some configs write 0 for no window
    kinds = getattr(config, "layer_types", None)
    if has_convolutions(orig_model):
        from sftkit.models import hybrids

        if hybrids.stray_convolution(orig_model) is not None:
            return None  # state space models have such layers under any name in their config
    if kinds is None:
        return Counter({window: config.num_hidden_layers})
    without = without_attention(orig_model)
    kinds = [kind for kind in kinds if kind not in without]
    full = AttentionWindow(None)
    known = {"full_attention": full, BESIDE_ATTENTION: full, "sliding_attention": window}
    if chunk := getattr(config, "attention_chunk_size", None):
        known["chunked_attention"] = AttentionWindow(chunk, chunked=True)
    return Counter(known[kind] for kind in kinds) if known.keys() >= set(kinds) else None


@dataclass(frozen=True)
class Work:
    """The work of one or more steps, as counts."""

    tokens: int
    targets: int
    layer_pairs: int
    "allowed (query, key) pairs, summed over the layers (see `attention_windows`)"
    encoded: int = 0
    "inputs of an encoder"
    encoder_positions: int = 0
    "positions of each input; 0: no encoder"


def train_flops(orig_model: PreTrainedModel, work: Work) -> float:
    """Return the FLOPs of the forward and backward pass of a step, without recomputation.

    The count is 6 per parameter of the blocks and token, 6 per parameter of the head and target, and 6 x heads x
    (query head + value head size) per (query, key) pair of a layer (PaLM, appendix B, counted per document and window
    instead of per row). A recurrent layer costs 6 for each product with its state and token (models/hybrids.py). An
    encoder is counted by its own positions, and so are the decoder's keys and values of them; places without an input
    are not counted. A frozen parameter costs 4 if its input needs a gradient, else 2; a layer without a backward pass
    counts a third of its pairs and of its products with the state.
    """
    config = orig_model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (getattr(config, "qk_head_dim", None) or head_dim) + (getattr(config, "v_head_dim", None) or head_dim)
    # Forward and backward pass take three products each for scores and values, at 2 FLOPs a multiplication.
    per_pair = 6 * config.num_attention_heads * sizes
    counted = count_parameters(orig_model)
    inner = encoder(orig_model)
    flops = 6.0 * (counted.body * work.tokens + counted.head * work.targets) + float(per_pair) * work.layer_pairs
    less = counted.unneeded
    flops -= 2.0 * (less.body * work.tokens + less.head * work.targets)
    flops -= 2 / 3 * less.layers * per_pair * work.layer_pairs
    states = sum(mixer.products(layer) for layer, mixer in _recurrent(orig_model))
    flops += (6.0 * states - 4.0 * less.states) * work.tokens
    if inner is None:
        return flops
    assert isinstance(inner, PreTrainedModel)
    own = inner.config
    encoded = work.encoded
    length = work.encoder_positions
    of_decoder = float(per_pair) * config.num_hidden_layers * work.tokens * length
    flops += 6.0 * counted.encoder * encoded * length + of_decoder
    flops -= 2.0 * less.encoder * encoded * length + 2 / 3 * less.layers * of_decoder
    heads = own.num_attention_heads
    width = heads * (getattr(own, "head_dim", None) or own.hidden_size // heads)  # may differ from hidden size in T5
    return flops + (12.0 - 8.0 * less.encoder_layers) * width * own.num_hidden_layers * encoded * length**2


@dataclass
class Stages:
    """The stages of a pipeline and their contents, the same on every rank, and this rank's place among them."""

    layers: tuple[int, ...]
    "number of layers of each stage; the last stage also has the final norm and the head"
    mesh: DeviceMesh
    "[pipeline ranks, ranks with the same layers]: stage s is on pipeline rank s modulo the number of pipeline ranks"
    holders: dict[str, tuple[int, ...]]
    "name of each parameter -> the pipeline ranks that hold it, first the one that writes it"
    ends: dist.ProcessGroup | None
    "group of the first and the last rank of this rank's pipeline; None on a rank between them"
    entered: bool = False
    "within the context of parallel.stagewise"

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the group of ranks through which this rank's rows pass."""
        return self.mesh.get_group("stages")

    @property
    def pipeline_rank(self) -> int:
        """Return this rank's number in the pipeline."""
        return self.mesh.get_local_rank("stages")

    @property
    def last(self) -> bool:
        """Return whether this rank has the last stage: final norm, head and loss."""
        return self.pipeline_rank == self.mesh.size(0) - 1

    @property
    def last_rank(self) -> int:
        """Return the global rank that has the last stage for this rank's rows."""
        return dist.get_global_rank(self.group, self.mesh.size(0) - 1)

    @property
    def replica(self) -> tuple[int, int]:
        """Return (this rank's index among the ranks with the same layers, their number)."""
        return self.mesh.get_local_rank("alike"), self.mesh.size(1)

    @property
    def own(self) -> range:
        """Return the stages that this rank holds."""
        return range(self.pipeline_rank, len(self.layers), self.mesh.size(0))

    def holds(self, name: str) -> bool:
        """Return whether this rank holds the parameter of this name."""
        return self.pipeline_rank in self.holders[name]

    def writer(self, name: str) -> int:
        """Return the global rank that writes a parameter into checkpoints."""
        return int(self.mesh.mesh[self.holders[name][0]][0])

    def elsewhere(self, state: str) -> bool:
        """Return whether an optimizer state (optim.protocol.named_states) belongs to a parameter that this rank does
        not hold.
        """
        return any(self.pipeline_rank not in places and _is_of(state, name) for name, places in self.holders.items())

    def written_here(self, state: str) -> bool:
        """Return whether the ranks with this rank's layers write an optimizer state into checkpoints."""
        return any(self.pipeline_rank == places[0] and _is_of(state, name) for name, places in self.holders.items())


def stages_of(orig_model: torch.nn.Module) -> Stages | None:
    """Return the stages that parallel/pipeline.py gave the model; None without a pipeline."""
    return getattr(orig_model, "_stages", None)


def from_last(orig_model: torch.nn.Module, value: Tensor) -> Tensor:
    """Return, on all ranks of a pipeline, the value that its last stage computed, without gradient; every rank calls
    it. Without a pipeline, return `value`.

    Args:
        value: tensor of the same shape and dtype on each rank.
    """
    stages = stages_of(orig_model)
    if stages is None:
        return value
    value = value.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(value, src=stages.last_rank, group=stages.group)
    return value


def _is_of(state: str, parameter: str) -> bool:
    """Return whether a state belongs to the parameter: `exp_avg.<parameter>` or `exp_avg.<parameter>.codes`."""
    return f".{parameter}." in f"{state}."
