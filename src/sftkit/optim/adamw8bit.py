"""torchao's 8-bit AdamW, adapted to the loop: learning rates as floats, the same random bits on every
rank, a warm-up.
"""

import torch
from torchao.optim import AdamW8bit as TorchaoAdamW8bit

from sftkit.config.schema import OptimConfig
from sftkit.optim import protocol
from sftkit.optim.protocol import Group, Groups, State
from sftkit.runtime.open import random_key


class AdamW8bit(TorchaoAdamW8bit):  # type: ignore[misc]  # torchao has no types
    """AdamW with 8-bit block-wise moments (arXiv 2110.02861); bf16 weights are rounded stochastically.

    torchao draws the rounding bits from the device's generator. Here the generator is seeded with (seed,
    updates) during a step, so that replicas stay equal, a resumed run repeats the bits, and other random
    numbers do not change.
    """

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], eps: float, seed: int = 0) -> None:
        """Create the optimizer for some parameter groups. `seed`: seed of the rounding bits."""
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, bf16_stochastic_round=True)
        self.seed = seed
        protocol.set_learning_rate(self.param_groups, lr)

    @property
    def kind(self) -> str:
        """Return the kind of states: see optim.protocol."""
        return protocol.optimizer_kind("AdamW8bit", self.param_groups)

    def update(self, learning_rate: float, coefficient: torch.Tensor) -> None:
        """Update as optim.protocol defines. The host reads the coefficient and the number of updates, so it waits."""
        protocol.set_learning_rate(self.param_groups, learning_rate)
        protocol.multiply_gradients(protocol.parameters_of(self.param_groups), coefficient)
        if not bool(coefficient.isnan()):
            self.step()

    def new_state(self, param: torch.Tensor, group: Group) -> State:
        """Return the states of a parameter before its first update, in 8 bits if it is large enough."""
        # Private, of torchao: the buffers that its step creates, by the size of this rank's shard (pytorch/ao#4912).
        new = self._new_buffer
        return {"step": torch.tensor(0.0), "exp_avg": new(param, signed=True), "exp_avg_sq": new(param, signed=False)}

    def step(self, closure: None = None) -> None:
        """Update with the learning rates of the groups. torchao wants them as tensors; the loop and checkpoints
        use floats.
        """
        assert closure is None
        updates = max((int(state["step"]) for state in self.state.values()), default=0)
        device = self.param_groups[0]["params"][0].device
        learning_rates = [float(group["lr"]) for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        on_cuda = device.type == "cuda"
        # torchao accepts no generator, so the device's own is seeded for the step and restored after it.
        with torch.random.fork_rng(devices=[device] if on_cuda else []):
            generator = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
            generator.manual_seed(random_key(self.seed, updates) >> 1)
            super().step()
        for group, learning_rate in zip(self.param_groups, learning_rates, strict=True):
            group["lr"] = learning_rate

    def warm_up(self, *, compiled: bool) -> None:
        """Compile for each distinct shape; this optimizer's tensors are not used.

        torchao's function has static shapes, and is compiled even in eager runs.
        """
        trained = ((p, group) for group in self.param_groups for p in group["params"] if p.requires_grad)
        kinds = {(p.shape, p.dtype, p.device, group["weight_decay"]): (p, group) for p, group in trained}
        for param, group in kinds.values():
            copy = torch.nn.Parameter(torch.zeros_like(param))
            copy.grad = torch.zeros_like(param)
            options = {"params": [copy], "weight_decay": group["weight_decay"]}
            AdamW8bit([options], group["lr"], group["betas"], group["eps"]).step()


def build(groups: Groups, optim: OptimConfig, *, seed: int) -> AdamW8bit:
    """Build the optimizer of optim.name=adamw8bit; torchao compiles its update in any case."""
    return AdamW8bit(groups, optim.lr, optim.betas, optim.eps, seed)
