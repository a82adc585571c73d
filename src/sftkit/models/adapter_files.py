"""What is known of adapters without torch: the layers that targets name, and folders that hold an adapter."""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sftkit.config.commands import invocation
from sftkit.config.schema import ADAPTER_GROUPS, AdapterConfig, ModelConfig, NamedAdapter
from sftkit.errors import ConfigError, config_error, did_you_mean
from sftkit.models import files as model_files
from sftkit.rundir.files import digest_of_files, read_base_digest
from sftkit.rundir.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, resolve

PEFT_PREFIX = "base_model.model."


def name_in_model(key: str) -> str:
    """Return what the model that is trained calls a tensor of an adapter's files: without the prefixes of peft and, for
    the text model of a larger model, of that.
    """
    name = key.removeprefix(PEFT_PREFIX)
    return model_files.text_name(name) or name


"What peft puts in front of the name of a parameter."
TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"
"What peft puts behind the name of a table that has trained rows."
_ATTENTION = re.compile(
    r"(^|\.)(\w*(attn|attention|mamba)\w*|conv|mixer(?=\.(q|k|v|o|in|out)_proj))(\.|$)", re.IGNORECASE
)
"Layers that mix tokens, recurrent ones and short convolutions among them; NemotronH calls any part of a block mixer."
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
"Routers: an adapter would change which experts a token visits."
_GATES = re.compile(r"(^|\.)(in_proj_(a|b|ba)|a_proj|b_proj)$")
"Decay and rate of recurrent layers: they have one output a head, often fewer than an adapter's rank."
_NOT_LOADED = (
    *("modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias"),
    *("layer_replication", "alora_invocation_tokens"),
    # LoRA's relatives: they compute something else with the same two factors.
    *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
)
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"The parameters with the matrices of all experts of a block, in the order in which peft wraps them."
_KEEPS_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")
_IN_BLOCK = re.compile(r"^(model\.)?(?P<layer>layers\.(?P<block>\d+)\..+)\.weight$")
"Models saved without a head lack the prefix. transformers ignores blocks with other names, which predict more tokens."
_EXPERT = re.compile(r"^(model\.)?(?P<layer>layers\.(?P<block>\d+)\..*\bexperts)\.0\.down_proj\.weight$")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"Config fields with the number of routed experts of a block."
MIXTURES = ("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "dots1")
"Architectures whose files have the names of the live model, but a matrix for each expert."
AS_STORED = (
    *("gemma2", "phi", "phi3", "cohere", "cohere2", "granite", "hyperclovax", "ministral3", "granite_swa"),
    *("mimo_v2_flash", "lfm2", "bamba", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
)
"Other architectures whose files have the layers of the live model, by their names."
PER_EXPERT = {
    **dict.fromkeys(MIXTURES, ("mlp", "gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}
"Architecture -> its block with experts, and an expert's gate, up and down projection, as files name them."


def target_layers(
    shapes: Mapping[str, tuple[int, int]],
    config: AdapterConfig,
    head: str = "lm_head",
    experts: Collection[str] = (),
) -> list[str]:
    """Return the names of the layers that get an adapter, in the order of the model.

    Args:
        shapes: name of each linear layer in the model's blocks -> its outputs and inputs.
        head: name of the output projection.
        experts: which of the names are experts of a mixture, all those of a block.

    Raises:
        ConfigError: a target is no such layer, or smaller than the rank; or a method that experts do not have.
    """
    common = [
        name
        for name in shapes
        if not (ROUTER.search(name) or _GATES.search(name)) and (config.experts or name not in experts)
    ]
    found: set[str] = set()
    for target in config.targets:
        if target == "all-linear":
            chosen = common
        elif target in ADAPTER_GROUPS:
            chosen = [name for name in common if bool(_ATTENTION.search(name)) == (target == "attention")]
        else:
            chosen = [name for name in shapes if f".{name}".endswith(f".{target}")]
        if not chosen:
            raise _no_target(target, shapes, head)
        found |= {*chosen}
    ordered = [name for name in shapes if name in found]
    without = {"adapter.dropout": config.dropout, "adapter.method=dora": config.method == "dora"}
    if (wrong := [key for key, given in without.items() if given]) and (adapted := found & {*experts}):
        raise config_error("experts with such adapters", name=min(adapted), wrong=wrong[0])
    small = min(ordered, key=lambda name: min(shapes[name]))
    if config.rank > min(shapes[small]):
        outputs, inputs = shapes[small]
        raise config_error(
            "rank above a layer", rank=config.rank, small=small, inputs=inputs, outputs=outputs, most=min(shapes[small])
        )
    return ordered


def _no_target(target: str, shapes: Mapping[str, object], head: str) -> ConfigError:
    """Return the error of a target that is no layer of the blocks."""
    if target == head:
        return ConfigError(f"adapter.targets: {target} is the head, which gets no adapter: leave it out")
    if "," in target:
        parts = ", ".join(part.strip() for part in target.split(","))
        return ConfigError(f"adapter.targets: {target} is one name with commas: write a list, [{parts}]")
    last = sorted({name.rpartition(".")[2] for name in shapes})
    near = "" if target in ADAPTER_GROUPS else did_you_mean(target, [*ADAPTER_GROUPS, *last, *shapes], "")
    hint = near or (f"There are {', '.join(last)}" if last else "It has none: adapter=null trains all weights")
    return ConfigError(f"adapter.targets: {target} is no linear layer in the blocks of the model. {hint}")


def known_shapes(model: ModelConfig) -> tuple[dict[str, tuple[int, int]], set[str]] | None:
    """Return the outputs and inputs of the linear layers in the blocks of a model by the headers of its files, and
    which of the names are experts; None: not known before it is loaded. The fields of its config tell them where only
    that is in the hub's cache."""
    fields = model_files.fields_of(model)
    folder = model_files.folder_of(resolve(model.path or ""), model.revision)
    if fields is None or fields.get("model_type") not in (*model_files.GATED, *MIXTURES, *AS_STORED) or folder is None:
        return None
    try:
        shapes = model_files.shapes_in(folder)
    except ConfigError:
        if os.path.isdir(model.path or ""):
            raise
        return None  # the start continues an interrupted download
    if not shapes and model_files.of_fields(fields) is not None:
        return _shapes_of_fields(fields), set()
    found: dict[str, tuple[int, int]] = {}
    experts: set[str] = set()
    blocks, fused = fields.get("num_hidden_layers", math.inf), False
    for name, shape in shapes.items():
        expert = _EXPERT.match(name)
        layer = expert or _IN_BLOCK.match(name)
        if layer is None:
            fused |= ".experts." in name
        elif int(layer["block"]) < blocks and (expert or (len(shape) == 2 and ".experts." not in name)):
            found[f"model.{layer['layer']}"] = (shape[0], shape[1])
            experts |= {f"model.{layer['layer']}"} if expert else set()
    return (found, experts) if found and (experts or not fused) else None


def _shapes_of_fields(fields: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return what known_shapes does by the config of an architecture of GATED."""
    hidden, inner, heads = (fields[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = fields.get("head_dim") or hidden // heads
    query = heads * head_dim
    key = (fields.get("num_key_value_heads") or heads) * head_dim
    attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    block = {f"self_attn.{name}": shape for name, shape in attention.items()}
    block |= {f"mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")} | {"mlp.down_proj": (hidden, inner)}
    layers = range(fields["num_hidden_layers"])
    return {f"model.layers.{i}.{name}": shape for i in layers for name, shape in block.items()}


def num_factor_elements(model: ModelConfig, config: AdapterConfig, several: Sequence[NamedAdapter] = ()) -> int:
    """Return the elements of the factors that a recipe adds to a model, of all experts and of all of several adapters;
    0: its layers are not known before it is loaded, or a rule rejects the targets."""
    with suppress(ConfigError):
        if (known := known_shapes(model)) is None:
            return 0
        shapes, experts = known
        fields = model_files.fields_of(model) or {}
        count = next((fields[name] for name in EXPERT_COUNTS if fields.get(name)), 0)
        columns = 0  # inputs and outputs of all layers: elements for each rank
        for name in target_layers(shapes, replace(config, rank=1), experts=experts):
            outputs, inputs = shapes[name]
            # An expert has the products gate_up and down.
            columns += count * (2 * outputs + 3 * inputs) if name in experts else outputs + inputs
        return columns * sum(one.rank or config.rank for one in several or (NamedAdapter(name=""),))
    return 0


@dataclass(frozen=True)
class AdapterFiles:
    """A folder with an adapter: one of our runs', or of peft."""

    folder: Path
    base: ModelConfig
    "the model that it belongs to"
    rank: int
    scale: float
    "factor of what it adds"
    dora: bool
    digest: str | None
    "of the weights of its model, as our manifest has it; None: not known"
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    "name of embedding or head -> tokens whose rows are trained (models/token_rows.py)"
    experts: bool = False
    "whether experts of a mixture have adapters too"


def adapter_in(folder: Path, model: ModelConfig, *, with_base: bool = True) -> AdapterFiles | None:
    """Return the adapter in a folder; None: there is a whole model too.

    Args:
        model: whose other settings its base has.
        with_base: whether the base must be where the adapter says.

    Raises:
        ConfigError: an adapter that is not loaded here, or whose base is not there.
    """
    path = folder / ADAPTER_CONFIG
    if (folder / "config.json").is_file():
        return None
    if not (folder / ADAPTER_WEIGHTS).is_file():
        if (pickled := folder / ADAPTER_WEIGHTS.replace(".safetensors", ".bin")).is_file():
            cure = f"It is not loaded here. Merge it: {merge_command(folder)}"
            raise ConfigError(f"{pickled}: an adapter in the older format of torch.save. {cure}")
        raise ConfigError(f"{folder}: no {ADAPTER_WEIGHTS} next to {ADAPTER_CONFIG}. {model_files.COPY_AGAIN}")
    found = model_files.json_object(path)
    parameters = {str(name).rpartition(".")[2] for name in found.get("target_parameters") or ()}
    kind = str(found.get("peft_type"))
    cure = f"Merge it: {merge_command(folder)}"
    if kind != "LORA":
        raise ConfigError(f"{path}: peft_type {kind}: only adapters of the type LORA are loaded. {cure}")
    odd = {
        "bias": found.get("bias", "none") != "none",
        **{name: bool(found.get(name)) for name in _NOT_LOADED},
        # Each of the parameters of experts has a separate wrapper in peft, so one alone has the other's name. The
        # weight of a linear layer has the factors that the layer has.
        "target_parameters": parameters - {"weight"} not in (set(), {*EXPERT_WEIGHTS}),
        # Some kinds of start (pissa, olora, corda, loftq) also change the weights under the adapter.
        "init_lora_weights": found.get("init_lora_weights", True) not in _KEEPS_WEIGHTS,
    }
    if wrong := [name for name, given in odd.items() if given]:
        raise ConfigError(f"{path}: {wrong[0]}={found[wrong[0]]!r} is not loaded here. {cure}")
    given: list[Any] = [found.get(key) for key in ("r", "lora_alpha", "base_model_name_or_path")]
    rank, alpha, base = given
    numbers = isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float) and math.isfinite(alpha)
    if not (numbers and isinstance(base, str) and base):
        raise ConfigError(f"{path}: needs r, lora_alpha and base_model_name_or_path. {model_files.COPY_AGAIN}")
    try:
        nested = with_base and (Path(resolve(base)) / ADAPTER_CONFIG).is_file()
    except ConfigError as error:
        cure = f"Start in the folder where the training was started (here: {Path.cwd()}), or move the model back there"
        if Path(base).is_absolute():
            cure = "Move the model back there, or write its new folder into that file"
        raise config_error("no model under the adapter", path=path, base=base, cure=cure) from error
    if nested:
        cure = f"{invocation('scripts/export.py', base, '--merge', '--out', 'DIR')}, and name DIR there"
        raise ConfigError(f"{path}: base_model_name_or_path: {base} is an adapter itself: merge that one: {cure}")
    scale = alpha / (math.sqrt(rank) if found.get("use_rslora") else rank)
    return AdapterFiles(
        folder,
        replace(model, path=base, revision=found.get("revision"), tokenizer=None),
        rank,
        scale,
        bool(found.get("use_dora")),
        read_base_digest(folder),
        _token_ids(folder / ADAPTER_WEIGHTS, found.get("trainable_token_indices")),
        parameters >= {*EXPERT_WEIGHTS},
    )


def check_adapter(files: AdapterFiles, folder: Path | None) -> list[str]:
    """Return the names of the layers that have factors, experts also with base_layer behind theirs. Reject an
    adapter that is not whole, or does not belong to its model, as far as headers and digests tell.

    Args:
        folder: with the weights of its model; None, or none on this machine: only the adapter's file and the shapes of
            the model are looked at.
    """
    path = files.folder / ADAPTER_WEIGHTS
    cure = f"merge it: {merge_command(files.folder)}"
    wanted = {"A.weight", "B.weight", *(["magnitude_vector"] if files.dora else [])}
    there: dict[str, dict[str, list[int]]] = {}
    for key, tensor in model_files.header_of(path).items():
        if (own := name_in_model(key)).removesuffix(TRAINED_ROWS) in files.tokens:
            continue
        name, _, factor = own.rpartition(".lora_")
        if not name or tensor["dtype"] not in model_files.FLOATS:
            raise ConfigError(f"{path}: {key} ({tensor['dtype']}) is no factor that is loaded here: {cure}")
        there.setdefault(name, {})[factor] = tensor["shape"]
    if not there:
        raise ConfigError(f"{path}: it holds no adapter, so its model would be used alone. {model_files.COPY_AGAIN}")
    known = known_shapes(files.base)
    for name, found in there.items():
        if different := sorted(found.keys() ^ wanted):
            word = f"not loaded here: {cure}" if different[0] in found else f"missing. {model_files.COPY_AGAIN}"
            raise ConfigError(f"{path}: {PEFT_PREFIX}{name}.lora_{different[0]} is {word}")
        if (known is None and files.experts) or (known is not None and name.removesuffix(".base_layer") in known[1]):
            continue  # factors of all experts are in one tensor
        outputs, inputs = found["B.weight"][:1], found["A.weight"][1:]
        if known is not None and _IN_BLOCK.match(f"{name}.weight"):
            if name not in known[0]:
                raise config_error("layer of another model", files=files, path=path, name=name)
            outputs, inputs = ([size] for size in known[0][name])
        right = {"A.weight": [files.rank, *inputs], "B.weight": [*outputs, files.rank], "magnitude_vector": outputs}
        for factor, shape in found.items():
            if shape != (here := right[factor]):
                factor = f"{path}: {name}.lora_{factor}"
                raise config_error("factor of another shape", files=files, factor=factor, there=shape, here=here)
    if folder and files.digest and folder.is_dir() and (digest := base_digest(folder)) != files.digest:
        raise config_error("adapter of other weights", files=files, path=files.base.path, found=digest)
    return [*there]


def _token_ids(file: Path, given: Any) -> dict[str, tuple[int, ...]]:
    """Return name of embedding or head -> the tokens whose rows an adapter holds.

    Args:
        given: what adapter_config.json says: ids of the embedding's tokens, or the last parts of names -> ids.

    Raises:
        ConfigError: the files do not fit each other.
    """
    if not given:
        return {}
    header = model_files.header_of(file)
    names = {n: name_in_model(n).removesuffix(TRAINED_ROWS) for n in header if n.endswith(TRAINED_ROWS)}
    found = {}
    for key, name in names.items():
        lists = (
            [ids for last, ids in given.items() if name.endswith(name_in_model(last))]
            if isinstance(given, dict)
            else [given]
        )
        ids = tuple(lists[0]) if lists and isinstance(lists[0], list) else ()
        if len(ids) != header[key]["shape"][0] or not all(type(one) is int and one >= 0 for one in ids):
            raise config_error("other rows of an adapter", file=file, key=key, given=given)
        found[name] = ids
    if not found:
        raise config_error("no rows of an adapter", file=file, given=given)
    return found


def belongs_to(base: ModelConfig, digest: str | None) -> dict[str, str | None]:
    """Return what a manifest says of the model that an adapter belongs to: hub id or folder, commit, digest."""
    return {"path": base.path, "revision": base.revision, "sha256": digest}


def base_digest(folder: Path) -> str:
    """Return the digest of the weights of a model's folder.

    Raises:
        ConfigError: it has none that are known here.
    """
    files = model_files.weight_files(folder) or sorted(folder.glob("*.bin"))
    if not files:
        raise ConfigError(f"{folder}: no weights in it (safetensors or .bin), so adapters could not name their model")
    return digest_of_files(folder, files)


def merge_command(folder: Path) -> str:
    """Return the command that merges an adapter into its model with peft, in a folder next to it, with the tokenizer:
    peft does not write that of the model."""
    own = (folder / "tokenizer_config.json").is_file()
    tokenizer = folder if own else model_files.json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    names = "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T"
    code = f"M.from_pretrained('{folder}').merge_and_unload().save_pretrained('{folder}-merged')"
    code += f"; T.from_pretrained('{tokenizer}').save_pretrained('{folder}-merged')"
    return f'python -c "{names}; {code}" and name {folder}-merged'


def scale_of(config: AdapterConfig) -> float:
    """Return the factor of what an adapter adds."""
    return config.alpha / (math.sqrt(config.rank) if config.scaling == "rslora" else config.rank)


def check_continued(files: AdapterFiles, config: AdapterConfig, layers: Collection[str] | None = None) -> None:
    """Reject settings that are not those of the adapter which training continues.

    Args:
        layers: names of the layers that get an adapter; None: not known yet.
    """
    method = "dora" if files.dora else "lora"
    if (method, files.rank, files.scale) != (config.method, config.rank, scale_of(config)):
        words = {"method": method, "scale": scale_of(config), "alpha": files.scale * files.rank}
        raise config_error("other adapter than continued", files=files, config=config, **words)
    names = {name_in_model(key).partition(".lora_")[0] for key in model_files.header_of(files.folder / ADAPTER_WEIGHTS)}
    there = {name.removesuffix(".base_layer") for name in names}  # of experts, which have two pairs
    if layers is not None and (odd := sorted({n for n in there if TRAINED_ROWS not in n} ^ {*layers})):
        where = "only in the files" if odd[0] in there else "not in the files"
        raise ConfigError(f"adapter.targets: {odd[0]} is {where} of {files.folder}: set the layers of that adapter")


def adapter_words(adapter: Mapping[str, Any], several: int = 0) -> str:
    """Return an adapter's settings in words; those that a file lacks are the defaults. `several`: their number."""
    own = asdict(AdapterConfig()) | {**adapter}
    targets = own["targets"] if isinstance(own["targets"], str) else ", ".join(own["targets"])
    base = " over layers in NF4" if own["base"] == "nf4" else ""
    if several:
        return f"{several} {own['method']} adapters on {targets}{base}"
    return f"{own['method']} adapter, rank {own['rank']}, alpha {own['alpha']:g} ({own['scaling']}), on {targets}{base}"
