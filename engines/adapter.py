"""The LoRA that is trained: a PEFT adapter on the policy's model whose weights are views of one flat vector.

Its linears can keep every candidate's own weight gradient apart during one backward of the whole batch, where autograd
would only give their sum. Used by replay, the optimizer and checkpoints.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from asyncflow.errors import CheckpointError, ModelError

NAME = "policy"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
BLOCK_LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rank, scale `alpha / rank`, and the linears it is put on (by default all of every block, as in LongLive)."""

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = BLOCK_LINEARS


class GradientSum(NamedTuple):
    """What a backward adds to: `total` [B, P], which may be a view, gets `weights` [B] (else 1) times each gradient."""

    total: Tensor
    weights: Tensor | None = None


class _Recorder:
    """What the linears of one adapter share: whether a forward is recorded, and the sums of the backward under way."""

    recording = False
    sums: Sequence[GradientSum] = ()

    def add(self, slot: slice, gradient: Tensor) -> None:
        """Add each candidate's gradient of one linear, [B, out, in]."""
        for total, weights in self.sums:
            target = total[:, slot].unflatten(1, gradient.shape[1:])
            target += gradient if weights is None else gradient * weights[:, None, None]


class _CandidateLinearFunction(torch.autograd.Function):
    """`F.linear`, whose backward keeps weight gradients apart: the sum over a candidate's tokens of grad[n]^T x[n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, slot: slice, recorder: _Recorder) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.slot, ctx.recorder = slot, recorder
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.recorder.add(ctx.slot, torch.bmm(grad.flatten(1, -2).transpose(1, 2), x.flatten(1, -2)))
        return (grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None), None, None, None


class CandidateLinear(nn.Linear):
    """A LoRA factor, float32 whatever the dtype it computes in; an ordinary linear unless gradients are recorded."""

    def __init__(self, in_features: int, out_features: int, slot: slice, recorder: _Recorder) -> None:
        super().__init__(in_features, out_features, bias=False)
        self._slot = slot
        self._recorder = recorder

    def forward(self, x: Tensor) -> Tensor:
        if not self._recorder.recording:
            return F.linear(x, self.weight.to(x.dtype))
        output: Tensor = _CandidateLinearFunction.apply(x, self.weight, self._slot, self._recorder)
        return output


class Adapter:
    """A LoRA named "policy" on `model`, put there in place.

    `vector` [P] float32 holds all its weights (for each linear in the model's order: A, then B); a change of it in
    place is a change of the model. A is drawn from `seed` alone, on the CPU; B is zero. The model must be on its device
    already: moving it later would part the weights from the vector.
    """

    def __init__(self, model: WanTransformer3DModel, settings: AdapterSettings, seed: int) -> None:
        self.settings = settings
        self.model = model
        self._recorder = _Recorder()
        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=list(settings.targets),
            init_lora_weights=False,
        )
        try:
            model.add_adapter(self._config, adapter_name=NAME)
        except ValueError as error:
            raise ModelError(f"No linear of the model is named by the LoRA targets {settings.targets}.") from error
        layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        self._shapes: dict[str, torch.Size] = {}
        for name, layer in layers.items():
            for factor in ("lora_A", "lora_B"):
                self._shapes[f"{name}.{factor}.weight"] = getattr(layer, factor)[NAME].weight.shape
        self.size = sum(shape.numel() for shape in self._shapes.values())
        self.vector = nn.Parameter(torch.zeros(self.size, device=model.device))
        offset = 0
        for layer in layers.values():
            # Factors compute in the activations' dtype; PEFT would cast those to the weights' float32 first.
            layer.cast_input_dtype_enabled = False
            for factors in (layer.lora_A, layer.lora_B):
                offset = self._replace(factors, offset)
        self._draw(seed)

    def _replace(self, factors: nn.ModuleDict, offset: int) -> int:
        shape = cast(nn.Linear, factors[NAME]).weight.shape
        slot = slice(offset, offset + shape.numel())
        linear = CandidateLinear(shape[1], shape[0], slot, self._recorder)
        linear.weight = nn.Parameter(self.vector.data[slot].view(shape))
        factors[NAME] = linear
        return slot.stop

    def _draw(self, seed: int) -> None:
        """PEFT's default initialisation, but the same bits on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self._named_weights(self.vector.data).items():
            if name.endswith("lora_A.weight"):
                drawn = nn.init.kaiming_uniform_(torch.empty(weight.shape), a=math.sqrt(5), generator=generator)
                weight.copy_(drawn)

    def _named_weights(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def flatten(self) -> Tensor:
        """A copy of all weights [P], float32."""
        return self.vector.detach().clone()

    def assign(self, vector: Tensor) -> None:
        """Set all weights from a vector [P]."""
        assert vector.shape == self.vector.shape
        self.vector.data.copy_(vector)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Forwards and backwards inside keep candidates' weight gradients apart, for `backward`."""
        assert not self._recorder.recording
        self._recorder.recording = True
        try:
            yield
        finally:
            self._recorder.recording = False

    def backward(self, values: Tensor, sums: Sequence[GradientSum], *, keep_graph: bool = False) -> None:
        """Add the gradient of each candidate's value, of `values` [B], to its row of each of the `sums`.

        The values come from a forward that was recorded. The model's parameters get no `.grad`.
        """
        self._recorder.sums = sums
        try:
            values.sum().backward(retain_graph=keep_graph)
        finally:
            self._recorder.sums = ()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Forwards inside are the frozen model's."""
        self.model.disable_adapters()
        try:
            yield
        finally:
            self.model.enable_adapters()

    def save(self, folder: Path) -> None:
        """Write the adapter in PEFT's layout. Stock diffusers 0.42 loads it, scale included, with

        model.load_lora_adapter(folder, prefix="base_model.model", weight_name="adapter_model.safetensors")

        The weights appear whole or not at all. Raises `CheckpointError` where they cannot be written.
        """
        # diffusers takes alpha from the header of the weights and reads no adapter_config.json.
        config = {
            PREFIX + name: sorted(value) if isinstance(value, set) else value
            for name, value in self._config.to_dict().items()
        }
        tensors = {PREFIX + name: tensor.cpu() for name, tensor in self._named_weights(self.flatten()).items()}
        header = {"format": "pt", "lora_adapter_metadata": json.dumps(config, sort_keys=True)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._config.save_pretrained(str(folder))
            save_file(tensors, folder / WEIGHTS_FILE, metadata=header)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder}: cannot write the adapter: {error}; make room or give another --out"
            ) from error

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote. Raises `ModelError` where rank, alpha, targets or shapes differ."""
        try:
            config = json.loads((folder / CONFIG_FILE).read_text())
            tensors = load_file(folder / WEIGHTS_FILE)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"{folder} holds no readable adapter ({CONFIG_FILE}, {WEIGHTS_FILE}): {error}") from error
        found = (config.get("r"), config.get("lora_alpha"), sorted(config.get("target_modules", ())))
        expected = (self.settings.rank, self.settings.alpha, sorted(self.settings.targets))
        if found != expected:
            raise ModelError(f"The adapter in {folder} has (rank, alpha, targets) {found}; this run has {expected}.")
        weights = self._named_weights(self.vector.data)
        if {name: tensor.shape for name, tensor in tensors.items()} != {
            PREFIX + n: w.shape for n, w in weights.items()
        }:
            raise ModelError(
                f"The tensors of the adapter in {folder} do not fit this model; train it on its own model."
            )
        for name, weight in weights.items():
            weight.copy_(tensors[PREFIX + name])
