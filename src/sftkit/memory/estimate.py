"""Estimate the peak memory of a step from model, rows and settings.

No torch in this file: commands use it before they start a run.
"""

from dataclasses import dataclass, field, fields, replace

from sftkit.config.tables import BYTES, OPTIMIZERS
from sftkit.config.topology import Sharding, Topology
from sftkit.data.batches.pack import Layout
from sftkit.models.files import GIB, NF4_BYTES

CONTEXT_BYTES = int(0.7 * GIB)
"""CUDA context, loaded kernels and workspaces of libraries; the allocator does not count them, since they are
not tensors.
"""
USABLE = 0.92
"Share of a GPU that an estimate may fill: the rest is for fragmentation of the allocator."
BUDGETS = {"speed": 0.9, "balanced": 0.5, "low": 0.1}
"Activation memory budget for each train.memory. At 0.9 only elementwise results are recomputed: as fast as 1.0."
SHARDINGS = (
    Sharding(keep_weights=True, keep_gradients=True),
    Sharding(keep_weights=False, keep_gradients=True),
    Sharding(keep_weights=False, keep_gradients=False),
)
"Ordered from least communication to least memory."


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine its memory, in elements."""

    parameters: int
    ends: int
    "parameters outside the blocks: embedding, head, final norm"
    matrices: int
    "parameters in matrices of blocks, which an optimizer may treat differently"
    blocks: int
    hidden: int
    query: int
    "width of all query heads together"
    key: int
    "width of all key heads together; the values have the same width"
    inner: int
    "ffn_dim of the feed-forward layer; with experts, the sum over those that see a token"
    head_dim: int
    vocab: int
    frozen: int = 0
    "of the parameters: without gradients and states"
    frozen_ends: int = 0
    frozen_matrices: int = 0
    nf4: int = 0
    "of the frozen matrices: in 4 bits"
    frozen_head: bool = False
    forward_blocks: int = 0
    "first blocks that no backward pass goes through: they keep no activations"

    @property
    def trained(self) -> int:
        """Return the parameters that have gradients and states."""
        return self.parameters - self.frozen


@dataclass(frozen=True)
class EstimateInputs:
    """The inputs of the estimate."""

    shape: Shape
    layout: Layout
    optimizer: str
    precision: str
    chunk_tokens: int
    budget: float
    "activation memory budget; ignored without compilation"
    compiled: bool
    checkpointing: bool
    "whether transformers' gradient checkpointing is on"
    dense_mask: bool = False
    "whether attention holds a dense mask: the backend is reference"
    topology: Topology = field(default_factory=Topology)
    sharding: Sharding = field(default_factory=Sharding)
    "how sharded ranks gather weights and exchange gradients"
    stage_layers: tuple[int, ...] = ()
    "number of layers of each stage of a pipeline"
    schedule: str = "1f1b"
    "schedule of a pipeline"
    encoder: Shape | None = None
    "sizes of the encoder; None: the model has none"
    encoded_length: int = 0
    "positions of one encoder input; 0: the model has no encoder"

    @property
    def encoded(self) -> int:
        """Return the positions that the encoder computes in a micro-batch, empty places included."""
        return max(rows for rows, _ in self.layout.shapes) * self.layout.docs_per_row * self.encoded_length


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU at the peak of a step."""

    weights: int
    optimizer: int
    gradients: int
    "gradients that exist at the peak: those of earlier micro-batches, communication buckets, or all at the end"
    gradient_sums: int
    "fp32 sums of the gradients of earlier micro-batches"
    activations: int
    transient: int
    "the larger of the loss with its chunk of logits, and the backward pass of a block with attention's workspace"
    context: int = CONTEXT_BYTES

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def tensors(self) -> int:
        """Return the bytes that the allocator counts: all except the CUDA context."""
        return self.total - self.context


def kept_elements(s: EstimateInputs) -> float:
    """Return the elements of a block's saved activations per token, kept for its backward pass.

    Counted on graphs of compiled Qwen3 blocks (0.6B, 1.7B, 8B; torch 2.13) and accurate to 2 %, with two exceptions:
    at budgets 0.3 and 0.5 the partitioner keeps 3 to 8 % less, and for 0.6B at 0.75 it keeps 28 % less. Other
    architectures are assumed to be similar.
    """
    m = s.shape
    rotary = 2 * m.head_dim
    # The input of the block and the sines and cosines of positions: recomputation starts from them, so they are kept.
    least = m.hidden + rotary
    everything = _all_elements(s)
    if s.checkpointing:
        return least
    if not s.compiled or s.budget >= 1.0:
        return everything
    # Elementwise results are recomputed first, at next to no cost.
    without_pointwise = 2 * m.hidden + 3 * m.query + 3 * m.key + 2 * m.inner + rotary
    return min(without_pointwise, least + s.budget * (everything - least))


def _all_elements(s: EstimateInputs) -> int:
    """Return the elements that a block keeps per token without recomputation.

    Eager norms, activations and rotations keep their intermediate results.
    """
    m = s.shape
    a, b, c = (4, 3, 3) if s.compiled else (8, 5, 4)
    return a * m.hidden + b * (m.query + m.key) + c * m.inner + 2 * m.head_dim


def estimate(s: EstimateInputs) -> Estimate:
    """Return the peak of one rank's step: at the start of the backward pass, or at its end, when all gradients exist.

    In between, activations shrink and gradients grow, both linearly, so the peak is at one of the two ends. Replicas
    hold all parameters, and gradient buckets from the start; see `_sharded` for sharded ranks.
    """
    m, width = s.shape, BYTES[s.precision]
    # The ranks of a row divide its positions among them.
    tokens = max(rows * row_length for rows, row_length in s.layout.shapes) // s.topology.ranks_per_row
    if s.topology.stages > 1:
        return max(pipeline_estimates(s), key=lambda place: place.total)
    if s.topology.sharded:
        return _sharded(s, tokens)
    # DDP allocates all its buckets at the start, before any gradient exists.
    gradients = width * m.trained
    buckets = gradients if s.layout.world_size > 1 else 0
    earlier = m.trained * earlier_gradient_width(s.layout, s.precision)
    sums = earlier if sums_in_fp32(s.layout, s.precision) else 0
    last = 0 if buckets and s.layout.accumulation == 1 else gradients  # 0: gradients are views of the buckets
    head = 0 if m.frozen_head else width * m.vocab * m.hidden
    # The head's gradient is the first of a backward pass, and stays during the backward pass of the blocks.
    block = tokens * _block_bytes_per_token(s) + _mask_bytes(s)
    if s.encoder is not None:
        block = max(block, s.encoded * _block_bytes_per_token(replace(s, shape=s.encoder)))
    block += width * m.hidden * m.inner if m.nf4 else 0  # the largest matrix, dequantized
    at_start = Estimate(
        _weight_bytes(s),
        _state_bytes(s),
        gradients=buckets + earlier - sums,
        gradient_sums=sums,
        activations=int(width * (tokens * _kept_blocks(m) * kept_elements(s) + _encoder_elements(s, tokens))),
        transient=int(max(_loss_bytes(s, tokens), head + block)),
    )
    at_end = replace(at_start, gradients=buckets + last, activations=0, transient=int(max(head, block)))
    return max(at_start, at_end, key=lambda moment: moment.total)


def _kept_blocks(shape: Shape) -> int:
    """Return the number of blocks that keep activations for a backward pass."""
    return shape.blocks - shape.forward_blocks


def _encoder_elements(s: EstimateInputs, tokens: int) -> float:
    """Return the elements saved for an encoder: its own activations and the decoder's attention to them.

    The latter are keys and values of encoded positions in each block, which no budget recomputes more cheaply, and
    queries, outputs and a norm of the decoder's own tokens.
    """
    if s.encoder is None:
        return 0.0
    own = s.encoded * _kept_blocks(s.encoder) * kept_elements(replace(s, shape=s.encoder))
    return own + s.shape.blocks * (2 * s.shape.key * s.encoded + (2 * s.shape.query + s.shape.hidden) * tokens)


def held_bytes(s: EstimateInputs) -> int:
    """Return the bytes of weights, gradients and optimizer states that a rank holds with any rows: a lower bound for
    a step.
    """
    if s.topology.stages > 1:
        whole = replace(s, topology=replace(s.topology, stages=1))
        shapes = [pipeline_rank_shape(s, place) for place in range(s.topology.stages)]
        return max(held_bytes(replace(whole, shape=shape)) for shape in shapes)
    # A gradient is as wide as its weight.
    shards = s.topology.shards * s.topology.ranks_per_row if s.topology.sharded else 1
    return (_weight_bytes(s) + BYTES[s.precision] * s.shape.trained + _state_bytes(s)) // shards


def _weight_bytes(s: EstimateInputs) -> int:
    """Return the bytes of all weights."""
    return BYTES[s.precision] * (s.shape.parameters - s.shape.nf4) + int(NF4_BYTES * s.shape.nf4)


def _sharded(s: EstimateInputs, tokens: int) -> Estimate:
    """Return the peak of a rank that holds a shard of every weight, gradient and state, and gathers weights to
    use them.

    The gathered weights are either all weights, or a block, the next one, and embedding or head. Gradients of earlier
    micro-batches are whole and fp32 if they are kept so. Gradients of the current pass exist for two blocks and
    embedding or head, with fp32 copies being exchanged.
    """
    m, t, width = s.shape, s.topology, BYTES[s.precision]
    # All ranks of a replica divide the stored tensors. Gathered tensors are whole, except matrices, of which a tensor
    # rank uses its own part.
    shards = t.shards * t.context * t.tensor
    body = (m.parameters - m.ends) // t.tensor
    trained_end = m.ends - m.frozen_ends
    trained_body = (m.trained - trained_end) // t.tensor
    block, end = body // max(m.blocks, 1), m.ends
    # Tensor ranks without shards hold their parts of the blocks as they use them, and gather embedding and head.
    among_tensor_ranks = t.replicas * t.shards * t.context == 1
    blocks = 0 if among_tensor_ranks else body if s.sharding.keep_weights else 2 * block
    gathered = blocks + end
    # Gradients of earlier micro-batches: FSDP keeps them whole if the exchange waits for the last micro-batch,
    # otherwise as shards.
    earlier = s.layout.accumulation > 1
    whole_sums = 4 * (trained_body + trained_end) if earlier and s.sharding.keep_gradients else 0
    shard_sums = 4 * m.trained // shards if earlier and not s.sharding.keep_gradients else 0
    trained_block = trained_body // max(m.blocks, 1)
    on_their_way = (width + 4) * ((0 if among_tensor_ranks else 2 * trained_block) + trained_end)
    at_start = Estimate(
        weights=width * (m.parameters // shards + gathered),
        optimizer=_state_bytes(s) // shards,
        gradients=width * m.trained // shards,
        gradient_sums=whole_sums + shard_sums,
        activations=int(width * tokens * _kept_blocks(m) * kept_elements(s)),
        transient=int(max(_loss_bytes(s, tokens), tokens * _block_bytes_per_token(s) + _mask_bytes(s))),
    )
    at_end = replace(at_start, gradients=at_start.gradients + on_their_way, activations=0)
    return max(at_start, at_end, key=lambda moment: moment.total)


def pipeline_estimates(s: EstimateInputs) -> list[Estimate]:
    """Return the peak of each process of a pipeline: at the start of a backward pass or at the end of the step. An
    evaluation passes through the same stages.
    """
    return [_staged(s, place) for place in range(s.topology.stages)]


def _staged(s: EstimateInputs, pipeline_rank: int) -> Estimate:
    """Return the peak of the process at one pipeline rank."""
    m, width, pipeline_size = s.shape, BYTES[s.precision], s.topology.stages
    tokens, count = max(rows * row_length for rows, row_length in s.layout.shapes), s.layout.accumulation
    own = s.stage_layers[pipeline_rank::pipeline_size]
    first, last = pipeline_rank == 0, pipeline_rank == pipeline_size - 1
    shape = pipeline_rank_shape(s, pipeline_rank)
    # Activations of the micro-batches in flight, and the hidden states sent between stages.
    alone = replace(s, shape=shape)
    at_once: float = count if s.schedule == "gpipe" else min(count, pipeline_size - pipeline_rank)
    # Interleaved stages in Megatron-LM's order: each in turn, for as many micro-batches as there are processes.
    if len(own) > 1 and s.schedule != "gpipe":
        at_once = min(count, (2 * (pipeline_size - pipeline_rank - 1) + (len(own) - 1) * pipeline_size + 1) / len(own))
    received = (2 * len(own) - first - last) * count * tokens * m.hidden
    hidden = int(width * (at_once * tokens * shape.blocks * kept_elements(alone) + received))
    # Weights, gradients and states of the stages that the process holds.
    weights = gradients = width * shape.parameters
    sums = 4 * shape.parameters if sums_in_fp32(s.layout, s.precision) else 0
    block = tokens * _block_bytes_per_token(s) + _mask_bytes(s)
    loss = _loss_bytes(s, tokens) if last else 0
    head = width * m.vocab * m.hidden
    states = _state_bytes(alone)
    earlier = 0 if sums or count == 1 else gradients
    # Sharded: weights are gathered for the whole step, gradients of its micro-batches are whole and fp32 until
    # its end.
    if s.topology.sharded:
        shards = s.topology.shards
        states, gradients = states // shards, gradients // shards
        weights, sums = weights + weights // shards, 4 * shape.parameters if count > 1 else 0
        earlier = 0
    at_start = Estimate(weights, states, earlier, sums, hidden, int(max(loss, block + (head if first or last else 0))))
    at_end = replace(at_start, gradients=gradients, activations=width * received, transient=int(block))
    return max(at_start, at_end, key=lambda moment: moment.total)


def pipeline_rank_shape(s: EstimateInputs, pipeline_rank: int) -> Shape:
    """Return the sizes of the part of the model that a pipeline rank holds."""
    m, places = s.shape, s.topology.stages
    blocks = sum(s.stage_layers[pipeline_rank::places])
    embedding = m.vocab * m.hidden
    # A tied weight exists on the first and the last process, but the model counts it once.
    ends = embedding if pipeline_rank == 0 else 0
    ends += max(m.ends - embedding, embedding) if pipeline_rank == places - 1 else 0
    share = blocks / m.blocks
    parameters = round((m.parameters - m.ends) * share) + ends
    sizes = replace(m, parameters=parameters, ends=ends, matrices=round(m.matrices * share), blocks=blocks)
    return replace(sizes, frozen=0, frozen_ends=0, frozen_matrices=0, forward_blocks=0)  # see config.rules


def sums_in_fp32(layout: Layout, precision: str) -> bool:
    """Return whether engine.step.GradientSum adds up the gradients of earlier micro-batches."""
    return layout.accumulation > 2 and precision == "bf16"


def earlier_gradient_width(layout: Layout, precision: str) -> int:
    """Return the bytes per parameter of earlier micro-batches' gradients during a forward pass."""
    if layout.accumulation == 1:
        return 0
    return 4 if sums_in_fp32(layout, precision) else BYTES[precision]


def _state_bytes(s: EstimateInputs) -> int:
    """Return the bytes of all optimizer states."""
    spec, matrices = OPTIMIZERS[s.optimizer], s.shape.matrices - s.shape.frozen_matrices
    others = s.shape.trained - matrices
    return int(spec.state_width(s.precision) * matrices + spec.state_width(s.precision, block_matrix=False) * others)


def _loss_bytes(s: EstimateInputs, tokens: int) -> int:
    """Return the bytes of the loss: the head's fp32 gradient, next to the larger of a chunk of logits and that
    gradient's copy in the precision of the weights; and the last hidden states through the final norm, the choice of
    targets and their gradient.
    """
    m, width = s.shape, BYTES[s.precision]
    logits = width * min(s.chunk_tokens, tokens) * m.vocab
    head = 0 if m.frozen_head else m.vocab * m.hidden
    return max(logits, width * head) + 4 * head + 6 * width * m.hidden * tokens


def _block_bytes_per_token(s: EstimateInputs) -> float:
    """Return the bytes per token of the backward pass of one block.

    They hold recomputed activations, and gradients in the feed-forward layer or in attention, which repeats keys and
    values over the query heads and sums the query's gradient in fp32.
    """
    m, width = s.shape, BYTES[s.precision]
    feed_forward = width * (2 * m.hidden + 3 * m.inner)
    attention = width * (2 * m.hidden + 6 * m.query + 2 * m.key) + 4 * m.query
    return width * (_all_elements(s) - kept_elements(s)) + max(feed_forward, attention)


def _mask_bytes(s: EstimateInputs) -> int:
    """Return the bytes of the dense mask of backend reference, as bool and as a bias."""
    if not s.dense_mask:
        return 0
    encoded = s.layout.docs_per_row * s.encoded_length if s.layout.docs_per_row > 1 else 0  # positions of a row
    return max((1 + BYTES[s.precision]) * rows * t * (t + encoded) for rows, t in s.layout.shapes)


def gib(size: float) -> str:
    """Return a size in bytes as text, such as `31.4 GiB`."""
    return f"{size / GIB:.1f} GiB"
